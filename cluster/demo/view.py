"""Live view of the demo: the cluster's status, and the output of one request as it arrives."""

from __future__ import annotations

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from cluster.commands import status_view
from cluster.demo.load import Load
from everlift.v1 import inference_pb2 as pb
from router.console.rates import Rates

_SHOWN_CHARACTERS = 900


def show(status: pb.GetStatusResponse, load: Load, rates: Rates, now: float, note: str) -> Group:
    first = load.transcripts[0]
    text = Text(first.task.shown, style="bold")
    text.append(first.text[-_SHOWN_CHARACTERS:], style="green" if first.is_identical else "default")
    # A small terminal shows only the first lines.
    return Group(
        Text(note, style="yellow"),
        Text(f"requests done {load.completed} of {len(load.transcripts)}"),
        Panel(text, title="one of the streams, as its client sees it", title_align="left"),
        status_view.show(status, rates, now),
    )
