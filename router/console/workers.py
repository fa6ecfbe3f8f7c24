"""State of the workers in the compact form that the page shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from everlift.v1 import inference_pb2, session_pb2
from router.admission.workers import WorkerView
from router.console.prompts import Prompts
from router.console.slot_grid import LOST, Occupancy, Phase, SlotOccupant

Json = dict[str, Any]

#: Maximum number of cells of the grid; with more workers, several workers share a cell.
MOST_CELLS = 1024


class State(Enum):
    UP = "up"
    DRAINING = "draining"
    SLOW = "slow"
    LOST = "lost"


#: States from the best to the worst. A cell shows the worst state of its workers.
_SEVERITY = (State.UP, State.DRAINING, State.SLOW, State.LOST)


class Link(Protocol):
    """Connection to one worker."""

    info: session_pb2.WorkerInfo
    state: session_pb2.WorkerState
    is_up: bool

    @property
    def running(self) -> Sequence[inference_pb2.RunningSequence]: ...


class Row(NamedTuple):
    """State of one worker.

    ``blocks_cached`` is the number of free KV blocks with a cached prefix. ``prompt_tokens`` is the
    number of tokens that sequences had when they entered the batch in the last five minutes: the
    prompt and any earlier output. ``cached_tokens`` of them were found in the KV cache.
    """

    worker_id: str
    address: str
    ranks: int
    state: State
    slots: int
    running: int
    waiting: int
    blocks: int
    blocks_used: int
    blocks_cached: int
    tokens_per_s: float
    preemptions: int
    prompt_tokens: int
    cached_tokens: int


def row(link: Link, view: WorkerView | None, tokens_per_s: float, prompts: Prompts) -> Row:
    """Return the state of one worker.

    ``view`` is what this router knows about the worker's load and speed; None if the worker is not
    connected. ``prompts`` are the worker's prompts of the last five minutes.
    """
    info, state = link.info, link.state
    # A lost worker has no load, even if it last reported one.
    alive = int(link.is_up)
    return Row(
        info.worker_id,
        info.address,
        info.tensor_parallel,
        _state(link, view),
        info.max_num_seqs,
        alive * state.num_running,
        alive * state.num_waiting,
        info.num_blocks,
        alive * state.blocks_used,
        alive * state.blocks_cached,
        alive * tokens_per_s,
        state.preemptions,
        alive * prompts.tokens,
        alive * prompts.cached,
    )


def _state(link: Link, view: WorkerView | None) -> State:
    if not link.is_up:
        return State.LOST
    if link.state.draining:
        return State.DRAINING
    return State.SLOW if view is not None and view.is_slow else State.UP


def occupancy(link: Link) -> Occupancy:
    """Return the requests in a worker's slots. O(slots)."""
    if not link.is_up:
        return LOST
    occupants = {
        each.slot: SlotOccupant(each.request_id, Phase.PREFILL if each.prefilling else Phase.DECODE)
        for each in link.running
    }
    return Occupancy(occupants, link.state.preemptions, is_draining=link.state.draining)


def names(rows: Sequence[Row]) -> Json:
    """Return, for each cell, the id of its first worker and its number of workers, as JSON lists.

    A cell is a field of the page that shows one worker or, if there are more than MOST_CELLS
    workers, several successive ones. If every cell shows a single worker, the workers' addresses
    and numbers of ranks are included.
    """
    grouped = _grouped(rows)
    named: Json = {
        "ids": [cell[0].worker_id for cell in grouped],
        "sizes": [*map(len, grouped)],
    }
    if len(grouped) < len(rows):
        return named
    return named | {
        "addresses": [each.address for each in rows],
        "ranks": [each.ranks for each in rows],
    }


def cells(rows: Sequence[Row]) -> list[list[str | int | None]]:
    """Return a list of eight values for each cell.

    The values are the state; the numbers of slots, of running and of waiting sequences; the
    percentages of KV blocks that are used, and that are cached; the tokens per second; and the
    percentage of recent prompt tokens that were prefix-cache hits, or None without prompts.
    """
    return [_cell(cell) for cell in _grouped(rows)]


def _grouped(rows: Sequence[Row]) -> list[Sequence[Row]]:
    size = max(1, -(-len(rows) // MOST_CELLS))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _cell(rows: Sequence[Row]) -> list[str | int | None]:
    if len(rows) == 1:
        return _cell_of(rows[0])
    sums = [sum(column) for column in zip(*(each[4:] for each in rows), strict=True)]
    worst = max((each.state for each in rows), key=_SEVERITY.index)
    first = rows[0]
    return _cell_of(Row._make((first.worker_id, first.address, first.ranks, worst, *sums)))


def _cell_of(each: Row) -> list[str | int | None]:
    blocks = each.blocks or 1
    return [
        each.state.value,
        each.slots,
        each.running,
        each.waiting,
        round(100 * each.blocks_used / blocks),
        round(100 * each.blocks_cached / blocks),
        round(each.tokens_per_s),
        round(100 * each.cached_tokens / each.prompt_tokens) if each.prompt_tokens else None,
    ]


def summary(rows: Sequence[Row]) -> Json:
    """Return the numbers of workers by state, and totals over all workers that are not lost.

    The totals are the sums of slots, sequences, KV blocks, token rates and recent prompt tokens.
    ``up`` counts all workers that are not lost, including those that are draining or slow.
    """
    up = [each for each in rows if each.state is not State.LOST]
    return {
        "up": len(up),
        "lost": len(rows) - len(up),
        "draining": sum(each.state is State.DRAINING for each in rows),
        "slow": sum(each.state is State.SLOW for each in rows),
        "slots": sum(each.slots for each in up),
        "running": sum(each.running for each in up),
        "waiting": sum(each.waiting for each in up),
        "blocks": sum(each.blocks for each in up),
        "blocks_used": sum(each.blocks_used for each in up),
        "blocks_cached": sum(each.blocks_cached for each in up),
        "tokens_per_s": round(sum(each.tokens_per_s for each in up)),
        "prompt_tokens": sum(each.prompt_tokens for each in up),
        "cached_tokens": sum(each.cached_tokens for each in up),
    }
