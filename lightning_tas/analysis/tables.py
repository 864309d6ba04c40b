"""Plain-text tables for the terminal: columns that name their units."""

from __future__ import annotations

import re
from collections.abc import Sequence

# As f"{number:,}" writes it.
_SEPARATED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Align `rows` under `header`; numbers to the right, text to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(header, *cells, strict=True)]
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *(line(row) for row in cells)])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("", "-") or _SEPARATED.fullmatch(text) is not None
    return True
