"""What a cluster can hold and do, for the terminal and for programs."""

from __future__ import annotations

from google.protobuf.json_format import MessageToDict

from everlift.v1 import admin_pb2 as pb


def show(capacity: pb.CapacityResponse) -> str:
    wait_s = f"{capacity.wait_s:.1f} s" if capacity.HasField("wait_s") else "not known"
    rate = f"{capacity.tokens_per_s:.0f}" if capacity.tokens_per_s else "not known"
    return (
        f"workers {capacity.workers}\n"
        f"slots {capacity.slots_used} / {capacity.slots}\n"
        f"KV blocks {capacity.blocks_used} / {capacity.blocks}\n"
        f"tokens/s when full {rate}\n"
        f"queue {capacity.queued}   tokens {capacity.queued_tokens}   wait {wait_s}"
    )


def as_json(capacity: pb.CapacityResponse) -> dict[str, object]:
    """Numbers by the fields of the message; what is not known is left out."""
    fields = MessageToDict(
        capacity, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # 64-bit integers are text in protobuf's JSON.
    whole = {name: int(text) for name, text in fields.items() if isinstance(text, str)}
    return fields | whole
