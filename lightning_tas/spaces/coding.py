"""From architectures to rows of choice indices and back, by look-up tables; membership is checked by the callers."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tas.architecture import Architecture, Block, Stage, Value
from lightning_tas.spaces.layout import Layout


class Codec:
    """The look-up tables of one space. Blocks recur in their thousands, so they are coded once and built once."""

    def __init__(self, family: str, layout: Layout) -> None:
        self.family = family
        self.layout = layout
        columns = layout.columns
        # The code of each choice, by (dimension, stage); the first block slot stands for all.
        self._codes: dict[tuple[str, int | None], dict[Value, int]] = {
            (c.name, c.stage): {value: i for i, value in enumerate(c.choices)} for c in columns if not c.block
        }
        self._block_codes: list[dict[Block, list[int]]] = [{} for _ in range(layout.stages)]
        self._blocks: dict[tuple[int, tuple[int, ...]], Block] = {}

    def row(self, arch: Architecture) -> list[int] | None:
        """The codes of an architecture; None when a value is not among the choices, missing or at another place."""
        layout = self.layout
        if arch.family != self.family or len(arch.stages) != layout.stages or len(arch.keys()) != len(layout.network):
            return None
        try:
            row = [self._codes[d.name, None][arch[d.name]] for d in layout.network]
            for s, stage in enumerate(arch.stages):
                if len(stage.keys()) != len(layout.stage) - 1:  # the depth is no value of the stage
                    return None
                for d in layout.stage:
                    row.append(self._codes[d.name, s][stage.depth if d.name == "depth" else stage[d.name]])
                for block in stage.blocks:
                    row += self._block_row(s, block)
                row += [-1] * ((layout.max_depth[s] - stage.depth) * len(layout.block))
        except KeyError:
            return None
        return row

    def _block_row(self, stage: int, block: Block) -> list[int]:
        known = self._block_codes[stage]
        if block not in known:
            if len(block.keys()) != len(self.layout.block):
                raise KeyError(block)
            known[block] = [self._codes[d.name, stage][block[d.name]] for d in self.layout.block]
        return known[block]

    def depth(self, row: Sequence[int], stage: int) -> int:
        """The depth of a stage of an encoded architecture."""
        return int(self.layout.depth_choices[stage][row[self.layout.depth_column[stage]]])

    def build(self, row: Sequence[int]) -> Architecture:
        """The architecture of a member's codes."""
        width = len(self.layout.block)
        starts = [
            start + slot * width
            for stage, start in enumerate(self.layout.block_start)
            for slot in range(self.depth(row, stage))
        ]
        return self.assemble(row, [tuple(row[c : c + width]) for c in starts])

    def assemble(self, row: Sequence[int], blocks: Sequence[tuple[int, ...]]) -> Architecture:
        """The architecture of a row's skeleton and the codes of all its blocks, in order."""
        layout = self.layout
        columns = layout.columns
        stages, done = [], 0
        for s, end in enumerate(layout.block_start):
            own = {columns[c].name: columns[c].choices[row[c]] for c in range(end - len(layout.stage), end)}
            depth = own.pop("depth")
            stages.append(Stage([self._block(s, codes) for codes in blocks[done : done + depth]], **own))
            done += depth
        extras = {columns[c].name: columns[c].choices[row[c]] for c in range(len(layout.network))}
        return Architecture(self.family, stages, **extras)

    def _block(self, stage: int, codes: tuple[int, ...]) -> Block:
        key = (stage, codes)
        if key not in self._blocks:
            pairs = zip(self.layout.block, codes, strict=True)
            self._blocks[key] = Block(**{d.name: d.at(stage)[i] for d, i in pairs})
        return self._blocks[key]
