"""What the documents say of proxies and strategies is complete: each one and every option, with its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

import lightning_tas as tas
from lightning_tas.callbacks.exact_job import ExactJob
from lightning_tas.callbacks.search_check import EXACT, EXACT_SETTINGS, strategy_names
from lightning_tas.search.strategy import settings_of, strategies

DOCS = Path(__file__).resolve().parents[1] / "docs"
TEXT = (DOCS / "proxies.md").read_text(encoding="utf-8")
EXACT_DEFAULTS = {one.name: one.default for one in fields(ExactJob)}
ROWS = {
    name: line
    for line in TEXT.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
}


def test_every_proxy_and_option_is_explained() -> None:
    assert set(ROWS) == set(tas.proxies())
    for name, one in tas.proxies().items():
        switches = ROWS[name].split(" | ", 2)[-1]
        for option, default in one.options.items():
            found = re.search(rf"`{option}` \((\w+(\.\d+)?)", switches)
            assert found, f"{name}: option {option} is not explained"
            said = {"false": False, "none": None}.get(found.group(1), found.group(1))
            assert str(said) == str(default), f"{name}: {option} is {default} by default, not {said}"
        for option in re.findall(r"`(\w+)` \(", switches):
            assert option in one.options, f"{name} has no option {option}"


def documented() -> dict[str, dict[str, Any]]:
    """Strategy to its settings and their defaults, by the two tables of docs/search.md."""
    section = (DOCS / "search.md").read_text(encoding="utf-8").partition("### Settings\n")[2].partition("\n### ")[0]
    found: dict[str, dict[str, Any]] = {}

    def add(strategy: str, setting: str, default: str) -> None:
        own = found.setdefault(strategy.strip("`"), {})
        assert setting.strip("`") not in own, f"{strategy}: {setting} is listed twice"
        own[setting.strip("`")] = yaml.safe_load(default.strip("`"))

    heads: list[str] = []
    for line in section.splitlines():
        cells = line.strip("| ").split(" | ")
        if not line.startswith("| `"):
            heads = cells if line.startswith("| s") else heads
            continue
        assert cells[-1].strip(), f"{line} says nothing"
        if heads[0] == "strategy":
            add(*cells[:3])
            continue
        for strategy, default in zip(heads[1:-1], cells[1:-1], strict=True):
            if default != "-":
                add(strategy, cells[0], default)
    return found


def test_every_setting_of_every_strategy_is_explained() -> None:
    real = {name: settings_of(name) for name in strategies()}
    real[EXACT] = {name: EXACT_DEFAULTS[name] for name in EXACT_SETTINGS}
    assert sorted(real) == strategy_names()
    plain = {
        name: {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
        for name, settings in real.items()
    }
    assert documented() == plain
