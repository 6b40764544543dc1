"""Documents with parts that are made from the records.

A part stands between <!-- begin NAME: COMMAND --> and <!-- end NAME -->, each on a line of its own. Only what is
between the two is ever replaced.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Make = Callable[[], str]  # of one part

COMMAND = "python -m fa3 bench report"
BLOCK = re.compile(
    rf"^<!-- begin (?P<name>[\w-]+): {re.escape(COMMAND)} -->\n(?P<text>.*?)^<!-- end (?P=name) -->$", re.M | re.S
)
ANY_MARKER = re.compile(r"^<!-- (begin|end)\b.*$", re.M)


def filled(text: str, blocks: Mapping[str, Make]) -> str:
    """The document with every part made anew. Raises ValueError for a part that nobody makes or a marker alone."""

    def made(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in blocks:
            raise ValueError(f"no part is named {name!r}; there are {', '.join(blocks)}")
        return f"<!-- begin {name}: {COMMAND} -->\n\n{blocks[name]()}\n\n<!-- end {name} -->"

    result, parts = BLOCK.subn(made, text)
    markers = len(ANY_MARKER.findall(text))
    if markers != 2 * parts:
        raise ValueError(f"{markers} markers make {parts} parts: each begins and ends once, by the same name")
    return result


def stale(root: Path, names: Sequence[str], blocks: Mapping[str, Make]) -> list[str]:
    """The documents that are not what `write` would leave."""
    return [name for name in names if filled((root / name).read_text(), blocks) != (root / name).read_text()]


def write(root: Path, names: Sequence[str], blocks: Mapping[str, Make]) -> None:
    for name in names:
        (root / name).write_text(filled((root / name).read_text(), blocks))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["|".join(f" {cell} " if cell else " " for cell in line) for line in (columns, *rows)]
    lines.insert(1, "|".join(["---"] * len(columns)))
    return "\n".join(f"|{line}|" for line in lines)
