"""An Explanation for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from google.protobuf.json_format import MessageToDict

from everlift.v1 import inference_pb2 as pb

_KIND, _STATE = "SPAN_KIND_", "REQUEST_STATE_"

#: What each kind of span is, for people.
LABELS = MappingProxyType(
    {
        pb.SPAN_KIND_DOOR: "at the door: read, checked, tokenised",
        pb.SPAN_KIND_RENDERING: "at the door: the chat's template",
        pb.SPAN_KIND_LIMITS: "ledger: the tenant's limits",
        pb.SPAN_KIND_OPENING: "ledger: filed",
        pb.SPAN_KIND_ELSEWHERE: "with another router",
        pb.SPAN_KIND_LINE: "to and from the leader",
        pb.SPAN_KIND_LEADER: "queued: the leader was not ready",
        pb.SPAN_KIND_NO_WORKER: "queued: no worker was there, and none was starting",
        pb.SPAN_KIND_BEHIND_EARLIER: "queued: behind earlier requests",
        pb.SPAN_KIND_BEHIND_CLASS: "queued: behind higher classes",
        pb.SPAN_KIND_BEHIND_TURN: "queued: other tenants' turns",
        pb.SPAN_KIND_BEHIND_ORDER: "queued: behind later requests, by the order",
        pb.SPAN_KIND_BEHIND_FLOOR: "queued: lower classes' part",
        pb.SPAN_KIND_NO_CREDIT: "queued: the next one, and no worker had room",
        pb.SPAN_KIND_DISPATCH: "ledger: dispatched",
        pb.SPAN_KIND_ON_THE_WAY: "to and from the worker",
        pb.SPAN_KIND_WORKER_WAIT: "at the worker, before its first step",
        pb.SPAN_KIND_PREFILL: "prefill",
        pb.SPAN_KIND_STALLED: "stalled by others' prefill",
        pb.SPAN_KIND_DECODE: "decode",
        pb.SPAN_KIND_CO_TENANCY: "decode, longer for others in the batch",
        pb.SPAN_KIND_PREEMPTED: "preempted",
        pb.SPAN_KIND_RECOMPUTE: "computed again",
        pb.SPAN_KIND_PASSED_OVER: "passed over in steps",
        pb.SPAN_KIND_BETWEEN_STEPS: "between steps",
        pb.SPAN_KIND_UNTOLD: "at a worker that told nothing",
        pb.SPAN_KIND_DETECTION: "until its worker was found lost",
        pb.SPAN_KIND_REQUEUE: "back into the queue",
        pb.SPAN_KIND_STORING: "ledger: its last tokens, or its end",
        pb.SPAN_KIND_DELIVERY: "its client read on",
        pb.SPAN_KIND_QUEUED: "queued",
        pb.SPAN_KIND_WORKER_UNPLACED: "queued: no worker was there, one was pending placement",
        pb.SPAN_KIND_WORKER_STARTS: "queued: no worker was there yet, one was loading its model",
    }
)


def kind_name(kind: pb.SpanKind.ValueType) -> str:
    """For programs: behind_earlier, prefill."""
    return pb.SpanKind.Name(kind).removeprefix(_KIND).lower()


def state_name(state: pb.RequestState.ValueType) -> str:
    """For programs: queued, finished."""
    return pb.RequestState.Name(state).removeprefix(_STATE).lower()


def as_json(explanation: pb.Explanation) -> dict[str, Any]:
    """The message's fields, of each span its ``start_s`` as well."""
    fields = MessageToDict(
        explanation, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {
        **fields,
        "state": state_name(explanation.state),
        "spans": spans_as_json(explanation.spans),
    }


def spans_as_json(spans: Iterable[pb.Span]) -> list[dict[str, Any]]:
    """One after the other."""
    listed: list[dict[str, Any]] = []
    start_s = 0.0
    for span in spans:
        kind, seconds = kind_name(span.kind), span.seconds
        listed.append(
            {"kind": kind, "start_s": start_s, "seconds": seconds, "attempt": span.attempt}
        )
        start_s += seconds
    return listed


def server_timing(spans: Iterable[pb.Span]) -> str:
    """As the header Server-Timing has it (https://www.w3.org/TR/server-timing): milliseconds by
    name."""
    return ", ".join(f"{kind_name(span.kind)};dur={1e3 * span.seconds:.3f}" for span in spans)
