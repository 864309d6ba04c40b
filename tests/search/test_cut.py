"""The supernet cut to its candidates: no smaller than needed, no larger, and the networks are the same functions."""

from __future__ import annotations

import torch

from lightning_tas.architecture import Architecture
from lightning_tas.search import cut_space
from lightning_tas.spaces import resolve_space
from lightning_tas.supernets import supernet


def test_the_released_base_supernet_has_14_blocks() -> None:
    """The published base candidates are 14 deep, at most 624 wide, with up to 10 heads: blocks 15 and 16 go."""
    whole = resolve_space("autoformer_base")
    archs = [
        Architecture.vit(width, num_heads=[9] * 13 + [heads], mlp_ratio=[3.5] * 13 + [4])
        for width, heads in ((528, 9), (576, 10), (624, 10))
    ]
    cut = cut_space(whole, archs)
    assert cut.choices("depth") == (14,)
    assert dict(cut.allocated) == {"embed_dim": 624, "depth": 14, "num_heads": 10, "mlp_ratio": 4}
    assert all(arch in cut for arch in archs)
    with torch.device("meta"):
        assert len(supernet(cut).blocks) == 14


def test_a_cut_supernet_holds_its_candidates_and_only_the_choices_they_reach() -> None:
    whole = resolve_space(
        {"name": "s", "embed_dim": [16, 32], "depth": [1, 2, 3], "num_heads": [1, 2], "mlp_ratio": [1, 2]}
    )
    archs = [Architecture.vit(16, num_heads=[1, 1], mlp_ratio=[1, 2]), Architecture.vit(16, [1], [1])]
    cut = cut_space(whole, archs)
    assert (cut.choices("embed_dim"), cut.choices("depth"), cut.choices("num_heads")) == ((16,), (1, 2), (1,))
    net = supernet(cut, num_classes=3, img_size=8, in_chans=1, patch_size=4, drop_path_rate=0.2)
    images = torch.randn(2, 1, 8, 8)
    for arch in archs:
        torch.testing.assert_close(net.eval()(images, arch), net.subnet(arch).eval()(images))
    # Drop path is linear over the blocks that are left: the deepest candidate meets the full rate.
    assert [block.drop_path_rate for block in net.blocks] == [0.0, 0.2]
