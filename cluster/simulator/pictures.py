"""Pictures of a forecast: distributions of latencies, and the cluster's state over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import floor, log10
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, PercentFormatter

from cluster.simulator.forecast import Forecast, Sample
from cluster.simulator.summary import Record, Slo

_DPI = 110
#: Shorter latencies are plotted as this one: the difference is invisible, and a logarithmic axis
#: needs a minimum.
_LEAST_MS = 0.1


def draw(forecast: Forecast, slo: Slo, directory: Path) -> list[Path]:
    """Draw all pictures of a forecast into files in ``directory``, and return their paths.

    Raises OSError if a file cannot be written.
    """
    pictures = {
        "latency.png": latencies(forecast, slo),
        "over_time.png": over_time(forecast.samples),
        "occupancy.png": occupancy(forecast.samples),
    }
    return [save(figure, directory / name) for name, figure in pictures.items()]


def save(figure: Figure, path: Path) -> Path:
    """Save the figure as ``path``, close it, and return ``path``. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return path


# latencies of requests


def latencies(forecast: Forecast, slo: Slo) -> Figure:
    """Draw the cumulative distribution of each latency.

    The curves are shares of all requests, so they end below 1 if some did not finish.
    """
    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.6), sharey=True)
    kinds = by_class(forecast.records)
    _cumulative(panels[0], kinds, lambda record: record.ttft_s, "time to first token", slo.ttft_s)
    _cumulative(panels[1], kinds, lambda record: record.tpot_s, "time per output token", slo.tpot_s)
    _cumulative(panels[2], kinds, lambda record: record.latency_s, "latency", float("inf"))
    panels[0].set_ylabel("share of the requests")
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    panels[0].legend(loc="lower right", frameon=False)
    return figure


def by_class(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return all records under the key "all", and those of each priority class under its name.

    The name of a class is, for example, "class 1". Classes are left out if there is only one.
    Higher priorities come first.
    """
    classes = sorted({record.arrival.priority for record in records}, reverse=True)
    kinds = {"all": list(records)}
    if len(classes) > 1:
        for priority in classes:
            kinds[f"class {priority}"] = [
                record for record in records if record.arrival.priority == priority
            ]
    return kinds


def _cumulative(
    panel: Axes,
    kinds: Mapping[str, Sequence[Record]],
    value: Callable[[Record], float],
    title: str,
    limit_s: float,
) -> None:
    every: list[float] = []
    for name, records in kinds.items():
        ended = sorted(
            max(_LEAST_MS, value(record) * 1e3) for record in records if record.is_finished
        )
        every += ended
        parts = [(i + 1) / len(records) for i in range(len(ended))]
        width = 2.2 if name == "all" else 1.3
        panel.step(ended, parts, where="post", label=name, linewidth=width)
    if limit_s < float("inf"):
        panel.axvline(limit_s * 1e3, color="grey", linestyle="--", linewidth=1)
    _scale(panel, every)
    panel.set_xlabel("ms")
    panel.set_title(title)
    panel.set_ylim(0.0, 1.02)
    panel.grid(alpha=0.3, which="both", linewidth=0.4)


def _scale(panel: Axes, values: Sequence[float]) -> None:
    low, high = min(values, default=1.0), max(values, default=1.0)
    panel.set_xscale("log")
    panel.set_xlim(10 ** floor(log10(low)), 10 ** (floor(log10(high)) + 1))
    plain_numbers(panel.xaxis)


def plain_numbers(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(LogFormatter())


# state of the cluster over time


def over_time(samples: Sequence[Sample]) -> Figure:
    times = [sample.at for sample in samples]
    figure, panels = pyplot.subplots(3, 1, figsize=(12, 8), sharex=True)
    queue, batch, workers = panels
    queue.fill_between(times, [s.queued for s in samples], step="post", alpha=0.6)
    queue.set_ylabel("requests in\nthe admission queue")
    batch.plot(times, [s.running for s in samples], label="running", drawstyle="steps-post")
    batch.plot(
        times, [s.waiting for s in samples], label="waiting at a worker", drawstyle="steps-post"
    )
    batch.set_ylabel("requests\nat workers")
    batch.legend(loc="upper right", frameon=False)
    workers.plot(times, [s.workers for s in samples], color="black", drawstyle="steps-post")
    workers.set_ylabel("workers")
    workers.yaxis.get_major_locator().set_params(integer=True)
    workers.margins(y=0.1)
    _finish(panels, times)
    return figure


def occupancy(samples: Sequence[Sample]) -> Figure:
    times = [sample.at for sample in samples]
    figure, panels = pyplot.subplots(2, 1, figsize=(12, 5.5), sharex=True)
    slots, blocks = panels
    slots.fill_between(times, [s.slot_occupancy for s in samples], step="post", alpha=0.6)
    slots.set_ylabel("batch slots\nin use")
    blocks.fill_between(
        times, [s.block_occupancy for s in samples], step="post", alpha=0.6, color="tab:orange"
    )
    blocks.set_ylabel("KV blocks\nin use")
    for panel in panels:
        panel.set_ylim(0.0, 1.0)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    _finish(panels, times)
    return figure


def _finish(panels: Sequence[Axes], times: Sequence[float]) -> None:
    for panel in panels:
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3, linewidth=0.4)
    panels[-1].set_xlim(0.0, max(times, default=0.0) or 1.0)
    panels[-1].set_xlabel("seconds")
