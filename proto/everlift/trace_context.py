"""Trace context of a request, in the format of W3C Trace Context (2021)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from everlift.v1 import ledger_pb2

#: Metadata keys: two of a call, and one of its answer (Trace Context Level 2, a draft).
TRACEPARENT, TRACESTATE, TRACERESPONSE = "traceparent", "tracestate", "traceresponse"

#: Value of traceparent. Later versions may append fields, which are ignored.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
#: Entry of one tracer in a tracestate.
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_SAMPLED = 0x01
_MAX_STATE, _MAX_MEMBERS = 512, 32


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Span of a trace, as W3C Trace Context identifies it.

    ``trace_id`` has 32 lower-case hexadecimal digits; ``span_id`` and ``parent_id`` have 16.
    ``parent_id`` is the id of the enclosing span, or empty. ``state`` is the header tracestate of
    other tracers, which is passed on without being used.
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    parent_id: str = ""
    state: str = ""

    @classmethod
    def parse(cls, traceparent: str, state: str = "") -> Self | None:
        """Return the context of the header ``traceparent``, or None if the header is invalid.

        ``state`` is the header tracestate, which is dropped if it is invalid.
        """
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        version, trace_id, span_id, flags, rest = match.groups()
        if version == "ff" or (version == "00" and rest):
            return None
        if not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state=_checked(state))

    def child(self, span_id: str) -> Self:
        return replace(self, span_id=span_id, parent_id=self.span_id)

    @classmethod
    def from_proto(cls, message: ledger_pb2.Trace) -> Self:
        return cls(
            message.trace_id, message.span_id, message.sampled, message.parent_id, message.state
        )

    def to_proto(self) -> ledger_pb2.Trace:
        return ledger_pb2.Trace(
            trace_id=self.trace_id,
            span_id=self.span_id,
            sampled=self.is_sampled,
            parent_id=self.parent_id,
            state=self.state,
        )

    def __str__(self) -> str:
        """Return the value of the header traceparent."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.is_sampled else 0:02x}"


def _checked(state: str) -> str:
    members = [member.strip(" \t") for member in state.split(",")]
    members = [member for member in members if member]
    has_valid_size = len(state) <= _MAX_STATE and len(members) <= _MAX_MEMBERS
    is_valid = has_valid_size and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if is_valid else ""
