"""Picture of an explanation, with a lane for each kind of time."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.simulator.pictures import save
from everlift.explanation import LABELS, state_name
from everlift.v1 import inference_pb2 as pb

_INCHES_A_LANE = 0.32


def draw(explanation: pb.Explanation, path: Path) -> Path:
    """Draw ``explanation``, save the picture as ``path``, and return ``path``. Raises OSError."""
    return save(figure(explanation), path)


def figure(explanation: pb.Explanation) -> Figure:
    # Sorted by their numbers, which approximately follow the order of occurrence.
    kinds = sorted({span.kind for span in explanation.spans})
    drawn, panel = pyplot.subplots(figsize=(12, 1.4 + _INCHES_A_LANE * max(1, len(kinds))))
    at = 0.0
    for span in explanation.spans:
        lane = kinds.index(span.kind)
        panel.broken_barh([(at, span.seconds)], (lane - 0.4, 0.8), color=f"C{lane % 10}")
        at += span.seconds
    _mark_attempts(panel, explanation)
    panel.set_yticks(range(len(kinds)), [LABELS[kind] for kind in kinds])
    panel.invert_yaxis()
    panel.set_xlim(0.0, explanation.total_s or 1.0)
    panel.set_xlabel("seconds since the call; only the sums of times at workers are exact")
    panel.grid(axis="x", alpha=0.3, linewidth=0.4)
    state = state_name(explanation.state)
    panel.set_title(f"{explanation.request_id}: {state}, {explanation.total_s:.3f} s")
    return drawn


def _mark_attempts(panel: Axes, explanation: pb.Explanation) -> None:
    at, attempt = 0.0, 1
    for span in explanation.spans:
        if span.attempt > attempt:
            attempt = span.attempt
            panel.axvline(at, color="grey", linestyle="--", linewidth=1)
        at += span.seconds
