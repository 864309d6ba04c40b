"""What the documents say of proxies is complete: every proxy and every option, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import lightning_tas as tas

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "proxies.md").read_text(encoding="utf-8")
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
