#!/usr/bin/env bash
# Speed and memory of supernet training on this machine's GPUs, in under five minutes on one; needs no internet.
#
#   bash benchmarks/gpu.sh FOLDER
#
# Writes FOLDER/gpu.txt (what is printed) and FOLDER/*.json (every figure). PYTHON names the interpreter, SECONDS_IN_ALL
# the time that may be used (default 280): what does not fit is left out and said.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:?usage: bash benchmarks/gpu.sh FOLDER}
python=${PYTHON:-python}
limit=${SECONDS_IN_ALL:-280}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled PYTHONUNBUFFERED=1
status=0

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" -gt 0 ] || { echo "no GPU is visible to torch" >&2; exit 1; }
workers=$(( $(nproc) / gpus > 14 ? 14 : $(nproc) / gpus - 1 ))
[ "$workers" -gt 0 ] || workers=1

# step NAME ARGUMENT...: one call of train_step.py within what is left of the time.
step() {
  local name=$1 left=$((limit - SECONDS))
  shift
  printf '\n== %s (%d s of %d left)\n' "$name" "$left" "$limit"
  if [ "$left" -lt 20 ]; then
    echo "left out: no time"
    return
  fi
  timeout "$left" "$python" benchmarks/train_step.py --device cuda --workers "$workers" --timeout "$left" \
    --json "$folder/$name.json" "$@" || { echo "$name: status $?"; status=1; }
}

main() {
  "$python" - << 'EOF'
import platform, torch, timm, pytorch_lightning, importlib.metadata as m
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(f"{', '.join(names)}; Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
      f"timm {timm.__version__}, lightning {pytorch_lightning.__version__}, deepspeed {m.version('deepspeed')}")
EOF
  one="--processes 1 --block 5"
  # The most telling first: a case takes 30 to 40 s on an H100 machine, most of it starting. bf16 autocast is what the
  # recipes use; 32-true multiplies in TF32.
  step tiny-bf16 $one --sizes tiny --batch 256 --rounds 5 --precision bf16-mixed --strategies ddp --quick
  step base-bf16 $one --sizes base --batch 128 --rounds 3 --precision bf16-mixed --strategies deepspeed_stage_2 --quick
  step memory $one --sizes small --batch 64 --rounds 2 --precision bf16-mixed --memory
  step small-bf16 $one --sizes small --batch 192 --rounds 3 --precision bf16-mixed --strategies ddp --quick
  step tiny-tf32 $one --sizes tiny --batch 128 --rounds 3 --precision 32-true --strategies ddp --quick
  step base-zero $one --sizes base --batch 128 --rounds 3 --precision bf16-mixed --quick \
    --strategies deepspeed_stage_1 deepspeed_stage_3
  if [ "$gpus" -gt 1 ]; then
    step all-gpus --processes "$gpus" --block 5 --sizes base --batch 128 --rounds 3 --precision bf16-mixed
  fi
  printf '\n%d s in all; figures in %s\n' "$SECONDS" "$folder"
  return "$status"
}

main 2>&1 | tee "$folder/gpu.txt"
exit "${PIPESTATUS[0]}"
