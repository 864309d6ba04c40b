"""Every proxy's formula with its default options (one excepted), written out plainly in float64.

Loops over images and layers, whole gradients and Jacobians, finite differences: nothing is shared, fused or estimated,
and layers are found by their modules' types and paths. Only random draws are taken from the package, so that both sides
see the same.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_tas.proxies.length_distortion import circle, one_patch_twin
from lightning_tas.randomness import torch_generator

OPTIONS: Mapping[str, Mapping[str, Any]] = {"zico": {"batches": 3}}
"""What the formulas here take where it is not the default."""
FLOAT32 = 1e-5
"""Relative error of a float32 pass, where no other is named in `TOLERANCES`."""
TOLERANCES = {
    **dict.fromkeys(("params", "macs", "naswot", "te_regions", "sept"), 1e-12),
    "synflow": 1e-11,
    "gradsign": 1e-3,  # rounding may turn the sign of a gradient that is hardly not zero, which counts 2
    "zen": 1e-4,  # the logarithm of a difference of features
}


class Case:
    """A stand-alone network in float64 and the batch and seed that it is scored with; `largest`: of its space."""

    def __init__(self, net: nn.Module, largest: nn.Module, images: Tensor, labels: Tensor, seed: int) -> None:
        self.net, self.largest = (copy.deepcopy(n).double().eval() for n in (net, largest))
        self.images, self.labels, self.seed = images.double(), labels, seed
        self.paths = {name: m for name, m in self.net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
        self.weights: list[Tensor] = [m.weight for m in self.paths.values()]

    def loss(self) -> Tensor:
        return F.cross_entropy(self.net(self.images), self.labels)

    def gradients(self) -> list[Tensor]:
        """Of the mean loss of the batch."""
        return list(torch.autograd.grad(self.loss(), self.weights))

    def singles(self, kind: str) -> list[list[Tensor]]:
        """For every image the gradients of its loss, of its own class's logit, or of the sum of its logits."""
        found = []
        for image, label in zip(self.images, self.labels, strict=True):
            logits = self.net(image[None])[0]
            objective = {"loss": F.cross_entropy(logits, label), "own": logits[label], "sum": logits.sum()}[kind]
            found.append(list(torch.autograd.grad(objective, self.weights)))
        return found

    def rows(self, kind: str) -> Tensor:
        """The same as a Jacobian, (B, all weights)."""
        return torch.stack([torch.cat([g.flatten() for g in single]) for single in self.singles(kind)])

    def outputs(self, *ends: str) -> dict[str, Tensor]:
        """What the layers give whose names end so (all layers: ""), with their graph, in the order of execution."""
        seen: dict[str, Tensor] = {}
        handles = [
            module.register_forward_hook(lambda *a, name=name: seen.__setitem__(name, a[2]))  # type: ignore[misc]
            for name, module in self.paths.items()
            if name.endswith(ends)
        ]
        self.net(self.images)
        for handle in handles:
            handle.remove()
        return seen

    def blocks(self, net: nn.Module | None = None) -> dict[str, Any]:
        """Transformer blocks by name."""
        net = net or self.net
        names = [name.removesuffix(".mlp") for name, _ in net.named_modules() if name.endswith(".mlp")]
        return {name: net.get_submodule(name) for name in names}

    def ones(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(|W|, gradient of the sum of logits for an image of ones at |W|) of every layer, by name."""
        net = copy.deepcopy(self.net)
        for parameter in net.parameters():
            parameter.data = parameter.data.abs()
        net(torch.ones_like(self.images[:1])).sum().backward()
        layers = {name: net.get_submodule(name) for name in self.paths}
        return {n: m.weight.detach() for n, m in layers.items()}, {n: m.weight.grad for n, m in layers.items()}  # type: ignore[misc, operator]


def total(terms: Any) -> float:
    return float(sum(term.item() if isinstance(term, Tensor) else float(term) for term in terms))


# --- counts -----------------------------------------------------------------------------------------------------------


def params(case: Case) -> float:
    return total(p.numel() for p in case.net.parameters())


def macs(case: Case) -> float:
    """Every output of a layer costs its fan-in; q k and a v of T tokens cost 2 T^2 times the width of the values."""
    found: Any = 0
    for name, y in case.outputs("").items():
        found += y[0].numel() * case.paths[name].weight[0].numel()
        if name.endswith("attn.proj"):
            found += 2 * y.shape[1] ** 2 * case.paths[name].in_features  # type: ignore[operator]
    return float(found)


def sept(case: Case) -> float:
    """Small enough for the formula as it is printed; widths and tokens from what the blocks give."""
    tokens = [(y.shape[2], y.shape[1]) for y in case.outputs("mlp.fc2").values()]
    return math.log(sum(d for d, _ in tokens)) + math.log(sum((d ** (t + 1) - 1) / (d - 1) for d, t in tokens))


# --- one gradient -----------------------------------------------------------------------------------------------------


def grad_norm(case: Case) -> float:
    return total(g.square().sum().sqrt() for g in case.gradients())


def snip(case: Case) -> float:
    return total((g * w).abs().sum() for g, w in zip(case.gradients(), case.weights, strict=True))


def plain(case: Case) -> float:
    return total((g * w).sum() for g, w in zip(case.gradients(), case.weights, strict=True))


def synflow(case: Case) -> float:
    weights, gradients = case.ones()
    return total((gradients[name] * w).abs().sum() for name, w in weights.items())


def grasp(case: Case) -> float:
    """H g is the derivative of the gradient along g, here a difference."""
    names = [f"{name}.weight" for name in case.paths]
    others = {name: p.detach() for name, p in case.net.named_parameters()}
    g, step = case.gradients(), 1e-5

    def moved(by: float) -> list[Tensor]:
        at = [(w.detach() + by * d).requires_grad_() for w, d in zip(case.weights, g, strict=True)]
        logits = functional_call(case.net, {**others, **dict(zip(names, at, strict=True))}, (case.images,))
        return list(torch.autograd.grad(F.cross_entropy(logits, case.labels), at))

    ends = zip(case.weights, moved(step), moved(-step), strict=True)
    return total(-(w * (ahead - behind)).sum() / (2 * step) for w, ahead, behind in ends)


def fisher(case: Case) -> float:
    outputs: list[Tensor] = []
    handles = [m.register_forward_hook(lambda *a: outputs.append(a[2])) for m in case.paths.values()]
    loss = case.loss()
    for handle in handles:
        handle.remove()
    found = []
    for y, g in zip(outputs, torch.autograd.grad(loss, outputs), strict=True):
        effect = y * g
        # Images x channels: positions of maps and tokens of sequences share a channel.
        effect = effect.sum((2, 3)) if y.ndim == 4 else effect.sum(1) if y.ndim == 3 else effect
        found.append(0.5 * effect.square().mean(0).sum())
    return total(found)


def knas(case: Case) -> float:
    rows = case.rows("loss")
    return total(a @ b for a in rows for b in rows) / len(rows) ** 2


# --- gradients of single images ---------------------------------------------------------------------------------------


def ntk_trace(case: Case) -> float:
    return math.sqrt(total(row @ row for row in case.rows("own")) / len(case.images))


def gradsign(case: Case) -> float:
    return total(case.rows("loss").sign().sum(0).abs())


def zico(case: Case) -> float:
    """Three batches, the first of them larger where the images do not divide; two have bounds in `test_per_sample`."""
    found = []
    for single in zip(*case.singles("loss"), strict=True):
        groups = np.array_split(np.stack([g.numpy() for g in single]), 3)
        means = np.stack([group.mean(axis=0) for group in groups])
        deviation = means.std(axis=0)
        found.append(np.log((np.abs(means).mean(axis=0)[deviation > 0] / deviation[deviation > 0]).sum()))
    return total(found)


def te_ntk(case: Case) -> float:
    singular = np.linalg.svd(case.rows("sum").numpy(), compute_uv=False)
    return -(float(singular[0] / singular[-1]) ** 2)


def ntkt(case: Case) -> float:
    """The squared norm of v^T J for the signs v drawn, image by image; weights up to the last block."""
    weights = [p for n, p in case.net.named_parameters() if not n.startswith(("norm.", "head."))]
    seen: list[Tensor] = []
    last = list(case.blocks().values())[-1]
    handle = last.register_forward_hook(lambda *a: seen.append(a[2]))
    case.net(case.images)
    handle.remove()
    (z,) = seen
    generator = torch_generator(case.seed, "proxy", "ntkt", 0)
    signs = torch.randint(0, 2, z.shape, generator=generator, dtype=torch.int8) * 2 - 1
    found = 0.0
    for image, sign in zip(z, signs, strict=True):
        gradient = torch.autograd.grad((image * sign).sum() / len(image), weights, retain_graph=True, allow_unused=True)
        found += total(g.square().sum() for g in gradient if g is not None)
    return found


# --- activations and features -----------------------------------------------------------------------------------------


def jacob_cov(case: Case) -> float:
    rows = []
    for image in case.images:
        leaf = image.clone().requires_grad_()
        rows.append(torch.autograd.grad(case.net(leaf[None]).sum(), leaf)[0].flatten().numpy())
    nu = np.linalg.eigvalsh(np.corrcoef(np.stack(rows))) + 1e-5
    return -float(np.sum(np.log(nu) + 1 / nu))


def codes(case: Case) -> list[Tensor]:
    """Whether the inputs of the GELUs are positive: (B, bits) of every block."""
    return [(y.flatten(1) > 0).double() for y in case.outputs("mlp.fc1").values()]


def naswot(case: Case) -> float:
    kernel = torch.stack([x @ x.t() + (1 - x) @ (1 - x).t() for x in codes(case)]).sum(0)
    return float(np.linalg.slogdet(kernel.numpy())[1])


def te_regions(case: Case) -> float:
    return float(len(torch.unique(torch.cat(codes(case), dim=1), dim=0)))


def meco(case: Case) -> float:
    """Of the first image: channels of a map, tokens of a sequence.

    A vector of logits has one observation of each, and the class token that a PiT pools is correlated with itself only.
    """
    found = []
    with np.errstate(all="ignore"):
        for y in case.outputs("").values():
            rows = y[0].detach().reshape(len(y[0]), -1).numpy()
            if min(rows.shape) > 1:
                correlation = np.nan_to_num(np.corrcoef(rows), nan=0.0)
                found.append(max(np.linalg.eigvals(correlation).real.min(), 0.0))
    return total(found)


def zen(case: Case) -> float:
    """Four draws of weights and images, alpha = 0.01."""
    scores = []
    for turn in range(4):
        draws = torch_generator(case.seed, "proxy", "zen", "images", turn)
        x, noise = (torch.randn(case.images.shape, generator=draws).double() for _ in range(2))
        net, draws = copy.deepcopy(case.net), torch_generator(case.seed, "proxy", "zen", "weights", turn)
        with torch.no_grad():
            for name in case.paths:
                layer: Any = net.get_submodule(name)
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=draws))
                layer.bias.zero_()
            moved = net.forward_features(x) - net.forward_features(x + 0.01 * noise)  # type: ignore[operator]
        scores.append(math.log(np.mean([image.abs().sum().item() for image in moved])))
    return float(np.mean(scores))


def length_distortion(case: Case) -> float:
    """Three circles of 500 points; the derivative by theta is a difference."""
    twin: Any = one_patch_twin(case.net)[0]
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.LayerNorm):
            twin.set_submodule(name, nn.Identity())
    side = twin.img_size

    def features(x: Tensor) -> Tensor:
        z: Tensor = twin.forward_head(twin.forward_features(x), pre_logits=True)
        return z

    found = []
    with torch.no_grad():
        for turn in range(3):
            generator = torch_generator(case.seed, "proxy", "length_distortion", turn)
            x, dx = circle(generator, 500, (case.images.shape[1], *side))
            across, step = 1e-4, math.sin(1e-4)  # x cos h + x' sin h is the point at theta + h
            ahead, behind = (features(x * math.cos(across) + sign * dx * step) for sign in (1, -1))
            found.append(((ahead - behind) / (2 * across)).norm(dim=1).sum())
    return total(found) / 3


# --- weights and surfaces ---------------------------------------------------------------------------------------------


def dss_halves(case: Case) -> tuple[float, float]:
    weights, gradients = case.ones()
    diverse = [name for name in weights if name.endswith(("attn.qkv", "attn.proj"))]
    salient = [name for name in weights if name.endswith(("mlp.fc1", "mlp.fc2"))]
    nuclear = torch.linalg.matrix_norm
    return (
        total(nuclear(weights[name], "nuc") * nuclear(gradients[name], "nuc") for name in diverse),
        total((weights[name] * gradients[name]).abs().sum() for name in salient),
    )


def dss(case: Case) -> float:
    return sum(dss_halves(case))


def snip_norm(case: Case) -> float:
    """Everything inside of a block counts, norms, biases and tables too."""

    def by_block(net: nn.Module) -> list[float]:
        names, values = zip(*net.named_parameters(), strict=True)
        gradients = torch.autograd.grad(net(case.images).sum(), values, allow_unused=True)
        terms = {n: (g * w).abs().sum() for n, g, w in zip(names, gradients, values, strict=True) if g is not None}
        return [total(t for n, t in terms.items() if n.startswith(f"{block}.")) for block in case.blocks(net)]

    largest = dict(zip(case.blocks(case.largest), by_block(case.largest), strict=True))
    return sum(own / largest[name] for name, own in zip(case.blocks(), by_block(case.net), strict=True))


def auto_prox_a(case: Case) -> float:
    g = dict(zip(case.paths, case.gradients(), strict=True))
    found = []
    for block in case.blocks():
        mlp = torch.cat([g[f"{block}.mlp.fc1"].flatten(), g[f"{block}.mlp.fc2"].flatten()])
        found.append(g[f"{block}.attn.qkv"].abs().sum() + torch.sigmoid(mlp).sum() / (len(mlp) + 1e-9))
    return total(found) / len(found)


def auto_prox_p(case: Case) -> float:
    found = []
    for block in case.blocks().values():
        rows = torch.cat([layer.weight.square().sum(1).sqrt() for layer in (block.mlp.fc1, block.mlp.fc2)])
        attention = torch.sigmoid(block.attn.qkv.weight).square().sum().sqrt()
        found.append(attention - torch.log(rows.exp() / rows.exp().sum()).mean())
    return total(found) / len(found)


def auto_prox_released(case: Case) -> float:
    seen: list[Tensor] = []
    handles = [b.mlp.fc1.register_forward_hook(lambda *a: seen.append(a[2])) for b in case.blocks().values()]
    loss = case.loss()
    for handle in handles:
        handle.remove()
    found = []
    for block, g in zip(case.blocks().values(), torch.autograd.grad(loss, seen), strict=True):
        w = block.mlp.fc1.weight
        found.append((((w - w.min()) / (w.max() - w.min())).square().sum().sqrt() + torch.sigmoid(g).sqrt()).mean())
    return total(found) / len(found)


ALONE: Mapping[str, Callable[[Case], float]] = {
    f.__name__: f
    for f in (
        *(params, macs, grad_norm, snip, plain, synflow, grasp, fisher, jacob_cov, naswot, zen, te_ntk, te_regions),
        *(ntk_trace, gradsign, knas, zico, meco, length_distortion, dss, ntkt, sept, snip_norm),
        *(auto_prox_a, auto_prox_p, auto_prox_released),
    )
}


# --- over a comparison set --------------------------------------------------------------------------------------------


RANKED: Mapping[str, tuple[tuple[Callable[[Case], float], ...], float]] = {
    "te_nas": ((te_ntk, te_regions), 1.0),
    "dss_pp": ((lambda case: dss_halves(case)[0], lambda case: dss_halves(case)[1]), 1.0),
    "ntsr": ((ntkt, sept), 0.5),
}
"""Sums of the ranks of these quantities, times a factor."""


def ranked(name: str, cases: list[Case]) -> list[float]:
    """The score of every network of the set."""
    quantities, factor = RANKED[name]
    columns = [[quantity(case) for case in cases] for quantity in quantities]
    return [factor * sum(_rank(column[i], column) for column in columns) for i in range(len(cases))]


def _rank(value: float, column: list[float]) -> float:
    """1 for the smallest; equal ones share the middle of their places."""
    return sum(other < value for other in column) + (sum(other == value for other in column) + 1) / 2
