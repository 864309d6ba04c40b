"""The plain ViT of Auto-Prox: heads that share the width, and what sets it apart from AutoFormer's network."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer

import lightning_tas as tas

ARCH = tas.Architecture.vit(24, [3, 3, 3], [2, 2, 2], family="autoprox_vit")


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_equals_timm_s_plain_vit(randomised: object, pool: str) -> None:
    """With equal heads everywhere it is the ordinary ViT, whose code timm has independently of ours."""
    net = randomised(tas.network(ARCH, num_classes=5, img_size=(16, 8), patch_size=4, pool=pool)).eval()  # type: ignore[operator]
    theirs = TimmVisionTransformer(
        img_size=(16, 8),
        patch_size=4,
        num_classes=5,
        global_pool=pool,
        embed_dim=24,
        depth=3,
        num_heads=3,
        mlp_ratio=2,
        fc_norm=False,
    ).eval()
    theirs.load_state_dict(net.state_dict())
    x = torch.randn(2, 3, 16, 8)
    torch.testing.assert_close(net(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_queries_are_as_wide_as_the_tokens() -> None:
    ours = tas.network(ARCH, img_size=32)
    assert ours.blocks[0].attn.qkv.weight.shape == (72, 24) and ours.blocks[0].norm1.eps == ours.norm.eps == 1e-6
    assert not any("rel_pos" in name for name in ours.state_dict()) and ours.options["pool"] == "avg"
    autoformer = tas.network(tas.Architecture.vit(24, [3, 3, 3], [2, 2, 2]), img_size=32)
    assert autoformer.blocks[0].attn.qkv.weight.shape == (576, 24) and autoformer.norm.eps == 1e-5
    assert autoformer.options["relative_position"] and autoformer.options["pool"] == "avg"


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    odd = tas.Architecture.vit(24, [3, 5], [2, 2], family="autoprox_vit")
    with pytest.raises(tas.UserError, match="num_heads of block 1: 5 does not divide the width 24"):
        tas.network(odd)
    with torch.device("meta"):
        net = tas.supernet("autoprox_autoformer", img_size=32)
    with pytest.raises(tas.UserError, match="num_heads of block 1: 5 does not divide"):
        net.check(odd)
    with pytest.raises(tas.UserError, match="relative_position: networks of family 'autoprox_vit' have none"):
        tas.network(ARCH, relative_position=True)
    with pytest.raises(tas.UserError, match="relative_position: networks of family 'autoprox_vit' have none"):
        tas.cost(ARCH, relative_position=True)
