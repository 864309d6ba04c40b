"""Logits, traces and training steps of the released networks, on deterministic weights."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_tas as tas

ATOL = {"tiny": 5e-6, "small": 5e-6, "base": 2e-5}
QUICK = [("autoformer", "tiny"), ("prenas", "tiny")]
SLOW = [(source, size) for size in ("small", "base") for source in ("autoformer", "prenas")]


@pytest.fixture(scope="module")
def supernet_of(golden: Any, fill: Any) -> Any:
    """Supernet of a size with the reference weights loaded by their own names (kept: filling takes seconds)."""

    @lru_cache(maxsize=1)
    def state(size: str) -> dict[str, Tensor]:
        entries = golden(f"state_autoformer_{size}.json")
        return {name: torch.from_numpy(fill.values(name, tuple(shape))) for name, shape in entries}

    def build(source: str, size: str) -> Any:
        net = tas.supernet(f"autoformer_{size}", drop_path_rate=0.0)
        net.load_reference({"model": state(size)}, source=source)
        return net

    return build


@pytest.mark.parametrize(("source", "size"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_logits_equal_the_reference(source: str, size: str, golden: Any, fill: Any, supernet_of: Any) -> None:
    net = supernet_of(source, size).eval()
    images = torch.from_numpy(fill.images())
    expected = golden(f"model_{source}.json")[size]
    assert sum(p.numel() for p in net.parameters()) == expected["supernet_params"]
    assert len(net.state_dict()) == expected["n_state"]
    for name, result in expected["results"].items():
        arch = tas.Architecture.from_dict(result["config"])
        with torch.no_grad():
            logits = net(images, arch)
        torch.testing.assert_close(logits[:, :10], torch.tensor(result["logits10"]), atol=ATOL[size], rtol=0, msg=name)
        torch.testing.assert_close(logits.sum(1), torch.tensor(result["logits_sum"]), atol=2 * ATOL[size], rtol=0)
        assert logits.argmax(1).tolist() == result["logits_argmax"]
        sub = net.subnet(arch)
        assert sum(p.numel() for p in sub.parameters()) == result["params"]
        with torch.no_grad():
            assert torch.equal(sub(images), logits)
        # Entries beyond the depth repeat the last block's output: there the reference's blocks are identities.
        trace = result.get("trace_first_image", [])[: arch.depth + 1]
        tokens = _trace(net, images[:1], arch) if trace else {}
        for entry in trace:
            x = tokens[entry["at"]]
            assert list(x.shape[1:]) == entry["shape"][1:]
            for token in (0, 1):
                wanted = torch.tensor(entry[f"token{token}_first5"])
                torch.testing.assert_close(x[0, token, :5], wanted, atol=ATOL[size], rtol=0, msg=entry["at"])


@pytest.mark.slow
@pytest.mark.parametrize("source", ["autoformer", "prenas"])
def test_float64_equals_the_written_out_form(source: str, golden: Any, fill: Any, supernet_of: Any, naive: Any) -> None:
    net = supernet_of(source, "tiny").eval().double()
    arch = tas.Architecture.from_dict(golden("model_autoformer.json")["tiny"]["results"]["random0"]["config"])
    image = torch.from_numpy(fill.images(1)).double()
    with torch.no_grad():
        expected = naive.forward(net.state_dict(), arch, net.allocated, net.options, image)
        torch.testing.assert_close(net(image, arch), expected, atol=1e-10, rtol=0)


@torch.no_grad()
def _trace(net: Any, images: Tensor, arch: tas.Architecture) -> dict[str, Tensor]:
    """Output of the patch embedding and of each block."""
    tokens = {"patch_embed": net.patch_embed(images, arch.embed_dim)}
    x = net.embed(images, arch.embed_dim)
    for i, (heads, ratio) in enumerate(zip(arch.num_heads, arch.mlp_ratio, strict=True)):
        x = net.blocks[i](x, heads, ratio, net.bias_rule)
        tokens[f"block{i}"] = x
    return tokens


@pytest.mark.slow
def test_three_training_steps_equal_the_reference(golden: Any, fill: Any, supernet_of: Any) -> None:
    """AdamW on the supernet, another sub-network each step: gradients of slices, unused rows and unused blocks."""
    expected = golden("train_step_autoformer.json")
    net = supernet_of("autoformer", "tiny").train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4, weight_decay=0.05)
    images = torch.from_numpy(fill.images(8))
    for step in expected["parity_three_steps_no_drop_path"]:
        arch = tas.Architecture.from_dict(expected["timing"][step["config"]]["config"])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(images, arch), torch.arange(8))
        loss.backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        assert loss.item() == pytest.approx(step["loss"], abs=5e-6)
        assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(step["grad_norm"], rel=5e-5)
        assert sum(p.grad is None for p in net.parameters()) == step["params_with_grad_none"]
        optimizer.step()
    ours = {
        "patch_embed_super.proj.weight": "patch_embed.proj.weight",
        "blocks.0.attn.rel_pos_embed_k.embeddings_table_v": "blocks.0.attn.rel_pos_k.vertical",
        "blocks.0.fc1.weight": "blocks.0.mlp.fc1.weight",
        "blocks.13.fc2.weight": "blocks.13.mlp.fc2.weight",
    }
    state = net.state_dict()
    for name, value in expected["parity_param_sums_after_3_steps"].items():
        assert state[ours.get(name, name)].sum().item() == pytest.approx(value, abs=5e-5), name
