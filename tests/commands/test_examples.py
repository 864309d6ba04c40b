"""Every command that `--help`, the documents and the recipes show can be typed: its settings compose and fit together.

Files that an example only stands for (runs, checkpoints, recipes, benchmarks of one's own) are put where it looks.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lightning_tas.catalogue import PUBLISHED
from lightning_tas.commands import build, checks, help, multirun, names
from lightning_tas.commands.compose import config_from
from lightning_tas.commands.config import Config, to_yaml
from lightning_tas.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
MODULE = "python -m lightning_tas."
STANDS_FOR = {"RUN": "runs/quickstart/NAME", "recipe=NAME": "recipe=t_razor_tiny", "bench=FILE": "bench=mine.json"}
"""Placeholders, and an example of what they stand for."""
OWN = "# One of the user's own\ndefaults: [prenas_tiny]\n"


def shown(text: str) -> Iterator[str]:
    """The commands of a Markdown file, in fenced blocks and in the text; of fenced ones without what starts them."""
    blocks = r"```\w*\n(.*?)```"
    for block in re.findall(blocks, text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            before, mark, rest = line.partition(MODULE)
            if mark and "#" not in before:
                yield mark + rest
    yield from re.findall(rf"`({re.escape(MODULE)}[^`]*=[^`]*)`", re.sub(blocks, "", text, flags=re.DOTALL))


def examples() -> dict[str, str]:
    """Command to where it is shown."""
    found = {}
    for command in help.ABOUT:
        _, _, rest = help.text(command).partition("examples:\n")
        found |= {line.strip(): f"{command} --help" for line in rest.partition("\n\n")[0].splitlines()}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        found |= dict.fromkeys(shown(path.read_text(encoding="utf-8")), path.name)
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        found |= {MODULE + line.partition(MODULE)[2]: path.name for line in comments if MODULE in line}
    # Settings alone, as a table has them, are for the recipe that the table is about.
    text = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    for settings in re.findall(r"`(search\.strategy=\w+ [^`]*)`", text):
        quoted = re.sub(r"(\S+=\{[^}]*\})", r"'\1'", settings)
        found[f"{MODULE}search recipe=t_razor_tiny {quoted}"] = "search.md"
    return found


EXAMPLES = examples()


def test_examples_are_found() -> None:
    """Of all commands, in all places."""
    assert {call.removeprefix(MODULE).split()[0] for call in EXAMPLES} == set(help.ABOUT)
    assert {"README.md", "search.md", "vit_bench_101.md", "etas_tiny.yaml"} <= set(EXAMPLES.values())
    assert len(EXAMPLES) > 50
    with pytest.raises(UserError, match=r"search.mode: 'exact' is not valid"):  # so a slip would be seen
        configurations("search", ["recipe=t_razor_tiny", "search.strategy=exact", "search.score=snip"])


def configurations(command: str, arguments: list[str]) -> list[Config]:
    if "-m" not in arguments:
        return [config_from(command, arguments)]
    sweeps = [multirun.split(argument) for argument in arguments if argument != "-m"]
    return [config_from(command, list(values)) for values in itertools.product(*sweeps)]


@cache
def recipe(name: str) -> str:
    return to_yaml(config_from("fit", [f"recipe={name}"]))


def place(arguments: list[str]) -> None:
    """Put the files that an example names where it looks for them."""
    for argument in arguments:
        value = argument.partition("=")[2]
        if match := re.match(r"runs/(\w+)/\w+", value):
            run = Path(match[0])
            run.mkdir(parents=True, exist_ok=True)
            (run / "study.json").write_text("{}")
            (run / "config.yaml").write_text(recipe(match[1]))
            label = value.partition("@")[2] or "best"
            found = [{"label": label, "arch": PUBLISHED["autoformer_t"].to_dict()}]
            for name, key in (("result.json", "architectures"), ("search.json", "networks")):
                (run / name).write_text(json.dumps({key: found}))
        elif re.fullmatch(r"[./\w-]+\.(pth|json|yaml)", value):
            Path(value).write_text(OWN if value.endswith("yaml") else "{}")


@pytest.mark.parametrize("call", EXAMPLES)
@pytest.mark.slow
def test_an_example_can_be_typed(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refused, and nothing ignored, of what can be told before files are read."""
    monkeypatch.chdir(tmp_path)
    for word, meant in STANDS_FOR.items():
        call = re.sub(rf"\b{word}\b", meant, call)
    command, *arguments = shlex.split(call.removeprefix(MODULE), comments=True)
    if "--help" in arguments:
        return
    place(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in configurations(command, arguments):
            names.check(command, config)
            if command == "search":
                config.phases = ["search"]
            if command in ("fit", "search"):
                checks.check_phases(config)
                # What is left needs neither weights nor a clock: limits and options against the space itself.
                config.ckpt = config.limits.latency = None
                if config.space is not None:
                    checks.check_selection(config, build.data(config), tmp_path)
