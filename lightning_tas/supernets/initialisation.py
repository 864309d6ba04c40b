"""First weights of a network's layers: three rules, because papers and released codes differ and proxies notice.

``trunc_normal``: linear weights truncated normal 0.02 with biases 0; convolutions keep the library's default
(AutoFormer, PreNAS, TF-TAS and Auto-Prox's plain ViT touch linear layers and norms only). ``library``: the library's
default everywhere (PiT, the original and Auto-Prox's). ``tf_tas``: TF-TAS's PiT, truncated normal 0.02 with biases 0 in
linear layers and N(0, 1) in the weights of convolutions. Norms begin at (1, 0) under every rule; tokens, positions and
relative position tables are truncated normal 0.02.
"""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def init_module(module: nn.Module, init: str) -> None:
    """Fill the own parameters of one layer by the rule `init`; other modules are left as they are."""
    if isinstance(module, nn.Linear) and init != "library":
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Linear | nn.LayerNorm | nn.Conv2d):
        module.reset_parameters()
        if isinstance(module, nn.Conv2d) and init == "tf_tas":
            nn.init.normal_(module.weight)
