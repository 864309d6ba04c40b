"""T-Razor's block-wise evolution (Zhou et al. 2023, Algorithm 1, eqs. 12-13): scores of blocks say what to change.

The paper leaves open what one block's DSS++ is. Here it is b[l], the rank percentile of the block's diversity plus that
of its saliency among the blocks at the same position of all networks told (`sites.BlockRanks`). Where blocks have no
choices of their own the stage that governs them stands for them (`sites.Sites`).

A generation changes the 50 best networks of the archive, ranked anew. A mutant redraws its share of lowest blocks, each
to another one; a child takes over from a partner of the same width the blocks that are better there. The pair is drawn
for every child, since Algorithm 1 read literally makes all children of a step equal. Whether width and depth of a
mutant are open is drawn first, as they are not the paper's; what is open is then drawn within the limits. The lowest
blocks of a network at an upper limit are its small ones: where no change of them is within, others are released.

Velocity: networks are discrete, so eq. 12 cannot move one. Each place i of the population has x_i, the percentile of
its member's value in the archive, and v_i <- w v_i + g1 u1 (pb_i - x_i) + g2 u2 (1 - x_i), which sets the share of
blocks to change, clip(.1 + .4 max(0, v_i), .1, .6): those that lag behind change more. As the archive grows its best
networks come close to 1 and change ever less: moves are wide at first and end with single blocks. (Percentiles in the
population keep them wide for ever, and find worse networks than random search does by inherited SNIP or DSS++.) A
member keeps its place while it is among the best, and a newcomer takes the place of one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from lightning_tas.errors import UserError
from lightning_tas.limits import Region
from lightning_tas.proxies.registry import least, named, one_of
from lightning_tas.search.block_moves import changes, exchanges, handed, released
from lightning_tas.search.evolution import Generational, GenerationSettings
from lightning_tas.search.history import Codes, key
from lightning_tas.search.objective import OTHERS, FloatArray, Objective, Scores, dropped
from lightning_tas.search.settings import Probability
from lightning_tas.search.sites import BlockRanks, Sites
from lightning_tas.search.strategy import Draft, register_strategy

Laws = Callable[[list[int]], "list[FloatArray]"]
DONORS, FINALS = ("same", "best"), ("archive", "population")
CHANGED, EXCHANGED = ("lowest", "any"), ("better", "any")


@dataclass(frozen=True)
class BlockwiseSettings(GenerationSettings):
    """As `GenerationSettings`, and what the paper gives no values for.

    guide: whose per-block numbers rank blocks: "dss_pp" (diversity and saliency), or a proxy with parts per block, as
    "dss" for the ablation; None is "dss" with that as the objective, else "dss_pp". rho: share of blocks that change
    without pso. pso: eqs. 12-13 set the share, see the module. inertia, pull_own, pull_best: w, g1, g2.
    pso_noise: the factors u in [0, 1) of particle swarms, which the paper's equation lacks. release: where a move has
    nothing within the limits, further blocks may change, one by one, until it has (`block_moves`). changed: a mutant
    changes its lowest blocks, or "any", at random. exchanged: a child takes over blocks that are better in its partner,
    or "any", at random. donor: a child's new block is its partner's at the same index, or the partner's best block of
    the stage. final: where the winner is taken from.
    """

    generations: Annotated[int, least(0)] = 160
    top: Annotated[int, least(1)] = 50
    tries: Annotated[int, least(1)] = 50
    guide: str | None = None
    rho: Probability = 0.3
    pso: bool = True
    pso_noise: bool = True
    inertia: Annotated[float, least(0)] = 0.7
    pull_own: Annotated[float, least(0)] = 1.5
    pull_best: Annotated[float, least(0)] = 1.5
    release: bool = True
    changed: Annotated[str, one_of(CHANGED)] = "lowest"
    exchanged: Annotated[str, one_of(EXCHANGED)] = "better"
    donor: Annotated[str, one_of(DONORS)] = "same"
    final: Annotated[str, one_of(FINALS)] = "archive"


@register_strategy("blockwise")
class Blockwise(Generational):
    """50 random networks, then 160 generations of 25 mutants and 25 children: 8,050 evaluations.

    With objective "dss_pp" this is T-Razor's BE+DSS++; with "dss" its ablation BE+DSS. The other two of Table V are the
    strategy "random" with either. With any other objective the guide's scores are needed beside it.
    """

    Settings = BlockwiseSettings
    settings: BlockwiseSettings

    def __init__(self, region: Region, objective: Objective | str, seed: int = 0, **settings: Any) -> None:
        super().__init__(region, objective, seed, **settings)
        guide = self.settings.guide or ("dss" if self.objective.name == "dss" else "dss_pp")
        self._source = "dss" if guide == "dss_pp" else guide
        self._quantities = ("diversity", "saliency") if guide == "dss_pp" else ("",)
        self.sites = Sites(self.space)
        self._slots: list[int] = []  # the population, as indices of the history
        self._velocity: list[float] = []
        self._own_best: list[float] = []
        self._forget()

    @classmethod
    def check(cls, settings: Any, objective: Objective) -> None:
        guide = settings.guide
        if guide in OTHERS or (guide not in (None, "dss_pp") and named(guide).combines):
            raise UserError(f"guide of blockwise: {guide!r} has no numbers per block; name a proxy that sums over them")

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.objective.needs, self._source)))

    # --- scores of blocks ---------------------------------------------------------------------------------------------

    def _numbers(self, scores: Scores, quantity: str) -> Sequence[float]:
        score = scores[self._source]
        return score.blocks.get(quantity, ()) if quantity else score.parts

    def check_scores(self, place: int, row: Codes, scores: Scores) -> None:
        super().check_scores(place, row, scores)
        depth = sum(self.sites.depths(row))
        for quantity in self._quantities if scores[self._source].valid else ():
            given = len(self._numbers(scores, quantity))
            if given != depth:
                what = f"{quantity} " if quantity else ""
                raise UserError(
                    f"tell: the score of {self._source} in result {place} has {what}numbers of {given} blocks, "
                    f"and the network has {depth}"
                )

    def _vectors(self, index: int) -> FloatArray:
        """(Q, P) numbers of one network's blocks at their positions, all NaN for a network without them."""
        row, scores = self.history.rows[index], self.history.scores[index]
        source = scores[self._source]
        if not source.valid or dropped(source):
            return np.full((len(self._quantities), self.sites.positions), np.nan)
        return np.stack([self.sites.spread(row, self._numbers(scores, q)) for q in self._quantities])

    def block_scores(self, indices: Sequence[int]) -> FloatArray:
        """b (n, P) of networks of the history, at the positions of `sites`, among all told; NaN where no block is."""
        new = range(len(self._known), len(self.history))
        if new:
            added = [self._vectors(i) for i in new]
            self._known += added
            self._ranks.add(np.stack(added))
        return self._ranks.scores(np.stack([self._known[i] for i in indices]))

    # --- the population -----------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        chosen = self.history.top(self.settings.top)
        if not chosen:
            return False
        self._slots = _places(self._slots, chosen)
        scores = self.sites.of(self.block_scores(self._slots))  # (population, sites)
        self._site_scores = scores
        there = np.sum(~np.isnan(scores), axis=1)
        self._count = np.maximum(1, (self._shares() * there + 0.5).astype(int)).tolist()
        # Each member's sites from its lowest to its best.
        self._order = [
            order[:n].tolist() for order, n in zip(np.argsort(scores, axis=1, kind="stable"), there, strict=True)
        ]
        rows = np.stack([self.history.rows[i] for i in self._slots])
        widths = rows[:, self.sites.widths]
        alike = (widths[:, None] == widths[None]).all(axis=2) & ~np.eye(len(rows), dtype=bool)
        # Whom each member may cross with: those of its width or, where it has no such partner, all others.
        alike[~alike.any(axis=1)] = True
        self._partners = alike & ~np.eye(len(rows), dtype=bool)
        return True

    def _shares(self) -> FloatArray:
        """The share of blocks to change per place of the population; moves its velocities on."""
        from scipy.stats import rankdata  # takes half a second to import, which a misspelt option must not wait for

        s, n = self.settings, len(self._slots)
        known = len(self.history)
        x = np.ones(n) if known == 1 else (rankdata(self.history.values)[self._slots] - 1) / (known - 1)
        velocity = np.concatenate([self._velocity, np.zeros(n)])[:n]
        best = np.maximum(x, np.concatenate([self._own_best, np.zeros(n)])[:n])
        u = self.rng("velocity").random((2, n)) if s.pso_noise else np.ones((2, n))
        velocity = s.inertia * velocity + s.pull_own * u[0] * (best - x) + s.pull_best * u[1] * (1.0 - x)
        self._velocity, self._own_best = velocity.tolist(), best.tolist()
        return np.clip(0.1 + 0.4 * np.maximum(0.0, velocity), 0.1, 0.6) if s.pso else np.full(n, s.rho)

    # --- moves --------------------------------------------------------------------------------------------------------

    def _mutant(self, draft: Draft, slot: int, attempt: int) -> Codes | None:
        """A member with other choices in each of its lowest blocks; by chance depth and width are open, too."""
        s, rng = self.settings, self.rng("mutant", slot, attempt)
        place = int(rng.integers(len(self._slots)))
        parent = self.history.rows[self._slots[place]]
        chances = [s.depth_prob if self.sites.is_depth(c) else s.embed_prob for c in self.sites.others]
        rates = np.zeros(len(parent))
        rates[self.sites.others] = rng.random(len(chances)) < chances
        order = self._order[place]
        if s.changed == "any":
            order = rng.permutation(order).tolist()
        changed, kept = order[: self._count[place]], order[self._count[place] :]
        return self._draw(
            draft,
            lambda freed: changes(self.moves, self.sites, parent, rates, changed, freed),
            lambda: released(self.region, self.sites, parent, changed, kept),
            rng,
            [parent],
            proven=not rates.any(),
        )

    def _draw(
        self,
        draft: Draft,
        laws: Laws,
        sites: Callable[[], tuple[list[int], int]],
        rng: np.random.Generator,
        avoid: list[Codes],
        proven: bool = True,
    ) -> Codes | None:
        """A draw by the laws of released sites: as few as leave anything within the limits.

        proven: that so many must be released at least, as `sites` says, is true of these laws.
        """
        order, number = sites() if proven else (None, 0)
        while order is None or number <= (len(order) if self.settings.release else 0):
            drawn = draft.draw(laws(order[:number] if order else []), rng, avoid)
            if not drawn.empty:
                draft.tally.released += number
                return drawn.row
            order, number = order or sites()[0], number + 1
        return None

    def _cross(self, draft: Draft) -> None:
        """Children of pairs in random order, each pair once; where pairs have no more new ones, mutants."""
        s, wanted = self.settings, len(draft) + self.settings.children
        pairs = np.argwhere(self._partners)[self.rng("pairs").permutation(int(self._partners.sum()))].tolist()
        more = iter(pairs[: s.tries * s.children])

        def child(slot: int, attempt: int) -> Codes | None:
            pair = next(more, None)
            return None if pair is None else self._child(draft, *pair)

        draft.fill(s.children, child, s.tries)
        draft.fill(wanted - len(draft), lambda slot, attempt: self._mutant(draft, s.mutants + slot, attempt), s.tries)

    def _child(self, draft: Draft, a: int, b: int) -> Codes | None:
        """Member `a` with the blocks that are better in `b`, its lowest ones; None where none is new."""
        rng = self.rng("child", a, b)
        if self.settings.exchanged == "better":
            better = (self._site_scores[a] < self._site_scores[b]).tolist()
            lower = [j for j in self._order[a] if better[j]]
        else:
            lower = rng.permutation([j for j in self._order[a] if not np.isnan(self._site_scores[b][j])]).tolist()
        if not lower:
            return None
        own, other = (self.history.rows[self._slots[i]] for i in (a, b))
        whole = own.copy()
        for j in lower:
            whole[self.sites.sites[j].columns] = other[self.sites.sites[self._donor(b, j)].columns]
        taken, left = lower[: self._count[a]], lower[self._count[a] :]
        child = own.copy()
        for j in taken:
            child[self.sites.sites[j].columns] = whole[self.sites.sites[j].columns]
        if key(child) in draft.seen:
            return None
        return self._draw(
            draft,
            lambda freed: exchanges(self.moves, self.sites, own, whole, taken, freed),
            lambda: handed(self.region, self.sites, own, whole, taken, left),
            rng,
            [own, other],
        )

    def _donor(self, place: int, site: int) -> int:
        """Where a member gives from: the same site or, with donor="best", its best block in that stage."""
        if self.settings.donor == "same" or self.sites.kind != "block":
            return site  # the choices of other stages are other ones
        stage = self.sites.sites[site].stage
        return next(j for j in reversed(self._order[place]) if self.sites.sites[j].stage == stage)

    # --- result and state ---------------------------------------------------------------------------------------------

    def eligible(self) -> Sequence[int] | None:
        """With final="population": the last population and what came of it."""
        if self.settings.final == "archive" or not self.generation:
            return None
        return sorted({*self._slots, *self.history.since(self.generation - 1)})

    def extra_state(self) -> dict[str, Any]:
        return {
            "slots": list(self._slots),
            "velocity": list(self._velocity),
            "own_best": list(self._own_best),
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._slots, self._velocity = list(state["slots"]), list(state["velocity"])
        self._own_best = list(state["own_best"])
        self._forget()

    def _forget(self) -> None:
        """Drop what follows from the history; it is made again when it is asked for."""
        self._known: list[FloatArray] = []
        self._ranks = BlockRanks(len(self._quantities), self.sites.positions)


def _places(before: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The chosen networks, those that had a place before in the same one, newcomers in the others, best first."""
    staying = [i if i in chosen else None for i in before][: len(chosen)]
    staying += [None] * (len(chosen) - len(staying))
    held = {i for i in staying if i is not None}
    newcomers = iter([i for i in chosen if i not in held])
    return [next(newcomers) if i is None else i for i in staying]
