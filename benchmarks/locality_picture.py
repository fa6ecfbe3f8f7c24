"""Figures of bench-locality as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

COLOURS = {
    "off": "tab:grey",
    "llm-d": "tab:blue",
    "dynamo": "tab:green",
    "lmetric": "tab:purple",
    "sglang": "tab:brown",
    "everlift": "tab:orange",
}


def draw(raw: Mapping[str, Any], path: Path) -> None:
    """Draw latencies and reuse of the agents by load; nothing if they were not measured."""
    if "agents" not in raw:
        return
    figure, (latency, reuse, rates) = pyplot.subplots(1, 3, figsize=(15, 4.4))
    loads = raw["agents"]["loads"]
    _lines(latency, loads, "ttft_p99_s")
    latency.set_yscale("log")
    latency.set_title("agents, 8 workers: p99 TTFT, s")
    _lines(reuse, loads, "reused_of_reusable")
    reuse.set_title("reused of what infinite caches would reuse")
    reuse.set_ylim(0.0, 1.02)
    found = {name: 8 * rate for name, rate in raw["agents"]["saturation_per_worker"].items()}
    bars = rates.barh([*found], [*found.values()], color=[COLOURS[name] for name in found])
    rates.bar_label(bars, fmt="%.3g")
    rates.invert_yaxis()
    rates.set_title("most new sessions/s with p99 TTFT up to 10 s")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _lines(panel: Axes, loads: Mapping[str, Mapping[str, Any]], figure: str) -> None:
    for policy, colour in COLOURS.items():
        values = [found[policy][figure] for found in loads.values()]
        panel.plot([*map(float, loads)], values, "o-", color=colour, label=policy)
    panel.set_xlabel("load, of Everlift's saturation")
    panel.legend(frameon=False)
