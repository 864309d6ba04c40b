"""What a file is that holds no weights, and which key it belongs to: told instead of what a decoder says of it."""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEAD = 4096
_MAGIC = (
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"\x89HDF", "an HDF5 file, as Keras writes them"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it first"),
    (b"PK\5\6", "an empty zip archive"),
)
_ARCH, _SPACE, _CONFIG = (
    "; give it as arch=",
    "; give it as space=",
    "; give it as config=, or the run's folder as ckpt=",
)
# What a JSON or YAML file is, by a key that it has, and where it belongs.
_RECORDS = (
    ("weight_map", "the index of a network in several files"),
    ("model_args", "the config.json of an exported network, whose weights are in model.safetensors beside it"),
    ("generations", "what a search found (search.json)" + _ARCH),
    ("architectures", "the result of a run (result.json)" + _ARCH),
    ("candidates", "a selection of networks (selection.json)" + _ARCH),
    *((key, "an architecture" + _ARCH) for key in ("stages", "layer_num", "hidden_dim", "RETRAIN", "DEPTHS")),
    *((key, "a search space" + _SPACE) for key in ("dimensions", "SUPERNET", "SEARCH_SPACE")),
    *((key, "settings of a run" + _CONFIG) for key in ("phases", "defaults", "recipe")),
)


def identify(path: Path) -> str | None:
    """What the file at `path` is, and where it belongs; None where it is of no kind that is known."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head:
        return "empty"
    for magic, what in _MAGIC:
        if head.startswith(magic):
            return what
    if head.startswith(b"PK"):
        return _archive(path)
    if tarfile.is_tarfile(path):
        return "a tar archive; unpack it first"
    return _text(path) if b"\0" not in head else None


def _archive(path: Path) -> str | None:
    try:
        names = zipfile.ZipFile(path).namelist()
    except (zipfile.BadZipFile, OSError):
        return "the beginning of a file of torch or another zip archive: the rest is missing"
    if any(name.endswith("constants.pkl") for name in names):
        return "a TorchScript archive; save the network's state_dict() instead"
    if any(name.endswith("archive_format") for name in names):
        return "a program of torch.export; save the network's state_dict() instead"
    if any(name.endswith(".npy") for name in names):
        return "an archive of NumPy arrays; convert it to a state dict first (timm can)"
    return None if any(name.endswith("data.pkl") for name in names) else "a zip archive; unpack it first"


def _text(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    record: Any = None
    if text.lstrip().startswith(("{", "[")):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return "a text that is no JSON, though it begins as one"
    elif path.suffix in (".yaml", ".yml"):
        record = {line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()}
    if text.startswith("version https://git-lfs"):
        return "a pointer of Git LFS; the weights themselves are not there yet (git lfs pull)"
    for key, what in _RECORDS:
        if isinstance(record, (Mapping, set)) and key in record:
            return what
    if path.suffix == ".csv":
        return "a table"
    return "a JSON file" if isinstance(record, (Mapping, list)) else "a text"
