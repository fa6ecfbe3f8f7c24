"""Names, labels and JSON form of an Explanation of the time that a request took. Pure.

An Explanation divides the time into consecutive spans, each of a kind such as queue or decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from google.protobuf.json_format import MessageToDict

from everlift.v1 import inference_pb2 as pb

_KIND, _STATE = "SPAN_KIND_", "REQUEST_STATE_"

#: Human-readable labels of the kinds of spans.
LABELS = MappingProxyType(
    {
        pb.SPAN_KIND_RECEIVE: "receiving: checking, rendering, tokenising",
        pb.SPAN_KIND_LEDGER: "ledger",
        pb.SPAN_KIND_NETWORK: "network to leader and worker",
        pb.SPAN_KIND_NO_WORKER: "queued: no worker",
        pb.SPAN_KIND_QUEUE: "queued",
        pb.SPAN_KIND_PREFIX_WAIT: "waiting for cached prefix",
        pb.SPAN_KIND_WORKER_WAIT: "waiting at the worker",
        pb.SPAN_KIND_PREFILL: "prefill",
        pb.SPAN_KIND_DECODE: "decode",
        pb.SPAN_KIND_INTERFERENCE: "batch interference",
        pb.SPAN_KIND_PREEMPTED: "preempted",
        pb.SPAN_KIND_RECOMPUTE: "computed again",
        pb.SPAN_KIND_MIGRATION: "migration: worker lost or changed",
        pb.SPAN_KIND_CLIENT: "client reading after the end",
        pb.SPAN_KIND_OTHER: "other",
    }
)


def kind_name(kind: pb.SpanKind.ValueType) -> str:
    """Return the kind's name for programs, such as ``worker_wait``."""
    return pb.SpanKind.Name(kind).removeprefix(_KIND).lower()


def state_name(state: pb.RequestState.ValueType) -> str:
    """Return the state's name for programs, such as ``queued`` or ``finished``."""
    return pb.RequestState.Name(state).removeprefix(_STATE).lower()


def continuation_name(continued: pb.Continuation.ValueType) -> str:
    """Return the continuation's name for programs: ``none``, ``exact`` or ``same_distribution``."""
    if continued == pb.CONTINUATION_UNSPECIFIED:
        return "none"
    return pb.Continuation.Name(continued).removeprefix("CONTINUATION_").lower()


def as_json(explanation: pb.Explanation) -> dict[str, Any]:
    """Return the fields of ``explanation`` as JSON values, with ``start_s`` added to each span.

    The state, the continuation and the kinds of spans are names such as "finished", "exact" and
    "worker_wait".
    """
    fields = MessageToDict(
        explanation, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {
        **fields,
        "state": state_name(explanation.state),
        "continued": continuation_name(explanation.continued),
        "spans": spans_as_json(explanation.spans),
    }


def spans_as_json(spans: Iterable[pb.Span]) -> list[dict[str, Any]]:
    """Return a dict for each span, in order, with the keys kind, start_s, seconds and attempt.

    ``start_s`` is the number of seconds from the start of the first span. ``attempt`` is the number
    of the attempt, from 1, or 0 if the span belongs to no single attempt.
    """
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
    """Return the value of the header Server-Timing, with each span's duration in milliseconds.

    https://www.w3.org/TR/server-timing defines the format.
    """
    return ", ".join(f"{kind_name(span.kind)};dur={1e3 * span.seconds:.3f}" for span in spans)
