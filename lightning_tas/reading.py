"""Reading the JSON and YAML that users give: bounded in size, depth and number of values, so that every text answers.

A YAML alias repeats what it names: a text of 350 bytes can stand for 10^9 values. Readers of nested values call
themselves, and Python ends that at about 1,000 levels. So both are counted while a text is read, and refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from lightning_tas.errors import UserError

MAX_BYTES = 64 << 20  # of a file: far above any that the package writes or papers publish
MAX_YAML = 1 << 20  # characters of a YAML text, whose reader takes seconds for so many
MAX_DEPTH = 64  # of values inside one another
MAX_VALUES = 50_000  # of a YAML text, with its aliases written out
DIGEST = "content_sha256"  # the entry of a JSON or YAML file of ours by which damage is seen
MAX_ARGUMENT = 10_000  # characters of one value on a command line: Hydra's parser needs their square


def read_text(path: Path | Traversable | str, key: str) -> str:
    """The text of a file that a user named under `key`; UserError when it is missing, no UTF-8 text or too large."""
    source = Path(path) if isinstance(path, str) else path
    name = f"{key}: {str(path)!r}"
    try:
        with source.open("rb") as file:  # not by its stated size: a pipe or a device has none
            # In pieces: a buffer of the most that may come would be made whole at once.
            pieces, size = [], 0
            while size <= MAX_BYTES and (piece := file.read(1 << 16)):
                pieces.append(piece)
                size += len(piece)
    except FileNotFoundError:
        raise UserError(f"{name} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{name} is a folder, expected a file") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror or error})") from None
    raw = b"".join(pieces)
    if len(raw) > MAX_BYTES:
        raise UserError(f"{name} is larger than {MAX_BYTES >> 20} MiB, the most that is read")
    try:
        return raw.decode("utf-8-sig")  # some editors begin a file with a mark of its encoding
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is no UTF-8 text ({error})") from None


def read_json(path: Path | str, key: str = "file") -> Any:
    """What a JSON file holds that a user named under `key`: one of ours without its digest, or any other.

    Raises:
        UserError: as for `read_text` and `parse_json`, or it is not as we wrote it.
    """
    name = f"{key}: {str(path)!r}"
    content = parse_json(read_text(path, key), name)
    if isinstance(content, dict) and DIGEST in content and content.pop(DIGEST) != digest(content):
        raise _edited(name)
    return content


def digest(content: dict[str, Any]) -> str:
    """SHA-256 of a mapping as it comes back from JSON; spaces and the order of entries do not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sealed(text: str) -> str:
    """The text of a YAML mapping with an entry by which `parse_yaml` sees that it is whole."""
    return f"{text}{DIGEST}: {hashlib.sha256(text.encode()).hexdigest()}\n"


def read_yaml(path: Path | str, key: str = "file") -> Any:
    """What a YAML file holds that a user named under `key`; UserError as for `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path, key), f"{key}: {str(path)!r}")


def read_data(path: Path | str, key: str = "file") -> Any:
    """What a file holds that a user named under `key`: JSON where its name ends so, else YAML."""
    return (read_json if str(path).endswith(".json") else read_yaml)(path, key)


def parse_json(text: str, name: str) -> Any:
    """The value of a JSON text, called `name` in messages; UserError when it is none or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:  # also of a number with thousands of digits
        raise UserError(f"{name} is not valid JSON ({error})") from None
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:
            raise _too_deep(name)
        nested = [one for one in level if isinstance(one, (dict, list))]
        level = [inner for one in nested for inner in (one.values() if isinstance(one, dict) else one)]
    return value


def parse_yaml(text: str, name: str) -> Any:
    """The value of a YAML text, called `name` in messages; UserError when it is none, too deep or too large.

    5e-4 is a number (YAML 1.1 says text), dates are text, a key given twice is an error, and tags other than those of
    plain values are unknown. A mapping that is `sealed` must be so still.
    """
    if len(text) > MAX_YAML:
        raise UserError(f"{name} has {len(text)} characters; valid: at most {MAX_YAML}; JSON may have more")
    loader = None
    try:
        loader = _Loader(text)
        value = loader.get_single_data()
    except _Refused as error:
        raise UserError(f"{name} {error}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # also of `!!int x`
        raise UserError(f"{name} is not valid YAML ({' '.join(str(error).split())})") from None
    finally:
        if loader is not None:
            loader.dispose()
    if isinstance(value, dict) and DIGEST in value:
        whole = re.sub(rf"^{DIGEST}:.*\n?", "", text.replace("\r\n", "\n"), flags=re.MULTILINE)
        if value.pop(DIGEST) != hashlib.sha256(whole.encode()).hexdigest():
            raise _edited(name)
    return value


def check_argument(argument: str) -> None:
    """`UserError` for a ``key=value`` that Hydra's parser would take minutes for or be overwhelmed by."""
    key = argument.partition("=")[0]
    if len(argument) > MAX_ARGUMENT:
        raise UserError(
            f"{key[:80]}: {len(argument)} characters are too many; valid: at most {MAX_ARGUMENT}, more in a recipe"
        )
    depth = 0
    if key.count(".") > MAX_DEPTH:
        raise _too_deep(f"{key[:80]}: the key")
    for character in argument:
        depth += (character in "[{(") - (character in "]})")
        if depth > MAX_DEPTH:
            raise _too_deep(f"{key[:80]}: the value")


def _edited(name: str) -> UserError:
    return UserError(
        f"{name} is damaged, or was edited: its content is not what {DIGEST} says; a file that you have edited is read "
        "without that entry"
    )


def _too_deep(name: str) -> UserError:
    return UserError(f"{name} is nested too deeply; valid: at most {MAX_DEPTH} levels")


class _Refused(Exception):
    """A text that is valid YAML and not read."""


class _Loader(yaml.SafeLoader):
    """Counts levels, and values with what aliases repeat, while a text is read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.values = 0
        self.sizes: dict[str, int] = {}  # anchor to the number of values that it stands for

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node of the text, with all inside it."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor = event.anchor
        if isinstance(event, yaml.AliasEvent):
            if anchor in self.anchors and anchor not in self.sizes:
                raise _Refused(f"holds an alias of a value inside itself: *{anchor}")
            self._count(self.sizes.get(anchor, 1))
            return super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        before = self.values
        self._count(1)
        self.depth += 1
        if self.depth > MAX_DEPTH + 1:  # as JSON, where a lone number has depth 0
            raise _Refused(str(_too_deep("")).strip())
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self.depth -= 1
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        if anchor is not None:
            self.sizes[anchor] = self.values - before
        return node

    def _count(self, number: int) -> None:
        self.values += number
        if self.values > MAX_VALUES:
            raise _Refused(f"is too large; valid: at most {MAX_VALUES} values, aliases written out; JSON may have more")


def _check_keys(node: yaml.MappingNode) -> None:
    """Refuse a key that is there twice, other than `<<`."""
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != f"{_PREFIX}merge":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)


_PREFIX = "tag:yaml.org,2002:"
_Loader.yaml_constructors = {
    tag: made
    for tag, made in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_PREFIX) in ("null", "bool", "int", "float", "str", "seq", "map")
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != f"{_PREFIX}timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_PREFIX}float",
    re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
