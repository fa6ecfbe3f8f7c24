"""Valid and invalid headers of W3C Trace Context."""

from __future__ import annotations

import pytest

from everlift.messages import Request, Submission
from everlift.trace_context import TraceContext
from everlift.v1 import inference_pb2 as pb
from router.requests.tokenizer import ServedModel

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("flags, is_sampled", [("00", False), ("01", True), ("ff", True)])
def test_traceparent_is_parsed(flags: str, is_sampled: bool) -> None:
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}", "vendor=1,other=x")
    assert context == TraceContext(TRACE, SPAN, is_sampled, state="vendor=1,other=x")
    assert str(context) == f"00-{TRACE}-{SPAN}-{'01' if is_sampled else '00'}"


def test_traceparent_of_later_version_may_be_longer() -> None:
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01 ",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}x-01",
    ],
)
def test_malformed_traceparent_is_ignored(traceparent: str) -> None:
    assert TraceContext.parse(traceparent) is None


@pytest.mark.parametrize(
    "state",
    ["x" * 513, "k=ä", "k", "K=1", "k=1,k 2", "k=1=2", "k=1," * 32 + "k=1"],
)
def test_malformed_tracestate_is_dropped(state: str) -> None:
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None and context.state == ""


def test_tracestate_empty_members_are_dropped() -> None:
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-01", "a=1, ,b@c=2 ,")
    assert context is not None and context.state == "a=1,b@c=2"


def test_trace_context_child_has_parent_span() -> None:
    child = TraceContext(TRACE, SPAN, True, state="k=v").child("a" * 16)
    assert child == TraceContext(TRACE, "a" * 16, True, SPAN, "k=v")


def test_trace_context_is_stored_and_ignored_in_comparison() -> None:
    message = pb.GenerateRequest(text="hi", max_tokens=2)
    context = TraceContext(TRACE, SPAN, True, "b" * 16, "k=v")
    requests = [
        ServedModel.load("fake").resolve(Submission.from_proto(message, "r", 1, *call))
        for call in ((context, "mesh/1"), (None, ""))
    ]
    stored = [Request.from_bytes(request.to_bytes()) for request in requests]
    assert stored == requests
    assert [request.trace for request in stored] == [context, None]
    assert [request.x_request_id for request in stored] == ["mesh/1", ""]
    assert stored[0].body_hash == stored[1].body_hash
