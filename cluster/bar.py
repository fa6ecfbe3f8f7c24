"""A bar on the terminal: how many are done, tokens a second, and when the rest will be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _TokensPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        rate = task.fields["tokens"] / elapsed if elapsed else 0.0
        return Text(f"{rate:.0f} tokens/s")


@contextmanager
def bar(what: str, total: int, done: int = 0, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """On standard error. The function that it gives takes the output tokens of the next one of
    ``total``; ``done`` of them were so before."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _TokensPerSecond(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(what, total=total, completed=done, tokens=0)
        tokens = 0

        def advance(more: int) -> None:
            nonlocal tokens
            tokens += more
            progress.update(task, advance=1, tokens=tokens)

        yield advance
