"""The package works as a wheel elsewhere, as an editable install and from a bare checkout, in one namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "lightning_tas", "callbacks", "recipes")
PROBE = """
import importlib.resources, importlib.util, lightning_tas, lightning_tas.callbacks, lightning_tas.recipes
names = sorted(f.name for f in importlib.resources.files("lightning_tas.recipes").iterdir() if f.name.endswith(".yaml"))
print(lightning_tas.__file__)
print(lightning_tas.callbacks.__file__)
print(",".join(names))
print([importlib.util.find_spec(name) is not None for name in ("callbacks", "recipes")])
"""


def run(*arguments: str, cwd: Path, paths: str = "") -> str:
    """Standard output of this Python in a clean environment; `paths` is its PYTHONPATH."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare copy of what is packaged, so that builds leave nothing in the real checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("wheel") / "source"
    shutil.copytree(checkout, source)
    pip = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(source.parent), str(source)]
    run(*pip, cwd=source.parent)
    return next(source.parent.glob("*.whl"))


def recipes() -> str:
    return ",".join(sorted(f.name for f in (ROOT / "recipes").glob("*.yaml")))


def test_every_package_is_listed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for top in ("lightning_tas", "callbacks", "recipes")
        for file in (ROOT / top).rglob("__init__.py")
    }
    renamed = {f"lightning_tas.{name}" if name.startswith(("callbacks", "recipes")) else name for name in found}
    assert sorted(listed) == sorted(renamed)
    holes = [f for f in (ROOT / "lightning_tas").rglob("*.py") if not (f.parent / "__init__.py").exists()]
    assert not holes, "folders with Python files and no __init__.py are not installed"


def test_bare_checkout(checkout: Path) -> None:
    main, callbacks, names, _ = run("-c", PROBE, cwd=checkout).splitlines()
    assert Path(main) == checkout / "lightning_tas" / "__init__.py"
    assert Path(callbacks) == checkout / "callbacks" / "__init__.py"
    assert names == recipes()
    out = run("-m", "lightning_tas.fit", "--help", cwd=checkout)
    assert "quickstart" in out


def test_installed_distribution_owns_one_top_level_name() -> None:
    """Holds for the editable install of CI and for a wheel; skipped where only a checkout is on the path."""
    try:
        distribution = metadata.distribution("lightning_tas")
    except metadata.PackageNotFoundError:
        assert not os.environ.get("CI"), "CI installs the project"
        pytest.skip("lightning_tas is not installed here")
    top_level = (distribution.read_text("top_level.txt") or "lightning_tas").split()
    assert top_level == ["lightning_tas"]


@pytest.mark.slow
def test_wheel_in_another_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    tops = {name.split("/")[0] for name in names}
    assert tops == {"lightning_tas", next(top for top in tops if top.endswith(".dist-info"))}
    assert "lightning_tas/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    main, callbacks, found, globals_ = run("-c", PROBE, cwd=elsewhere, paths=str(tmp_path / "site")).splitlines()
    assert Path(main).is_relative_to(tmp_path / "site")
    assert Path(callbacks) == tmp_path / "site" / "lightning_tas" / "callbacks" / "__init__.py"
    assert found == recipes()
    assert globals_ == "[False, False]"
    out = run("-m", "lightning_tas.fit", "--help", cwd=elsewhere, paths=str(tmp_path / "site"))
    assert "quickstart" in out


@pytest.mark.slow
def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkout, source)
    venv, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    # The dependencies come from this environment; pip itself too, hence --python.
    run("-m", "venv", "--system-site-packages", "--without-pip", str(venv), cwd=tmp_path)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")
    install = ["-m", "pip", "--python", str(venv / "bin" / "python"), "install", "--quiet", "--no-deps"]
    run(*install, "--no-build-isolation", "-e", str(source), cwd=tmp_path)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    python = str(venv / "bin" / "python")
    done = subprocess.run([python, "-c", PROBE], cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    main, callbacks, found, globals_ = done.stdout.splitlines()
    assert Path(main) == source / "lightning_tas" / "__init__.py"
    assert Path(callbacks) == source / "callbacks" / "__init__.py"
    assert found == recipes()
    assert globals_ == "[False, False]"
