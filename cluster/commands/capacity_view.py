"""Capacity of a cluster, as tables for the terminal and as JSON for programs."""

from __future__ import annotations

from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from everlift.hashes import BLOCK_SIZE
from everlift.v1 import admin_pb2 as pb

_UNKNOWN = "not known"


def show(capacity: pb.CapacityResponse) -> Group:
    """Return two tables that show ``capacity``, with times of steps in milliseconds.

    The first table shows the whole cluster. The second one has a row for each kind of worker, that
    is, for workers with the same capacity and about the same step times.
    """
    return Group(_cluster(capacity), _kinds(capacity))


def _cluster(capacity: pb.CapacityResponse) -> Table:
    table = Table("", "used", "of", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("workers", "", f"{capacity.workers}")
    table.add_row("sequences", f"{capacity.slots_used}", f"{capacity.slots}")
    used, most = (BLOCK_SIZE * blocks for blocks in (capacity.blocks_used, capacity.blocks))
    table.add_row("KV cache, tokens", f"{used}", f"{most}")
    rate = f"{capacity.tokens_per_s:.0f}" if capacity.tokens_per_s else _UNKNOWN
    table.add_row("throughput when full, tokens/s", "", rate)
    table.add_row("queued requests", f"{capacity.queued}", "")
    table.add_row("queued work, tokens", f"{capacity.queued_tokens}", "")
    wait = f"{capacity.wait_s:.1f}" if capacity.HasField("wait_s") else _UNKNOWN
    table.add_row("wait in the queue, s", wait, "")
    return table


def _kinds(capacity: pb.CapacityResponse) -> Table:
    table = Table(
        *("workers", "device", "step, ms", "each sequence, ms", "each new token, ms"),
        *("each cached token, ms", "error"),
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for kind in capacity.kinds:
        times = _times(kind.step_time) if kind.HasField("step_time") else (_UNKNOWN,)
        table.add_row(f"{kind.workers}", kind.device or _UNKNOWN, *times)
    return table


def _times(step: pb.StepTimeModel) -> tuple[str, ...]:
    parts = (step.overhead_s, step.row_s, step.token_s, step.kv_token_s + step.pair_s)
    error = f"{step.error:.0%}" if step.HasField("error") else _UNKNOWN
    return *(f"{1e3 * part:.2g}" for part in parts), error


def as_json(capacity: pb.CapacityResponse) -> dict[str, object]:
    """Return the fields of ``capacity`` as JSON values.

    An unknown ``wait_s`` or step time is left out, and an unknown ``tokens_per_s`` is 0.
    """
    fields = MessageToDict(
        capacity, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # MessageToDict returns 64-bit integers as text.
    whole = {name: int(text) for name, text in fields.items() if isinstance(text, str)}
    return fields | whole
