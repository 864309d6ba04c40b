"""Which weights of a file are read, names without wrappers' prefixes, and files that hold no weights at all."""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lightning_tas as tas
from lightning_tas.supernets import load_checkpoint_file, load_weights
from lightning_tas.supernets.checkpoints import weights_of
from lightning_tas.supernets.weight_sets import choose, sets_in, unwrapped

STATE = {"patch_embed.proj.weight": torch.ones(1), "blocks.0.norm1.bias": torch.ones(2), "cls_token": torch.ones(3)}


@pytest.mark.parametrize(
    "wrap",
    [
        "{}",
        "module.{}",
        "_orig_mod.{}",
        "module._orig_mod.{}",
        "model.{}",
        "_forward_module.model.{}",
        "net._orig_mod.module.{}",
        "_fsdp_wrapped_module.backbone.{}",
    ],
)
def test_prefixes_of_wrappers(wrap: str) -> None:
    state = {
        wrap.format(name).replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): v for name, v in STATE.items()
    }
    assert unwrapped({**state, "n_averaged": torch.tensor(1)}) == STATE


def test_wrappers_themselves(make_net: Callable[..., Any]) -> None:
    """What torch.compile, AveragedModel and both write is read, as a state dict and in a file's entry."""
    teacher = make_net(seed=1)
    compiled = torch.compile(teacher)
    for wrapped in (compiled, AveragedModel(teacher), nn.DataParallel(compiled)):
        net = make_net()
        load_weights(net, {"epoch": 3, "state_dict": wrapped.state_dict()})
        assert all(torch.equal(value, teacher.state_dict()[name]) for name, value in net.state_dict().items())


def test_names_that_are_a_networks_own_stay_and_clashes_are_refused() -> None:
    own = {"model.a": torch.ones(1), "model.module.b": torch.ones(1)}
    assert unwrapped(own, own) == own
    assert set(unwrapped(own)) == {"a", "b"}
    with pytest.raises(tas.UserError, match=r"'module.a' and another entry are both 'a'"):
        unwrapped({"a": torch.ones(1), "module.a": torch.ones(1)})


@pytest.mark.parametrize(
    ("names", "weights", "read"),
    [
        (["model", "model_ema"], "auto", "model_ema"),
        (["model", "model_ema"], "live", "model"),
        (["model", "model_ema"], "model", "model"),
        (["state_dict", "state_dict_ema"], "auto", "state_dict_ema"),
        (["state_dict", "ema_state.average"], "ema", "ema_state.average"),
        (["teacher", "model"], "auto", "model"),
        (["schema"], "auto", "schema"),
        (["student", "teacher"], "teacher", "teacher"),
    ],
)
def test_which_of_several_sets_is_read(names: list[str], weights: str, read: str) -> None:
    optimiser = {"state": {"a": {"exp_avg": torch.ones(1)}}, "param_groups": []}
    content: dict[str, Any] = {"epoch": 1, "optimizer": optimiser}
    for number, name in enumerate(names):
        outer, _, inner = name.partition(".")
        content[outer] = {inner: {"a": torch.tensor(number)}} if inner else {"a": torch.tensor(number)}
    assert list(sets_in(content)) == names
    assert weights_of(content, weights) == ({"a": torch.tensor(names.index(read))}, read)


def test_a_choice_that_nothing_decides_is_refused() -> None:
    with pytest.raises(tas.UserError, match="several sets and none is named; valid: 'student', 'teacher'"):
        choose(["student", "teacher"])
    with pytest.raises(tas.UserError, match=r"weights: 'teachr' is not valid; .* Did you mean 'teacher'"):
        choose(["student", "teacher"], "teachr")
    with pytest.raises(tas.UserError, match="no averaged weights; valid: 'model'"):
        choose(["model"], "ema")


class Settings(dict):  # type: ignore[type-arg]
    """What a user's own code keeps beside weights: read as nothing, and never imported."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given)
        self.note = "x"


def _zip(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "x")


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a"))


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "search.json": (lambda p: p.write_text(json.dumps({"generations": []})), "search.json.*give it as arch="),
    "result.json": (lambda p: p.write_text(json.dumps({"architectures": []})), "result.json.*give it as arch="),
    "arch.json": (lambda p: p.write_text(json.dumps({"layer_num": 1})), "an architecture; give it as arch="),
    "config.yaml": (
        lambda p: p.write_text("recipe: quickstart\nphases: []\n"),
        "settings of a run; give it as config=",
    ),
    "space.yaml": (lambda p: p.write_text("SUPERNET:\n  EMBED_DIM: 3\n"), "a search space; give it as space="),
    "lfs.pth": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), "Git LFS"),
    "metrics.csv": (lambda p: p.write_text("a,b\n"), "a table"),
    "note.txt": (lambda p: p.write_text("hello"), "a text"),
    "picture.pth": (lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n\0"), "a picture"),
    "w.h5": (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n\0"), "HDF5"),
    "w.tar": (_tar, "a tar archive; unpack"),
    "vit.npz": (lambda p: np.savez(p, a=np.ones(2)), "archive of NumPy arrays"),
    "script.pt": (lambda p: _zip(p, "a/constants.pkl", "a/data.pkl"), "TorchScript"),
    "program.pt2": (lambda p: _zip(p, "a/archive_format"), "torch.export"),
    "half.pth": (lambda p: p.write_bytes(b"PK\3\4" + b"\0" * 30), "the rest is missing|damaged"),
    "whole.pth": (
        lambda p: torch.save(nn.Linear(1, 1), p),
        r"objects of torch.nn.modules.linear.Linear, which only their own code can read; save",
    ),
    "legacy.pth": (
        lambda p: torch.save(Settings(), p, _use_new_zipfile_serialization=False),
        r"\.Settings, which only their own code",
    ),
    "bytes.pth": (lambda p: p.write_bytes(b"\0\1\2\3" * 9), "of no format that is known"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_says_what_it_is(name: str, tmp_path: Path) -> None:
    make, told = OTHERS[name]
    make(tmp_path / name)
    with pytest.raises(tas.UserError, match=told) as caught:
        load_checkpoint_file(tmp_path / name)
    assert "weights_only" not in str(caught.value) and "safe_globals" not in str(caught.value)
    assert str(caught.value).startswith(f"checkpoint: '{tmp_path / name}' ")


def test_objects_of_other_classes_beside_the_weights_are_not_read(tmp_path: Path) -> None:
    content = {"model": STATE, "config": Settings(lr=1), "best": np.float64(0.5), "log": [Settings(), np.ones(2)]}
    torch.save(content, tmp_path / "a.pth")
    read, entry = weights_of(load_checkpoint_file(tmp_path / "a.pth"))
    assert entry == "model" and read.keys() == STATE.keys() and torch.equal(read["cls_token"], torch.ones(3))
