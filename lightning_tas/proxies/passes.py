"""Shared passes: one forward and backward of a network, which any number of proxies watch.

A pass has fixed inputs (images, weights) and an objective; watchers see every layer's input, output and gradient while
it runs, so nothing has to be kept for later. Gradients are taken by `torch.autograd.grad` of detached copies of the
weights: no `.grad` is ever written.

Shapes: B images, weights as stored; a layer's input x and output y are (B, T, in) and (B, T, out) for token layers,
(B, in) and (B, out) for heads, maps (B, C, H, W) for convolutions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_tas.proxies.roles import NORM, Layer

if TYPE_CHECKING:
    from lightning_tas.proxies.probe import Probe

Objective = Callable[[Tensor], Tensor]
_DEAD, _ALIVE, _BROKEN = 0, 1, 2
_FLAWS = {_DEAD: "no gradient reaches layer {}", _BROKEN: "the gradient of layer {} is not finite"}


class Watcher:
    """What a proxy wants to see of a pass; it overrides the methods that it needs.

    `roles`: which layers it looks at; None is every layer with a weight matrix, norms not. Methods run under `no_grad`
    and must not keep what they are given longer than they need it.
    """

    roles: frozenset[str] | None = None
    seconds: float = 0.0

    def wants(self, layer: Layer) -> bool:
        """Whether it looks at `layer`."""
        return layer.role != NORM if self.roles is None else layer.role in self.roles

    def forward(self, layer: Layer, x: Tensor, y: Tensor) -> None:
        """Called after `layer` has computed `y` from `x`."""

    def backward(self, layer: Layer, x: Tensor, y: Tensor, grad_y: Tensor) -> None:
        """Called when the gradient of the objective by `y` is known; layers come in reverse order."""

    def flow(self, layer: Layer, x: Tensor, grad_y: Tensor) -> None:
        """As `backward`, for watchers that can do without `y`: it then need not be kept until the gradient comes."""

    def samples(self, layer: Layer, grads: Tensor) -> None:
        """The gradient of the objective by the layer's weight, image by image: (B, *weight.shape).

        An objective that is a mean over images has its 1/B in them. Computed once for all watchers.
        """


def _overrides(watcher: Watcher, *methods: str) -> bool:
    return any(getattr(type(watcher), method) is not getattr(Watcher, method) for method in methods)


class Pass:
    """One forward and, where anybody needs it, backward pass of a probe's network.

    images: (B, C, H, W). objective: logits (B, classes) to a scalar. weights: changes the detached weights before use,
    (name, weight) -> weight. dtype: of weights and images. call: how the network is run, by default its forward:
    ``call(net, weights, images)``.
    """

    def __init__(
        self,
        probe: Probe,
        objective: Objective,
        images: Tensor,
        *,
        weights: Callable[[str, Tensor], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        call: Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor] | None = None,
    ) -> None:
        self._probe, self._objective, self._call = probe, objective, call or _forward
        self._images, self._change, self.dtype = images, weights, dtype
        self._watchers: list[Watcher] = []
        self._wanted: set[str] = set()
        self._want_images = False
        self._done = False
        self._gradients: dict[str, Tensor] = {}
        self._reached: dict[tuple[str, str], Tensor] = {}  # by (kind of gradient, layer): its `_state`
        self._image_gradients: Tensor | None = None
        self._values: dict[str, Tensor] = {}
        self._output: Tensor | None = None
        self._finite = True
        self._bad: dict[tuple[str, str], int] = {}  # the states that no proxy can do with
        self._seconds = 0.0

    # --- before the run -----------------------------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        """Let `watcher` see the pass."""
        assert not self._done, "a pass can only be watched before it runs: construct all proxies first"
        self._watchers.append(watcher)
        self._probe.note(self)
        self._probe.note_watcher(self, watcher)

    def want_gradients(self, names: Iterable[str] | None = None) -> None:
        """Compute the gradients of all parameters, or at least of those called `names`."""
        wanted = {name for name, _ in self._probe.net.named_parameters()} if names is None else set(names)
        assert not self._done or wanted <= self._wanted, "ask for gradients before the pass runs"
        self._wanted |= wanted
        self._probe.note(self, wanted)

    def want_image_gradients(self) -> None:
        """Compute the gradient of the images."""
        assert not self._done or self._want_images, "ask for gradients before the pass runs"
        self._want_images = True
        self._probe.note(self)

    # --- results ------------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Gradient of the objective by every parameter asked for, by name; zeros where it does not depend on one."""
        assert self._wanted
        self.run()
        return self._gradients

    @property
    def image_gradients(self) -> Tensor:
        """Gradient of the objective by the images, (B, C, H, W)."""
        assert self._want_images
        self.run()
        assert self._image_gradients is not None
        return self._image_gradients

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The detached parameters that the pass used, by name."""
        self.run()
        return self._values

    @property
    def output(self) -> Tensor:
        """What the network returned, detached: (B, classes) logits."""
        self.run()
        assert self._output is not None
        return self._output

    @property
    def flaw(self) -> str | None:
        """Why nothing computed from this pass can be trusted, or None."""
        return self.flaw_for(self._wanted, self._watchers)

    def flaw_for(self, wanted: Iterable[str], watchers: Iterable[Watcher]) -> str | None:
        """Why what these gradients and watchers give cannot be trusted, or None.

        Not finite, or a layer that no gradient reaches: a zero by accident is no score. Gradients do not concern those
        who look at the forward pass alone.
        """
        self.run()
        if not self._finite:
            return "the network's output is not finite"
        names, kinds = set(wanted), [(kind, w) for w in watchers if (kind := _kind(w)) is not None]
        for layer in self._probe.layers:
            looked = [kind for kind, w in kinds if w.wants(layer)] + ["weight"] * (layer.weight in names)
            states = [self._bad[kind, layer.name] for kind in looked if (kind, layer.name) in self._bad]
            if states:
                return _FLAWS[states[0]].format(layer.name)
        return None

    @property
    def own_seconds(self) -> float:
        """Duration without the time that watchers took."""
        return self._seconds - sum(watcher.seconds for watcher in self._watchers)

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the pass if it has not run yet."""
        if self._done:
            return
        self._done = True
        began = time.perf_counter()
        net = self._probe.net
        backward = any(_overrides(w, "backward", "flow", "samples") for w in self._watchers)
        differentiate = bool(self._wanted) or self._want_images or backward
        values, images = self._leaves(net, backward)
        handles = [
            layer.module.register_forward_hook(self._hook(layer))
            for layer in self._probe.layers
            if any(w.wants(layer) for w in self._watchers)
        ]
        try:
            with torch.set_grad_enabled(differentiate):
                output = (
                    functional_call(net, values, (images,)) if self._call is None else self._call(net, values, images)
                )
                objective = self._objective(output)
                if differentiate:
                    self._differentiate(objective, values, images)
        finally:
            for handle in handles:
                handle.remove()
        self._output = output.detach()
        self._values = {name: value.detach() for name, value in values.items()}
        self._judge(objective.detach())
        self._seconds = time.perf_counter() - began

    def _leaves(self, net: nn.Module, backward: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Detached weights and images; those that need it require gradients."""
        values = {}
        for name, parameter in net.named_parameters():
            value = parameter.detach().to(self.dtype)
            values[name] = value if self._change is None else self._change(name, value)
        images = self._images.to(self.dtype)
        leaves = set(self._wanted)
        if self._want_images:
            images = images.detach().requires_grad_()
        elif backward:
            # For watchers: everything from the first layer on then has a gradient, at the price of one vector's.
            leaves.add(self._first_bias(values))
        values = {n: value.detach().requires_grad_() if n in leaves else value for n, value in values.items()}
        return values, images

    def _first_bias(self, values: Mapping[str, Tensor]) -> str:
        layer = self._probe.layers[0]
        name = f"{layer.name}.bias"
        return name if name in values else layer.weight

    def _differentiate(self, objective: Tensor, values: Mapping[str, Tensor], images: Tensor) -> None:
        leaves = {name: value for name, value in values.items() if value.requires_grad}
        inputs = [*leaves.values(), *([images] if images.requires_grad else [])]
        found = torch.autograd.grad(objective, inputs, allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), found, strict=False):
            if name in self._wanted:
                self._gradients[name] = torch.zeros_like(leaf) if gradient is None else gradient
        if self._want_images:
            assert found[-1] is not None
            self._image_gradients = found[-1]

    def _hook(self, layer: Layer) -> Callable[..., None]:
        watchers = [w for w in self._watchers if w.wants(layer)]
        per_sample = [w for w in watchers if _overrides(w, "samples")]
        flow = [w for w in watchers if _overrides(w, "flow")]
        back = [w for w in watchers if _overrides(w, "backward")]

        def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x, y = inputs[0].detach(), output.detach()
            with torch.no_grad():
                for watcher in watchers:
                    _timed(watcher, watcher.forward, layer, x, y)
            if output.requires_grad and (back or flow or per_sample):
                kept = [x, y if back else None]
                output.register_hook(lambda gradient: seen(kept, gradient.detach()))

        @torch.no_grad()
        def seen(kept: list[Tensor | None], gradient: Tensor) -> None:
            y, x = kept.pop(), kept.pop()  # taken out: the graph outlives its backward pass, activations need not
            assert x is not None
            if back:
                self._reached["output", layer.name] = _state(gradient)
            for watcher in back:
                _timed(watcher, watcher.backward, layer, x, y, gradient)
            for watcher in flow:
                _timed(watcher, watcher.flow, layer, x, gradient)
            if per_sample:
                began = time.perf_counter()
                grads = sample_gradients(layer.module, x, gradient)
                self._reached["samples", layer.name] = _state(grads)
                spent = time.perf_counter() - began
                for watcher in per_sample:
                    watcher.seconds += spent if watcher is per_sample[0] else 0.0
                    _timed(watcher, watcher.samples, layer, grads)

        return after

    def _judge(self, objective: Tensor) -> None:
        """Is the objective finite, and are gradients, and which layers do none reach? One look at the device."""
        facts = {("weight", o.name): _state(self._gradients[o.weight]) for o in self._of_gradients()} | self._reached
        finite, *states = torch.stack([f.reshape(()).int() for f in (objective.isfinite(), *facts.values())]).tolist()
        self._finite = bool(finite)
        self._bad = {key: state for key, state in zip(facts, states, strict=True) if state != _ALIVE}
        for kind, watcher in ((_kind(w), w) for w in self._watchers):
            if kind is not None:
                looked = [(kind, layer.name) for layer in self._probe.layers if watcher.wants(layer)]
                self._bad |= {key: _DEAD for key in looked if key not in facts}

    def _of_gradients(self) -> list[Layer]:
        return [layer for layer in self._probe.layers if layer.role != NORM and layer.weight in self._gradients]


def _kind(watcher: Watcher) -> str | None:
    """The gradient that a watcher cannot do without: of single images, or of the outputs."""
    return "samples" if _overrides(watcher, "samples") else "output" if _overrides(watcher, "backward") else None


def _state(values: Tensor) -> Tensor:
    """Whether a gradient is zero everywhere, something, or somewhere not finite; the cheapest way for floats."""
    low, high = values.aminmax()
    finite = low.isfinite() & high.isfinite()  # NaN goes through the extremes
    return torch.where(finite, (low != 0) | (high != 0), _BROKEN)


def _forward(net: nn.Module, weights: dict[str, Tensor], images: Tensor) -> Tensor:
    output: Tensor = functional_call(net, weights, (images,))
    return output


def _timed(watcher: Watcher, method: Callable[..., None], *args: Any) -> None:
    began = time.perf_counter()
    method(*args)
    watcher.seconds += time.perf_counter() - began


def sample_gradients(module: nn.Module, x: Tensor, grad_y: Tensor) -> Tensor:
    """Gradient by the weight of a linear layer or convolution, image by image: (B, *weight.shape).

    It costs what the ordinary gradient costs: a batched product instead of one product over all rows.
    """
    if isinstance(module, nn.Conv2d):
        return _conv_gradients(module, x, grad_y)
    if x.ndim == 2:
        return grad_y[:, :, None] * x[:, None, :]  # (B, out, 1) x (B, 1, in)
    rows = x.flatten(1, -2)  # (B, T, in)
    return grad_y.flatten(1, -2).transpose(1, 2) @ rows  # (B, out, T) @ (B, T, in) -> (B, out, in)


def _conv_gradients(conv: nn.Conv2d, x: Tensor, grad_y: Tensor) -> Tensor:
    """A convolution is a linear layer on unfolded patches, separately in every group."""
    assert not isinstance(conv.padding, str)
    patches = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)  # (B, C * k * k, positions)
    patches = patches.unflatten(1, (conv.groups, -1))  # (B, groups, C / groups * k * k, positions)
    grads = grad_y.flatten(2).unflatten(1, (conv.groups, -1))  # (B, groups, out / groups, positions)
    found = grads @ patches.transpose(-1, -2)  # (B, groups, out / groups, C / groups * k * k)
    return found.flatten(1, 2).unflatten(-1, conv.weight.shape[1:])
