"""AdamW with the references' weight-decay groups: biases, norms, class token and positions are not decayed."""

from __future__ import annotations

from fnmatch import fnmatch

import torch
from pytorch_lightning.utilities import rank_zero_warn
from timm.optim import param_groups_weight_decay
from torch import nn

from lightning_tas.training.config import TrainConfig

RELATIVE_POSITION = "*rel_pos*"


def no_decay_patterns(net: nn.Module, train: TrainConfig) -> list[str]:
    """Name patterns of parameters of `net` spared from decay besides those of one dimension; warns of idle ones."""
    patterns = sorted(getattr(net, "no_weight_decay", set)())
    if not train.decay_relative_position:
        patterns.append(RELATIVE_POSITION)
    names = [name for name, _ in net.named_parameters()]
    idle = [p for p in patterns if not any(fnmatch(name, p) for name in names)]
    if idle:
        rank_zero_warn(f"patterns of parameters without weight decay that match nothing in the network: {idle}")
    return patterns


def build_optimiser(net: nn.Module, train: TrainConfig, lr: float) -> torch.optim.AdamW:
    """AdamW over all trainable parameters of `net` at rate `lr`, in one fused kernel.

    Gradients of unsampled blocks are None, and AdamW leaves such parameters and their moments alone; slices not used
    inside a used tensor have gradient zero and do decay. Both as in the references.
    """
    groups = param_groups_weight_decay(net, train.weight_decay, no_weight_decay_list=no_decay_patterns(net, train))
    beta1, beta2 = train.betas
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=train.eps, fused=True)
