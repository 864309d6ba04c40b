"""The text of `--help`: what a command does, the recipes with a line each, every key with its default."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from lightning_tas.commands import recipes
from lightning_tas.commands.config import Config

WIDTH = 100
ABOUT = {
    "fit": (
        "Run a recipe: select architectures, train a supernet or a network, measure.",
        "recipe=NAME [key=value ...]",
        (
            "recipe=quickstart",
            "recipe=prenas_tiny data.root=/data/imagenet trainer.devices=8",
            "recipe=prenas_tiny plan=true          # sizes, steps, costs and memory; trains nothing",
            "recipe=prenas_tiny smoke=true         # the whole recipe in seconds on synthetic data",
            "recipe=./mine.yaml                    # your own, `defaults: [prenas_tiny]` inherits",
            "config=runs/quickstart/NAME/config.yaml   # repeat a run exactly",
            "-m recipe=prenas_tiny,autoformer_tiny seed=0,1   # every combination, each in its own run folder",
        ),
    ),
    "evaluate": (
        "Measure networks of a run, or of an official checkpoint, on the test set.",
        "ckpt=RUN [arch=LABEL|ID|FILE] [key=value ...]",
        (
            "ckpt=runs/quickstart/NAME             # every specialised network of the run",
            "ckpt=runs/quickstart/NAME arch=LABEL  # one of them, by label or id",
            "ckpt=supernet-tiny.pth source=autoformer arch=autoformer_t data.name=imagenet data.root=/data/imagenet",
        ),
    ),
    "search": (
        "Search a space: training-free by proxies, or by accuracy on a trained supernet.",
        "recipe=NAME | ckpt=RUN [key=value ...]",
        (
            "recipe=t_razor_tiny                        # DSS++ and block-wise evolution, no data, no training",
            "recipe=t_razor_tiny search.strategy=exact search.score=snip search.mode=inherited   # the optimum, proven",
            "recipe=autoformer_tiny ckpt=runs/autoformer_tiny/NAME limits.params=[5M,7M]   # on a trained supernet",
            "ckpt=runs/autoformer_fashion_mnist/NAME search.strategy=random search.options={networks:1000}",
            "recipe=t_razor_tiny run=a resume=auto      # go on where it stopped",
        ),
    ),
    "score": (
        "Score networks with zero-cost proxies, and correlate the scores with real accuracies.",
        "recipe=NAME bench=FILE | ckpt=RUN [key=value ...]",
        (
            "recipe=vit_bench_pit bench=pit.json          # every proxy on networks with known accuracies",
            "recipe=vit_bench_pit bench=pit.pth bench.proxies=[dss,snip] bench.inits=1",
            "ckpt=runs/quickstart/NAME bench.networks=100   # against accuracies in a trained supernet",
            "recipe=vit_bench_pit bench=pit.json plan=true  # what would be scored, and how long it takes",
            "recipe=vit_bench_pit bench=pit.json run=a resume=auto   # go on where it stopped",
        ),
    ),
    "export": (
        "Write one network as safetensors with a config.json that timm can build from.",
        "ckpt=RUN arch=LABEL|ID|FILE [output_dir=FOLDER]",
        ("ckpt=runs/quickstart/NAME arch=LABEL output_dir=exported",),
    ),
}

OWN = {
    "evaluate": ("ckpt", "arch", "source", "weights", "output_dir", "data"),
    "export": ("ckpt", "arch", "source", "weights", "output_dir"),
    "score": ("recipe", "ckpt", "run", "resume", "plan", "bench"),
    "search": ("recipe", "ckpt", "space", "run", "resume", "plan", "search", "limits"),
}
"""The keys and groups that a command is about, where it is not about all."""


def text(command: str) -> str:
    """Help of `command`."""
    about, usage, examples = ABOUT[command]
    call = f"python -m lightning_tas.{command}"
    lines = [about, "", f"usage: {call} {usage}", "", "examples:"]
    lines += [f"  {call} {example}" for example in examples]
    names = list(recipes.packaged())
    widest = max(map(len, names), default=0)
    lines += ["", "recipes:"]
    for name in names:
        lines += _hanging(f"  {name.ljust(widest)}  ", recipes.description(name))
    every = [item.name for item in fields(Config)]
    own = OWN.get(command, every)
    lines += ["", "keys (key=value; lists as [a,b]; null for nothing):"]
    lines += _keys(Config(), Config, "", own)
    if len(own) < len(every):
        lines += ["", "keys of other commands, in whose run folders and recipes they are found:"]
        lines += _keys(Config(), Config, "", [name for name in every if name not in own])
    return "\n".join(lines) + "\n"


def overview() -> str:
    """Every command with a line on it."""
    lines = [
        "Train and search Transformers on PyTorch Lightning.",
        "",
        "usage: lightning-tas COMMAND key=value ...",
        "",
    ]
    lines += [f"  {command.ljust(max(map(len, ABOUT)))}  {about}" for command, (about, *_) in ABOUT.items()]
    lines += [
        "",
        "`lightning-tas COMMAND --help` lists recipes and keys; `python -m lightning_tas.COMMAND` is the same.",
    ]
    return "\n".join(lines) + "\n"


def _keys(values: Any, section: type, prefix: str, names: Sequence[str] | None = None) -> list[str]:
    """The keys of one section (of it only `names`, in their order), its groups after its own."""
    comments, known = _comments(section), {item.name: item for item in fields(section)}
    own, groups = [], []
    for item in [known[name] for name in names or known]:
        value = getattr(values, item.name)
        if is_dataclass(value):
            about = (inspect.getdoc(type(value)) or "").partition("\n")[0]
            groups += ["", f"{prefix}{item.name}.*: {about}", *_keys(value, type(value), f"{prefix}{item.name}.")]
        else:
            own += _hanging(
                f"  {f'{prefix}{item.name}={_shown(item, value)}'.ljust(38)}  ", comments.get(item.name, "")
            )
    return own + groups


def _shown(item: Field[Any], value: Any) -> str:
    assert item.default is not MISSING or item.default_factory is not MISSING
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "") if isinstance(value, list) else str(value)


def _comments(section: type) -> dict[str, str]:
    """Field name to the comment behind it in the source: one place says what a key means."""
    found = {}
    for line in inspect.getsource(section).splitlines():
        code, mark, comment = line.partition("  # ")
        name, colon, _ = code.strip().partition(":")
        if mark and colon and name.isidentifier():
            found[name] = comment.strip()
    return found


def _hanging(head: str, tail: str) -> list[str]:
    return textwrap.wrap(
        head + tail, WIDTH, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False
    ) or [head]
