"""Keys that the score command takes, as every command does, and makes no use of in the case at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tas.commands.config import Config

_NEVER = {
    "arch": "networks are those of bench.path, or sampled from the supernet",
    **dict.fromkeys(("phases", "train", "sampler", "select", "checkpoint"), "score trains nothing"),
    "scoring": "it is for fit; score reads bench",
    "trainer": "score trains nothing, and its processes are those that it is launched with",
}
_READ = frozenset({"trainer.accelerator", "trainer.deterministic"})


def without_effect(keys: Iterable[str], config: Config) -> Iterator[tuple[str, str]]:
    """(key, why) of those of `keys`, which the user set, that change nothing of this scoring."""
    reasons = dict(_NEVER)
    bench = config.bench
    if bench.path is not None:
        reasons |= dict.fromkeys(("space", "source"), f"the networks to score are those of bench.path, {bench.path!r}")
        reasons["bench.eval_batches"] = "accuracies are those of bench.path"
        reasons["model.bias_rule"] = "it is of supernets"
    else:
        reasons["bench.family"] = "it is of networks in a file"
        if config.source is None:
            reasons |= dict.fromkeys(("space", "model"), "ckpt names a run, which has its own")
    if bench.paper:
        paper = "bench.paper sets it for every proxy that has one in a paper"
        reasons |= dict.fromkeys(("bench.batch_size", "bench.zen_repeat"), paper)
    elif isinstance(bench.options, dict) and "repeat" in (bench.options.get("zen") or {}):
        reasons["bench.zen_repeat"] = "bench.options gives zen its repeat"
    for key in keys:
        if key in _READ:
            continue
        parts = key.split(".")
        found = [reasons[name] for name in (key, parts[0]) if name in reasons]
        if found:
            yield key, found[0]
