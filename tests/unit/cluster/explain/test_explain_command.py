"""``everlift explain`` against a router that knows one request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.explain.tables import adapter_loads, headline, prefix_waits, reading
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc

SPANS = [
    (pb.SPAN_KIND_RECEIVE, 0.0015, 0),
    (pb.SPAN_KIND_QUEUE, 0.5, 1),
    (pb.SPAN_KIND_DECODE, 0.25, 1),
    (pb.SPAN_KIND_MIGRATION, 0.2485, 1),
    (pb.SPAN_KIND_PREFIX_WAIT, 0.25, 2),
    (pb.SPAN_KIND_RECOMPUTE, 0.75, 2),
]
PREFIX_WAIT = pb.PrefixWait(seconds=0.25, tokens=96, saved_s=1.5, compute_s=1.25)
EXPLANATION = pb.Explanation(
    request_id="r",
    state=pb.REQUEST_STATE_FINISHED,
    total_s=2.0,
    spans=[pb.Span(kind=kind, seconds=seconds, attempt=of) for kind, seconds, of in SPANS],
    attempts=[
        pb.ExplainedAttempt(
            number=1,
            worker_id="w1",
            known_tokens=100,
            cached_tokens=64,
            end="worker [w1] was lost",
            queue=pb.QueueBypass(found=7, higher=3, before=["other"], order="fifo"),
            occupants=["o"],
        ),
        pb.ExplainedAttempt(
            number=2,
            worker_id="w2" * 8,
            known_tokens=110,
            expected_cached_tokens=96,
            prefix_wait=PREFIX_WAIT,
            neighbours=["x", "y"],
            newcomers=["z"],
            end="finished",
        ),
    ],
    prompt_tokens=100,
    output_tokens=20,
    predicted_output_tokens=30,
    ttft_s=0.75,
    predicted_ttft_s=0.5,
    ledger_s=0.125,
)


class Knowing(inference_pb2_grpc.InferenceServicer):
    async def GetStatus(self, request: object, context: object) -> pb.GetStatusResponse:
        return pb.GetStatusResponse()

    async def Explain(self, request: pb.ExplainRequest, context: object) -> pb.Explanation:
        assert request.request_id == "r"
        return EXPLANATION


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["explain", "r", *arguments])


async def test_explain_prints_a_table_with_a_total() -> None:
    result = await run()
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert "r: finished, 2.000 s" in result.stdout
    assert "100 prompt tokens, 20 output tokens (30 predicted)" in result.stdout
    assert "first token after 0.750 s (0.500 s predicted), including 0.125 s" in result.stdout
    assert ["0.501", "0.250", "12.5", "decode", "1"] in lines
    assert ["0.002", "0.1", "parts", "below", "0.1%", "each"] in lines
    assert ["2.000", "100.0", "total"] in lines
    assert "worker [w1] was lost" in result.stdout
    assert "your requests at other workers without free capacity, attempt 1: o" in result.stdout
    assert "your requests at the worker before attempt 2: x, y" in result.stdout
    assert "your requests arrived at the worker during attempt 2: z" in result.stdout
    assert (
        "queue before attempt 1 (fifo): 7 queued on arrival; left first: "
        "3 later arrivals of higher classes; your last ones: other" in result.stdout
    )


async def test_explain_prints_the_wait_for_a_cached_prefix() -> None:
    result = await run()
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["1.000", "0.250", "12.5", *"waiting for cached prefix".split(), "2"] in lines
    assert (
        "cached prefix, attempt 2: waited 0.250 s for a worker with 96 of 110 tokens cached; "
        "computing them elsewhere would have taken 1.250 s, and with its cost for other "
        "requests, a wait of up to 1.500 s was worthwhile"
    ) in " ".join(result.stdout.split())


@pytest.mark.parametrize("expected, said", [(95, " (in vain)"), (96, ""), (97, "")])
def test_explain_says_that_a_prefix_wait_was_in_vain(expected: int, said: str) -> None:
    attempt = pb.ExplainedAttempt(
        number=1, expected_cached_tokens=expected, prefix_wait=PREFIX_WAIT
    )
    (line,) = prefix_waits(pb.Explanation(attempts=[attempt]))
    assert f"waited 0.250 s{said} for a worker" in line
    attempt.ClearField("prefix_wait")
    assert not [*prefix_waits(pb.Explanation(attempts=[attempt]))]


def test_wait_for_an_adapter_has_a_line() -> None:
    attempts = [pb.ExplainedAttempt(number=1), pb.ExplainedAttempt(number=2, adapter_s=0.25)]
    assert [*adapter_loads(pb.Explanation(attempts=attempts))] == [
        "adapter, attempt 2: waited 0.250 s at the worker until it was loaded"
    ]


async def test_explain_prints_json() -> None:
    explanation = json.loads((await run("--json")).stdout)
    assert explanation["spans"][1] == {
        "kind": "queue",
        "start_s": 0.0015,
        "seconds": 0.5,
        "attempt": 1,
    }
    assert explanation["attempts"][0]["queue"]["higher"] == 3
    assert (explanation["ttft_s"], explanation["ledger_s"]) == (0.75, 0.125)
    assert explanation["total_s"] == sum(span["seconds"] for span in explanation["spans"])


async def test_explain_writes_a_picture(tmp_path: Path) -> None:
    result = await run("--png", str(tmp_path / "r.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "unread_s, unread_tokens, said",
    [
        (0.0, 0, []),
        (0.09, 0, []),
        (0.5, 0, ["tokens unread by the client for 0.500 s"]),
        (0.01, 7, ["tokens unread by the client for 0.010 s; 7 unread now"]),
    ],
)
def test_explain_names_large_unread_output_of_the_client(
    unread_s: float, unread_tokens: int, said: list[str]
) -> None:
    explanation = pb.Explanation(total_s=2.0, unread_s=unread_s, unread_tokens=unread_tokens)
    assert list(reading(explanation)) == said


def test_explain_names_missing_workers_of_a_queued_request() -> None:
    queued = pb.Explanation(request_id="r", missing_workers="0 of 1 ready; 1 not started")
    assert "workers: 0 of 1 ready; 1 not started" in list(headline(queued))
    assert not any("workers" in line for line in headline(pb.Explanation(request_id="r")))


def test_explain_says_what_an_interrupted_output_is() -> None:
    assert not any("interrupted" in line for line in headline(pb.Explanation()))
    exact = pb.Explanation(continued=pb.CONTINUATION_EXACT)
    assert "interrupted, with the output of an uninterrupted run" in list(headline(exact))
    other = pb.Explanation(continued=pb.CONTINUATION_SAME_DISTRIBUTION)
    assert any("same distribution" in line for line in headline(other))
