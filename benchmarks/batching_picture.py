"""Picture of the results of bench-batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

POLICIES = {
    "continuous": "tab:blue",
    "static": "tab:orange",
    "magnus": "tab:purple",
    "slai": "tab:green",
}


def draw(raw: dict[str, Any], path: Path) -> None:
    """Draw the results to ``path``.

    The upper panels show tokens per second by batch size, one panel for each mix. The lower ones
    show the useful share of slots, times between tokens with chunks, and TTFT with SLAI.
    """
    figure, panels = pyplot.subplots(2, len(raw["sweep"]), squeeze=False, figsize=(16, 7))
    for panel, (name, sizes) in zip(panels[0], raw["sweep"].items(), strict=True):
        _sizes(panel, sizes, "tokens_per_s")
        panel.set_title(f"{name}: output tokens a second")
    for panel, name in zip(panels[1], ("mixed", "skewed"), strict=False):
        _sizes(panel, raw["sweep"][name], "useful_share")
        panel.set_title(f"{name}: slots that compute something")
    _gaps(panels[1][2], raw["chunks"])
    _first_tokens(panels[1][3], raw["slai"])
    figure.tight_layout()
    figure.savefig(path, dpi=75)
    pyplot.close(figure)


def _sizes(panel: Axes, sizes: dict[str, dict[str, float]], unit: str) -> None:
    for policy in ("continuous", "magnus", "static"):
        values = [figures[f"{policy}_{unit}"] for figures in sizes.values()]
        panel.plot([*map(int, sizes)], values, "o-", color=POLICIES[policy], label=policy)
    panel.set_xscale("log", base=2)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("batch slots")
    panel.legend()


def _gaps(panel: Axes, chunks: dict[str, dict[str, float]]) -> None:
    quantiles = {"p50": "tbt_p50_s", "p99": "tbt_p99_s", "p99.9": "tbt_p999_s"}
    for offset, (name, figures) in enumerate(chunks.items()):
        places = [place + 0.4 * offset for place in range(len(quantiles))]
        heights = [1e3 * figures[key] for key in quantiles.values()]
        panel.bar(places, heights, 0.4, label=f"chunks {name}")
    panel.set_xticks([place + 0.2 for place in range(len(quantiles))], [*quantiles])
    panel.set_title("time between tokens, ms")
    panel.legend()


def _first_tokens(panel: Axes, loads: dict[str, dict[str, dict[str, float]]]) -> None:
    for policy in ("continuous", "slai"):
        medians = [policies[policy]["ttft_p50_s"] for policies in loads.values()]
        panel.plot([*map(float, loads)], medians, "o-", color=POLICIES[policy], label=policy)
    panel.set_yscale("log")
    panel.set_xlabel("load, of saturation")
    panel.set_title("median TTFT, s")
    panel.legend()
