"""Spaces of the later families, written as values: proof that they need no second design. And a naive counter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_tas.architecture import Architecture, Block, Stage
from lightning_tas.spaces import Dimension, Predicate, SearchSpace, autoprox_pit, isotropic, pit_ti


def s3() -> SearchSpace:
    """S3, initial space: four windowed stages; the qkv width is tied to the heads (32 x heads, the family's rule)."""
    return SearchSpace(
        "s3_initial",
        "s3",
        [
            Dimension("embed_dim", "stage", (224, 256, 288), step=64),
            Dimension("depth", "stage", (2, 3, 4), step=1),
            Dimension("window_size", "block", (7, 14), step=7),
            Dimension("num_heads", "block", (7, 8, 9), step=2),
            Dimension("mlp_ratio", "block", (3, 3.5, 4), step=0.5),
        ],
        stages=4,
    )


def s3_evolved() -> SearchSpace:
    """S3 after an evolution: every stage has choices of its own."""
    return SearchSpace(
        "s3_evolved",
        "s3",
        [
            Dimension("embed_dim", "stage", ((96, 128), (192,), (320, 384), (704, 768)), step=64),
            Dimension("depth", "stage", ((1, 2), (2,), (5, 6, 7), (2, 3)), step=1),
            Dimension("window_size", "block", ((7,), (7, 14), (7, 14), (7,)), step=7),
            Dimension("num_heads", "block", ((3, 4), (5, 6), (10, 12), (22, 24)), step=2),
            Dimension("mlp_ratio", "block", (3, 3.5, 4), step=0.5),
        ],
        stages=4,
    )


def pit() -> SearchSpace:
    """PiT-Ti: pooling is a grouped convolution, so each stage's heads divide the next one's."""
    return pit_ti()


def pit_unconstrained() -> SearchSpace:
    """PiT-Ti as the product of its choices."""
    return pit_ti(divisible=False)


def pit_autoprox() -> SearchSpace:
    """Auto-Prox' PiT benchmark: 12 to 14 blocks in all."""
    return autoprox_pit()


def bert() -> SearchSpace:
    """T-Razor's BERT: hidden size 768, which the heads must divide."""
    return SearchSpace(
        "bert",
        "bert",
        [
            Dimension("depth", "stage", (6, 8, 10, 12)),
            Dimension("intermediate", "block", (512, 768, 1024, 3072)),
            Dimension("num_heads", "block", (4, 8, 12, 16)),
        ],
        [Predicate("divisible", (768, "num_heads"))],
    )


def _gpt(name: str, model: str, inner: str, heads: str) -> SearchSpace:
    return SearchSpace(
        name,
        "gpt2",
        [
            Dimension("d_embed", "network", (128, 256, 512)),
            Dimension("depth", "stage", tuple(range(2, 17)), step=1),
            Dimension("d_model", model, tuple(range(128, 1025, 64)), step=64),  # type: ignore[arg-type]
            Dimension("d_inner", inner, tuple(range(256, 4097, 64)), step=64),  # type: ignore[arg-type]
            Dimension("n_head", heads, (2, 4, 8)),  # type: ignore[arg-type]
        ],
        [Predicate("at_least", ("d_inner", 2, "d_model")), Predicate("divisible", ("d_model", "n_head"))],
    )


def gpt_shared() -> SearchSpace:
    """LTS, one d_model, d_inner and n_head for all layers."""
    return _gpt("gpt_shared", "network", "network", "network")


def gpt_lts() -> SearchSpace:
    """LTS, d_model shared, d_inner and n_head per layer."""
    return _gpt("gpt_lts", "network", "block", "block")


def gpt_hetero() -> SearchSpace:
    """ETAS' theory: d_model per layer too."""
    return _gpt("gpt_hetero", "block", "block", "block")


def _cnn(kernel_scope: str) -> SearchSpace:
    widths = [(16, 24), (24, 32), (40, 48), (80, 88), (112, 120, 128), (192, 200, 208, 216), (320, 328, 336, 344, 352)]
    layers = [(1, 2), (2, 3), (2, 3), (2, 3, 4), (2, 3, 4, 5, 6), (2, 3, 4, 5, 6), (1, 2)]
    kernels = [(3,), (3,), *[(3, 5)] * 5]
    return SearchSpace(
        f"bignas_{kernel_scope}",
        "bignas",
        [
            Dimension("resolution", "network", (192, 224, 256, 288, 320)),
            Dimension("stem_width", "network", (32, 40), step=8),
            Dimension("head_width", "network", tuple(range(1280, 1409, 8)), step=8),
            Dimension("width", "stage", tuple(widths), step=8),
            Dimension("depth", "stage", tuple(layers), step=1),
            Dimension("kernel_size", kernel_scope, tuple(kernels)),  # type: ignore[arg-type]
        ],
        stages=7,
    )


def cnn_stage_kernels() -> SearchSpace:
    """BigNAS MobileNetV2 (PreNAS Table 2), one kernel per stage."""
    return _cnn("stage")


def cnn_layer_kernels() -> SearchSpace:
    """The same with a kernel per layer."""
    return _cnn("block")


def tiny() -> SearchSpace:
    """A plain ViT."""
    return isotropic("tiny", embed_dim=(192, 216, 240), depth=(12, 13, 14), num_heads=(3, 4), mlp_ratio=(3.5, 4))


BUILDERS: list[Callable[[], SearchSpace]] = [
    tiny,
    s3,
    s3_evolved,
    pit,
    pit_unconstrained,
    pit_autoprox,
    bert,
    gpt_shared,
    gpt_lts,
    gpt_hetero,
    cnn_stage_kernels,
    cnn_layer_kernels,
]


@pytest.fixture(scope="session")
def families() -> dict[str, SearchSpace]:
    """The spaces above by the names of their functions."""
    return {build.__name__: build() for build in BUILDERS}


def _naive(space: SearchSpace) -> Iterator[Architecture]:
    """Every architecture, by products over the definition alone, filtered by `Predicate.holds`: the slow truth."""
    by_scope = {scope: [d for d in space.dimensions if d.scope == scope] for scope in ("network", "stage", "block")}

    def assignments(scope: str, stage: int | None) -> Iterator[dict[str, Any]]:
        names = [d.name for d in by_scope[scope]]
        for values in itertools.product(*(d.at(stage) for d in by_scope[scope])):
            yield dict(zip(names, values, strict=True))

    def stages(stage: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        for own in assignments("stage", stage):
            for blocks in itertools.product(list(assignments("block", stage)), repeat=own["depth"]):
                yield own, list(blocks)

    for network in assignments("network", None):
        for parts in itertools.product(*(list(stages(s)) for s in range(space.stages))):
            if all(_holds(p, network, parts) for p in space.predicates):
                yield Architecture(
                    space.family,
                    [
                        Stage([Block(**b) for b in bs], **{k: v for k, v in own.items() if k != "depth"})
                        for own, bs in parts
                    ],
                    **network,
                )


def _holds(p: Predicate, network: dict[str, Any], parts: Any) -> bool:
    if p.rule.path:
        return p.holds({n: tuple({**network, **own}[n] for own, _ in parts) for n in p.names})
    return all(p.holds({**network, **own, **block}) for own, blocks in parts for block in blocks)


@pytest.fixture(scope="session")
def naive() -> Callable[[SearchSpace], Iterator[Architecture]]:
    """The naive enumeration of a small space."""
    return _naive
