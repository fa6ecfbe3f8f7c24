"""Progress bar on the terminal: prompts done, tokens per second and remaining time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


@contextmanager
def bar(
    description: str, total: int, done: int = 0, *, shown: bool
) -> Iterator[Callable[[int], None]]:
    """Context manager: show a progress bar on standard error, and yield its advance function.

    The caller calls that function once for each finished prompt, with the number of the prompt's
    output tokens. ``description`` is the text of the bar. ``total`` is the number of all prompts,
    of which ``done`` were finished before. If ``shown`` is false, there is no bar and the function
    does nothing.
    """
    if not shown:
        yield _no_op
        return
    # Imported here because most programs show no bar.
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        _tokens_per_second(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total, completed=done, tokens=0)
        tokens = 0

        def advance(more: int) -> None:
            nonlocal tokens
            tokens += more
            progress.update(task, advance=1, tokens=tokens)

        yield advance


def _no_op(tokens: int) -> None:
    pass


def _tokens_per_second() -> ProgressColumn:
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class TokensPerSecond(ProgressColumn):
        def render(self, task: Task) -> Text:
            elapsed = task.elapsed or 0.0
            rate = task.fields["tokens"] / elapsed if elapsed else 0.0
            return Text(f"{rate:.0f} tokens/s")

    return TokensPerSecond()
