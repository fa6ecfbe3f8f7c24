"""Picture of the batch slots over time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

#: Greys in matplotlib's palette tab20. Grey is the colour of requests that did not move.
_GREYS = (14, 15)


@dataclass
class SlotPeriod:
    """Period that a request spent in one slot of a worker, in seconds since the load began."""

    worker_id: str
    slot: int
    request_id: str
    start: float
    end: float


class Occupancy:
    """Periods that requests spent in slots, assembled from successive snapshots of the workers."""

    def __init__(self) -> None:
        self.periods: list[SlotPeriod] = []
        self._open: dict[tuple[str, int], SlotPeriod] = {}

    def snapshot(self, now: float, running: dict[tuple[str, int], str]) -> None:
        """Record a snapshot taken at ``now``; ``running`` maps (worker id, slot) to a request id.

        Consecutive snapshots that show the same request in a slot form one period, which lasts from
        the first to the last of them.
        """
        for key, request_id in running.items():
            period = self._open.get(key)
            if period is None or period.request_id != request_id:
                period = self._open[key] = SlotPeriod(*key, request_id, now, now)
                self.periods.append(period)
            period.end = now
        for key in self._open.keys() - running.keys():
            del self._open[key]

    def migrated(self) -> set[str]:
        """Return the ids of the requests that were seen on more than one worker."""
        workers_of: dict[str, set[str]] = {}
        for period in self.periods:
            workers_of.setdefault(period.request_id, set()).add(period.worker_id)
        return {request_id for request_id, workers in workers_of.items() if len(workers) > 1}


def draw(occupancy: Occupancy, killed: str, killed_at: float, path: Path) -> None:
    """Draw the slots over time, and save the picture as ``path``.

    There is a panel per worker, a row per slot, and a bar for each period of a request in a slot. A
    migrated request has the same colour in all panels; other requests are grey. A dashed line in
    each panel marks ``killed_at``, the time at which the worker with the id ``killed`` was killed.
    ``killed_at`` is in seconds since the load began.
    """
    workers = list(dict.fromkeys(period.worker_id for period in occupancy.periods))
    workers.sort(key=lambda worker_id: worker_id != killed)
    figure, panels = pyplot.subplots(
        len(workers), 1, sharex=True, squeeze=False, figsize=(12, 2.2 + 2.4 * len(workers))
    )
    migrated = sorted(occupancy.migrated())
    palette = [pyplot.get_cmap("tab20")(i) for i in range(20) if i not in _GREYS]
    colours = {r: palette[i % len(palette)] for i, r in enumerate(migrated)}
    for panel, worker_id in zip(panels[:, 0], workers, strict=True):
        _draw_worker(panel, worker_id, occupancy, colours)
        panel.axvline(killed_at, color="crimson", linestyle="--", linewidth=1)
    panels[0, 0].set_title(
        f"Batch slots over time. Worker {killed[:8]} was killed at the dashed line; the "
        f"{len(migrated)} coloured requests were migrated.",
        fontsize=10,
    )
    panels[-1, 0].set_xlim(left=0.0)
    panels[-1, 0].set_xlabel("seconds since the first request")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_worker(
    panel: Axes,
    worker_id: str,
    occupancy: Occupancy,
    colours: dict[str, tuple[float, float, float, float]],
) -> None:
    for period in occupancy.periods:
        if period.worker_id == worker_id:
            panel.barh(
                period.slot,
                max(period.end - period.start, 0.02),
                left=period.start,
                height=0.85,
                color=colours.get(period.request_id, "lightgrey"),
                edgecolor="white",
                linewidth=0.4,
            )
    panel.set_ylabel(f"worker {worker_id[:8]}\nslot", fontsize=9)
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
