"""What a cluster can hold and do, for the terminal and for programs."""

from __future__ import annotations

from google.protobuf.json_format import MessageToDict

from everlift.v1 import admin_pb2 as pb


def show(capacity: pb.CapacityResponse) -> str:
    wait_s = f"{capacity.wait_s:.1f} s" if capacity.HasField("wait_s") else "not known"
    rate = f"{capacity.tokens_per_s:.0f}" if capacity.tokens_per_s else "not known"
    kinds = "".join(f"{_kind(kind)}\n" for kind in capacity.kinds)
    return (
        f"workers {capacity.workers}\n{kinds}"
        f"slots {capacity.slots_used} / {capacity.slots}\n"
        f"KV blocks {capacity.blocks_used} / {capacity.blocks}\n"
        f"tokens/s when full {rate}\n"
        f"queue {capacity.queued}   tokens {capacity.queued_tokens}   wait {wait_s}"
    )


def _kind(kind: pb.WorkerKind) -> str:
    text = f"  {kind.workers} x {kind.device or 'not said what'}"
    if not kind.HasField("step_time"):
        return f"{text}: steps not known"
    step = kind.step_time
    return (
        f"{text}: a step takes {step.overhead_s * 1e3:.3g} ms, and of it a sequence "
        f"{step.row_s * 1e6:.3g} us, a token {step.token_s * 1e6:.3g}, a known one "
        f"{(step.kv_token_s + step.pair_s) * 1e6:.3g}"
        + (f"   (off by {step.error:.0%})" if step.HasField("error") else "")
    )


def as_json(capacity: pb.CapacityResponse) -> dict[str, object]:
    """Numbers by the fields of the message; what is not known is left out."""
    fields = MessageToDict(
        capacity, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # 64-bit integers are text in protobuf's JSON.
    whole = {name: int(text) for name, text in fields.items() if isinstance(text, str)}
    return fields | whole
