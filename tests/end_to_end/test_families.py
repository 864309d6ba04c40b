"""Supernets of other families than AutoFormer's go through the whole machine, from training to export."""

from __future__ import annotations

import json

import pytest
import timm
import torch

from lightning_tas.commands.entry import main
from lightning_tas.training.checkpoint import load_supernet

from .conftest import result

SPACES = {
    "pit": "{extends: autoprox_pit, base_dim: [4, 8], mlp_ratio: [1, 2], allocated: {base_dim: 8, mlp_ratio: 2}}",
    "autoprox_vit": (
        "{name: prox, family: autoprox_vit, embed_dim: [16, 32], depth: [1, 2], num_heads: [1, 2], mlp_ratio: [1, 2]}"
    ),
}
TRAIN = ("phases=[supernet,measure]", "sampler.name=sandwich")


@pytest.mark.slow
@pytest.mark.parametrize("family", SPACES)
def test_a_family_from_training_to_export(fit, tmp_path, capsys, family):
    status, folder = fit("run", *TRAIN, f"space={SPACES[family]}")
    assert status == 0, capsys.readouterr().err
    entries = {entry["label"]: entry for entry in result(folder)["architectures"]}
    assert list(entries) == ["smallest", "middle", "largest"]
    loaded = load_supernet(folder / "phases" / "00-supernet" / "checkpoints" / "final.ckpt")
    assert loaded.net.rules.family == family
    for label, arch in loaded.report.items():
        assert sum(p.numel() for p in loaded.net.subnet(arch).parameters()) == entries[label]["params"]

    assert main("evaluate", [f"ckpt={folder}"]) == 0
    measured = json.loads((folder / "evaluation.json").read_text())["architectures"]
    assert {e["label"]: e["metrics"]["top1"] for e in measured} == {k: v["metrics"]["top1"] for k, v in entries.items()}

    assert main("export", [f"ckpt={folder}", "arch=largest"]) == 0, capsys.readouterr().err
    exported = timm.create_model(f"local-dir:{folder / 'exported' / 'largest'}", pretrained=True).eval()
    x = torch.randn(2, exported.options["in_chans"], *exported.img_size)
    with torch.no_grad():
        assert torch.equal(exported(x), loaded.net(x, loaded.report["largest"]))

    status, alone = fit("alone", "phases=[retrain]", f"arch={folder}@middle", f"ckpt={folder}", "trainer.max_epochs=1")
    assert status == 0, capsys.readouterr().err
    assert result(alone)["architectures"][0]["arch"] == entries["middle"]["arch"]


@pytest.mark.parametrize("family", SPACES)
def test_prenas_selection_is_for_autoformer_only(fit, capsys, family):
    status, folder = fit("refused", f"space={SPACES[family]}")
    assert status == 2 and not folder.exists()
    assert "PreNAS selection is defined for networks of family autoformer, but " in capsys.readouterr().err
