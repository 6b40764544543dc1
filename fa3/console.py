"""The terminal of the commands that print tables."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NARROWEST = 100  # of a pipe, which has no width: what is read later is folded as little as need be


def console(stderr: bool = False) -> "Console":
    """Exits with one sentence where rich is missing."""
    try:
        from rich.console import Console
    except ImportError:
        raise SystemExit("This command prints with rich, which is not installed: pip install rich.") from None
    plain = Console(stderr=stderr, highlight=False)
    return plain if plain.is_terminal else Console(stderr=stderr, highlight=False, width=max(plain.width, NARROWEST))


def table(title: str, *columns: str, text_columns: int = 1) -> "Table":
    """A table whose first `text_columns` columns are text, which folds, and whose others are numbers, which do not."""
    from rich import box
    from rich.table import Table

    result = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )  # as many columns as fit into a terminal of 80
    for position, name in enumerate(columns):
        is_text = position < text_columns
        result.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    return result


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """For commands that say themselves what they compile: the cache's own line about it is left out."""
    before = os.environ.get("FA3_QUIET")
    os.environ["FA3_QUIET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["FA3_QUIET"]
        else:
            os.environ["FA3_QUIET"] = before
