"""Which networks the weights of a supernet were trained on, and whether those that are reported were among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_tas.architecture import Architecture
from lightning_tas.samplers import SamplerConfig
from lightning_tas.spaces import SearchSpace


@dataclass(frozen=True)
class Trained:
    """What a sampler has trained.

    source: "candidates" of a selection, "list" (of the sampler's own), or "space"; `networks`: how many these are;
    reduce: how a step combines their gradients.
    """

    sampler: str
    source: str
    networks: int
    reduce: str

    def __str__(self) -> str:
        what = {"candidates": "the candidates", "list": "a list of networks", "space": "networks of the whole space"}
        text = f"{what[self.source]} ({self.networks:,}), sampler {self.sampler}"
        return text + (", gradients summed" if self.reduce == "sum" else "")

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def of(
        cls, config: SamplerConfig, sampler: object, space: SearchSpace, candidates: Collection[Architecture]
    ) -> Trained:
        """What `sampler`, of the settings `config`, trains of a supernet of `space`."""
        listed = getattr(sampler, "archs", ())
        source = "space" if not listed else "candidates" if set(candidates) == set(listed) else "list"
        return cls(config.name, source, len(listed) or space.size(), config.reduce)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trained:
        """Read `to_dict`'s form."""
        return cls(**data)

    def warning(
        self,
        reported: Mapping[str, Architecture],
        candidates: Collection[Architecture],
        listed: Collection[Architecture] | None = None,
    ) -> str | None:
        """What to tell a user whose table shows networks that were not trained; None where there are none.

        Args:
            reported: label to network.
            candidates: of the selection; trained from the whole space they have had a turn by chance only.
            listed: what the sampler draws from; None: the candidates, or a list that is not known any more.
        """
        if self.source == "list" and listed is None:
            return None
        if self.source == "space":
            other = [label for label, arch in reported.items() if arch in candidates]
        else:
            trained = candidates if listed is None else listed
            other = [label for label, arch in reported.items() if arch not in trained]
        if not other:
            return None
        named = ", ".join(other[:5]) + (", ..." if len(other) > 5 else "")
        return (
            f"{len(other)} of {len(reported)} networks that are reported ({named}) are not what is trained: that is "
            f"{self} (sampler.source, sampler.name)"
        )
