"""``everlift explain --session`` against a router that knows one session."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.explain.session import Turn, as_json
from everlift.errors import UnknownRequest
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from everlift.wire import abort

ARRIVED = {"one": 100.0, "two": 103.5, "branch": 104.0, "gone": 105.0}


def explanation(request_id: str) -> pb.Explanation:
    spans = {pb.SPAN_KIND_QUEUE: 0.25, pb.SPAN_KIND_PREFILL: 0.5, pb.SPAN_KIND_DECODE: 1.0}
    return pb.Explanation(
        request_id=request_id,
        state=pb.REQUEST_STATE_FINISHED,
        total_s=2.0,
        spans=[pb.Span(kind=kind, seconds=seconds) for kind, seconds in spans.items()],
        attempts=[
            pb.ExplainedAttempt(number=1, known_tokens=900, cached_tokens=768),
            pb.ExplainedAttempt(number=2, known_tokens=910, cached_tokens=896),
        ],
        prompt_tokens=900,
        output_tokens=20,
    )


class Knowing(inference_pb2_grpc.InferenceServicer):
    async def GetStatus(self, request: object, context: object) -> pb.GetStatusResponse:
        return pb.GetStatusResponse()

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: object
    ) -> pb.ListRequestsResponse:
        names = reversed(ARRIVED) if request.session_id == "chat [1]" else ()
        return pb.ListRequestsResponse(
            requests=[pb.RequestSummary(request_id=name, arrived=ARRIVED[name]) for name in names]
        )

    async def Explain(
        self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> pb.Explanation:
        if request.request_id == "gone":
            await abort(context, UnknownRequest("no request gone"))
        return explanation(request.request_id)


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["explain", *arguments])


async def test_explain_session_shows_turns_and_time_between_them() -> None:
    result = await run("--session", "chat [1]")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    # The second turn was still running when the third one arrived: the gap is 0.
    assert "session chat [1]: 3 turns, 6.000 s; 1.500 s between them" in result.stdout
    times = ["0.250", "0.000", "0.500", "1.000", "0.250", "2.000"]
    assert ["1", "one", "900", "768", "20", *times, "1.500"] in lines
    assert ["2", "two", "900", "768", "20", *times] in lines
    assert ["3", "branch", "900", "768", "20", *times] in lines


async def test_explain_session_prints_json() -> None:
    session = json.loads((await run("--session", "chat [1]", "--json")).stdout)
    assert session["session_id"] == "chat [1]"
    turns = session["turns"]
    assert [turn["request_id"] for turn in turns] == ["one", "two", "branch"]
    assert [turn["then_s"] for turn in turns] == [1.5, None, None]
    assert [turn["cached_tokens"] for turn in turns] == [768] * 3


def test_explain_session_counts_no_time_while_any_turn_runs() -> None:
    spans = ((0.0, 10.0), (1.0, 1.0), (4.0, 2.0), (12.0, 1.0))
    turns = [Turn(arrived, pb.Explanation(total_s=total_s)) for arrived, total_s in spans]
    entries = as_json("s", turns)["turns"]
    assert [each["then_s"] for each in entries] == [None, None, 2.0, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--session", "none"], "there are no requests in session 'none'"),
        (["--session", "s", "--last"], "give either a request id, --last or --session"),
        (["r", "--session", "s"], "give either a request id, --last or --session"),
        ([], "give either a request id, --last or --session"),
        (["--session", "s", "--png", "s.png"], "--png works only for one request"),
    ],
)
async def test_explain_session_names_the_cause_of_a_failure(
    arguments: list[str], message: str
) -> None:
    result = await run(*arguments)
    assert result.exit_code != 0
    assert message in result.output or message in str(result.exception)
