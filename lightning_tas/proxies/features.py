"""A network's features, the tokens before pooling and head, with weights other than its own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call

from lightning_tas.errors import UserError


class _Features(nn.Module):
    def __init__(self, net: nn.Module, pooled: bool) -> None:
        super().__init__()
        self.net, self.pooled = net, pooled

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.net.forward_features(images)  # type: ignore[operator]
        if not self.pooled:
            return tokens
        return self.net.forward_head(tokens, pre_logits=True)  # type: ignore[operator, no-any-return]


def features(net: nn.Module, weights: Mapping[str, Tensor], images: Tensor, pooled: bool = False) -> Tensor:
    """``net.forward_features`` (B, N, d) with the parameters `weights`, by name; `pooled`: what the head gets, (B, d).

    `UserError` for a network without timm's ``forward_features`` (and ``forward_head``).
    """
    if not hasattr(net, "forward_features") or (pooled and not hasattr(net, "forward_head")):
        raise UserError(f"features: {type(net).__name__} has no forward_features and forward_head, as timm's have")
    named = {f"net.{name}": weight for name, weight in weights.items()}
    found: Tensor = functional_call(_Features(net, pooled), named, (images,))
    return found
