"""What the README shows is run: its Python, its recipe, its space, and the commands of its list are spelt right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from lightning_tas.commands.entry import main
from lightning_tas.proxies import registry

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found
    return found


@pytest.mark.slow
def test_the_tour_of_the_python_interface() -> None:
    (code,) = [block for block in blocks("python") if "select_preferred" in block]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["logits"].shape == (2, 10)
    assert names["alone"](names["torch"].zeros(1, 3, 64, 64)).shape == (1, 10)


@pytest.mark.slow
def test_the_proxies_are_scored_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block for block in blocks("python") if "score_many" in block]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["score"].valid and names["fresh"].valid and len(names["table"]) == 4 and len(names["fast"]) == 100_000
    (code,) = [block for block in blocks("python") if '@register("widths"' in block]
    exec(compile(code, "README.md", "exec"), {})
    try:
        assert names["tas"].score_one("widths", names["net"], names["arch"]).value > 0
    finally:
        del registry._PROXIES["widths"]
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in blocks("python") if "mine.json" in block]
    exec(compile(code, "README.md", "exec"), names)
    (call,) = re.findall(r"`python -m lightning_tas\.score (.*bench=mine\.json .*)`", README)
    assert main("score", [*shlex.split(call), "bench.proxies=[sept]", "bench.inits=1", "run=a"]) == 0
    assert len((tmp_path / "runs/vit_bench_autoformer/a/scores.csv").read_text().splitlines()) == 1 + 20


@pytest.mark.slow
def test_searches_from_python() -> None:
    """The callback of the README and the ask/tell loop of docs/search.md."""
    (code,) = [block for block in blocks("python") if "EvolutionSearch" in block]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["search"].search.options == {"population": 20, "generations": 5}
    text = (Path(__file__).parents[1] / "docs" / "search.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "build_strategy" in block]
    exec(compile(code, "docs/search.md", "exec"), names)
    best = names["strategy"].best
    assert names["strategy"].evaluations == 120 and 5_000_000 <= best.params <= 7_000_000


def test_registering_a_data_set() -> None:
    from lightning_tas.data import TASDataModule
    from lightning_tas.data.config import DataConfig

    (code,) = [block for block in blocks("python") if '@register("mine")' in block]
    images = [(Image.new("RGB", (32, 32), (40 * i, 0, 0)), i % 2) for i in range(12)]
    exec(compile(code, "README.md", "exec"), {"train_set": images, "test_set": images})
    data = TASDataModule(DataConfig(name="mine", batch_size=4, search_val=2))
    batch, targets = next(iter(data.train_dataloader()))
    assert (batch.shape, targets.shape) == ((4, 3, 32, 32), (4,))


def test_the_recipe_and_the_space_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for start in ("# What --help", "space:"):
        (text,) = [block for block in blocks("yaml") if block.startswith(start)]
        content = yaml.safe_load(text)
        content.setdefault("defaults", ["prenas_fashion_mnist"])
        own = content.get("data", {"search_val": 0.1})
        content["data"] = {**own, "name": "synthetic", "root": None, "img_size": 32, "in_chans": 3}
        content.setdefault("model", {"patch_size": 8})
        path = tmp_path / "mine.yaml"
        path.write_text("# From the README\n" + yaml.safe_dump(content))
        assert main("fit", [f"recipe={path}", "plan=true", "select.batch_size=2", f"output_dir={tmp_path}"]) == 0
        assert "preferred architectures" in capsys.readouterr().out


def test_the_listed_commands_name_real_modules_recipes_and_keys() -> None:
    from lightning_tas.commands import recipes
    from lightning_tas.commands.schema import all_keys

    valid = set(all_keys())
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    calls = [line.partition("  #")[0] for line in lines if line.startswith("python -m lightning_tas.")]
    assert len(calls) >= 8
    for call in calls:
        _, _, module, *arguments = shlex.split(call)
        assert module.removeprefix("lightning_tas.") in {"fit", "search", "evaluate", "export", "score"}
        for argument in arguments:
            if argument in ("--help", "-m"):
                continue
            key, _, value = argument.partition("=")
            assert key in valid or (module, key) == ("lightning_tas.score", "bench"), call
            if key == "recipe" and not value.startswith("./"):
                assert set(value.split(",")) <= set(recipes.packaged()), call
