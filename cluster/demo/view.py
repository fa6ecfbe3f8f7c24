"""The demo's live picture of the cluster, in the terminal."""

from __future__ import annotations

from everlift.v1 import inference_pb2 as pb
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.demo.load import Load

_SHOWN_CHARACTERS = 900


class Rates:
    """Tokens a second of each worker, from its counter at two moments."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}

    def update(self, worker_id: str, now: float, tokens: int) -> float:
        then, before = self._before.setdefault(worker_id, (now, tokens))
        if now - then < 0.5:
            return 0.0 if now == then else (tokens - before) / (now - then)
        self._before[worker_id] = (now, tokens)
        return (tokens - before) / (now - then)


def show(status: pb.GetStatusResponse, load: Load, rates: Rates, now: float, note: str) -> Group:
    """The whole screen: workers, progress, and the text of the first stream."""
    first = load.transcripts[0]
    text = Text(first.task.prompt, style="bold")
    text.append(first.text[-_SHOWN_CHARACTERS:], style="green" if first.is_right else "white")
    progress = (
        f"queue {status.queued}   requests done {load.completed} of {len(load.transcripts)}   "
        f"output tokens {load.output_tokens}   migrated {status.migrated}"
    )
    return Group(
        _workers(status, rates, now),
        Text(progress),
        Panel(text, title="one of the streams, as its client sees it", title_align="left"),
        Text(note, style="yellow"),
    )


def _workers(status: pb.GetStatusResponse, rates: Rates, now: float) -> Table:
    table = Table("worker", "pid", "state", "running", "waiting", "KV blocks", "tokens/s")
    for worker in status.workers:
        rate = rates.update(worker.worker_id, now, worker.output_tokens)
        table.add_row(
            worker.worker_id[:8],
            str(worker.pid),
            "[green]up[/]" if worker.alive else "[red]lost[/]",
            str(worker.num_running) if worker.alive else "-",
            str(worker.num_waiting) if worker.alive else "-",
            f"{worker.blocks_used} / {worker.blocks_total}" if worker.alive else "-",
            f"{rate:.0f}" if worker.alive else "-",
        )
    return table
