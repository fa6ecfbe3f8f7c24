"""Progress display of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape

from cluster.simulator.workloads.arrivals import Arrival

#: Number of requests between two updates of the display.
_EVERY = 100


def with_progress(arrivals: Iterable[Arrival], description: str) -> Iterator[Arrival]:
    """Yield ``arrivals`` unchanged, and show the progress on standard error if it is a terminal.

    ``description`` is the text before the number of requests.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield from arrivals
        return
    description = escape(description)
    with console.status(description) as status:
        for number, arrival in enumerate(arrivals):
            if number % _EVERY == 0:
                status.update(f"{description}: {number} requests, {arrival.at:.0f} s")
            yield arrival
