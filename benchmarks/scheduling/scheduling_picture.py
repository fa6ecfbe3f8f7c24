"""Picture of the results of bench-scheduling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from benchmarks.scheduling.scheduling_forecast import BINDING

Figures = Mapping[str, float]

COLOURS = {
    "fifo": "tab:grey",
    "shortest": "tab:blue",
    "ranked": "tab:purple",
    "hrrn": "tab:green",
    "classes": "tab:orange",
}
_PREDICTOR = "tau 0.6"


def draw(raw: Mapping[str, Any], path: Path) -> None:
    """Draw two panels for each of the parts "live" and "forecast" that ``raw`` has, to ``path``.

    Without either of them, write no file.
    """
    parts = {"live": _live, "forecast": _forecast}
    known = {name: panels for name, panels in parts.items() if name in raw}
    if not known:
        return
    figure, panels = pyplot.subplots(len(known), 2, squeeze=False, figsize=(13, 4.4 * len(known)))
    for row, (name, draw_both) in zip(panels, known.items(), strict=True):
        draw_both(row[0], row[1], raw[name])
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _live(latencies: Axes, first_tokens: Axes, live: Mapping[str, Any]) -> None:
    medians: Mapping[str, Figures] = live["medians"]
    _bars(latencies, {it: medians[it]["normalised_latency_mean_ms"] / 1e3 for it in medians})
    latencies.set_title("live: mean normalised latency, s a token")
    _bars(first_tokens, {it: medians[it]["ttft_p99_s"] for it in medians})
    high = [medians[it]["high_ttft_p99_s"] for it in medians]
    first_tokens.plot(range(len(high)), high, "k_", markersize=24, label="the tenth that is high")
    first_tokens.set_title("live: p99 of the time to first token, s")
    first_tokens.legend(frameon=False)


def _bars(panel: Axes, values: Figures) -> None:
    bars = panel.bar([*values], [*values.values()], color=[COLOURS[name] for name in values])
    panel.bar_label(bars, fmt="%.3g")


def _forecast(by_load: Axes, by_binding: Axes, forecast: Mapping[str, Any]) -> None:
    orders: Mapping[str, Mapping[str, Figures]] = forecast["orders"]
    for order in ("fifo", "shortest", "ranked", "hrrn"):
        name = order if order == "fifo" else f"{order} {_PREDICTOR}"
        means = [found[name]["normalised_latency_mean_ms"] for found in orders.values()]
        by_load.plot([*map(float, orders)], means, "o-", color=COLOURS[order], label=order)
    by_load.set_yscale("log")
    by_load.set_xlabel("load, of saturation")
    by_load.set_title("forecast, chats: mean normalised latency, ms a token")
    by_load.legend(frameon=False)
    name = "8 workers, load 0.9"
    binding: Figures = forecast[BINDING][name]
    bars = by_binding.barh([*binding], [*binding.values()])
    by_binding.bar_label(bars, fmt="%.0f")
    by_binding.set_xscale("log")
    by_binding.set_xlim(min(binding.values()) / 3, max(binding.values()) * 3)
    by_binding.xaxis.set_minor_formatter(NullFormatter())
    by_binding.invert_yaxis()
    by_binding.set_title(f"forecast, {name}: p99 TTFT, ms")
