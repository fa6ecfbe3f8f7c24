"""``everlift bench`` over sockets, against OpenAI-compatible servers and an Everlift cluster."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cluster.bench.endpoint import OpenAiEndpoint, base_url, http_session
from cluster.bench.generator import Generator
from cluster.bench.load import Request
from cluster.bench.report import CountedBy, Outcome
from cluster.config import DEMO_MODEL
from cluster.errors import BenchFailed
from tests.support.commands import run
from tests.support.in_process import Cluster, cluster
from tests.support.router.timed_server import MODEL, TimedServer, serving

KEY = "sk-nobody-may-see-this"


async def bench(tmp_path: Path, *arguments: str, status: int = 0, **environ: str) -> Any:
    """Return the JSON report of a load, after a check that no output contains the API key."""
    files = tmp_path / "report.json", tmp_path / "report.html"
    written = [
        text
        for name, file in zip(("--json", "--html"), files, strict=True)
        for text in (name, str(file))
    ]
    said = await run("bench", "serve", *arguments, *written, status=status, **environ)
    texts = [said, *(file.read_text() for file in files)]
    assert not any(KEY in text for text in texts)
    return json.loads(texts[1])


async def test_bench_measures_completions_with_an_api_key(tmp_path: Path) -> None:
    server = TimedServer(ttft_s=0.02, gap_s=0.002)
    async with serving(server) as url:
        found = await bench(
            tmp_path,
            *("--url", url, "--requests", "8", "--rate", "200", "--input-tokens", "9"),
            *("--output-tokens", "4", "--warm-up", "1", "--goodput", "ttft:5000 tpot:5000"),
            EVERLIFT_API_KEY=KEY,
        )
    assert (found["completed"], found["failed"], found["model_id"]) == (8, 0, MODEL)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (72, 32)
    assert found["everlift"]["good_share"] == 1.0
    assert found["mean_ttft_ms"] >= 20 and found["mean_e2el_ms"] >= 26
    assert len(server.asked) == 9
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers, _ in server.asked)
    _, body = server.asked[-1]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)


async def test_bench_counts_chat_tokens_with_a_tokenizer(tmp_path: Path) -> None:
    server = TimedServer(counts=False)
    async with serving(server) as url:
        found = await bench(
            tmp_path,
            *("--url", url, "--chat", "--requests", "3", "--output-tokens", "4"),
            *("--tokenizer", str(DEMO_MODEL), "--no-ignore-eos", "--extra-body", '{"top_p": 0.5}'),
        )
        unsure = await bench(tmp_path, "--url", url, "--requests", "3", "--output-tokens", "4")
    assert found["everlift"]["tokens_counted_by"] == {"tokenizer": 3}
    assert (found["backend"], found["completed"]) == ("openai-chat", 3)
    chats = [body for _, body in server.asked if "messages" in body]
    assert all(body["top_p"] == 0.5 and "ignore_eos" not in body for body in chats)
    assert unsure["everlift"]["tokens_counted_by"] == {"pieces": 3}
    assert unsure["total_output_tokens"] == 12 and unsure["everlift"]["marks"]


async def test_bench_counts_rejected_requests_and_continues(tmp_path: Path) -> None:
    server = TimedServer(refusals=2)
    async with serving(server) as url:
        found = await bench(
            tmp_path, "--url", url, "--requests", "5", "--concurrency", "2", "--warm-up", "0"
        )
    assert (found["completed"], found["failed"]) == (3, 2)
    assert found["everlift"]["errors"] == {"429 queue_full": 2}


async def test_bench_ramp_ends_without_saturation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine could saturate this load; test_bench_saturation.py tests the criterion.
    def are_complete(outcomes: Sequence[Outcome], *_: object) -> bool:
        return all(each.is_complete for each in outcomes)

    monkeypatch.setattr("cluster.bench.run.is_load_sustained", are_complete)
    async with serving(TimedServer()) as url:
        found = await bench(
            tmp_path, "--url", url, "--ramp", "20:40", "--duration", "0.5", "--output-tokens", "1"
        )
    assert found["everlift"]["saturation"] == {"kept": 40.0, "too_much": None}
    assert [stage["rate"] for stage in found["everlift"]["stages"]] == [20.0, 40.0]


async def test_bench_reports_an_unusable_endpoint_before_the_load(tmp_path: Path) -> None:
    async with serving(TimedServer(refusals=100)) as url:
        said = await run("bench", "serve", "--url", url, "--requests", "5", status=1)
    assert "no warm-up request was answered: 429 queue_full" in said
    said = await run("bench", "serve", "--url", url, "--requests", "5", status=1)
    assert "returned no list of models" in said


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--url", f"http://user:{KEY}@127.0.0.1/v1"), "must not contain credentials"),
        (("--url", "ftp://127.0.0.1"), "must be a URL such as"),
        (("--chat",), "need --url"),
        (("--extra-body", "[]", "--url", "http://127.0.0.1:1"), "must be a JSON object"),
        (("--percentiles", "101"), "from 0 to 100"),
        (("--ramp", "4:1", "--duration", "1"), "the lower one first"),
        (("--ramp", "1:4"), "needs --duration"),
        (("--goodput", "itl:5"), "must be ttft"),
        (("--trace", "nowhere.csv", "--url", "http://127.0.0.1:1", "--model", "m"), "nowhere.csv"),
    ],
)
async def test_bench_rejects_invalid_arguments(arguments: tuple[str, ...], said: str) -> None:
    found = await run("bench", "serve", *arguments, status=1)
    assert said in found and KEY not in found


def test_base_url_is_normalised() -> None:
    assert base_url("http://h:8000") == base_url("http://h:8000/") == "http://h:8000/v1"
    assert base_url("https://h/openai/v1/") == "https://h/openai/v1"
    with pytest.raises(BenchFailed):
        base_url("h:8000")


@asynccontextmanager
async def scripted(*said: bytes, status: int = 200) -> AsyncIterator[OpenAiEndpoint]:
    """Run an endpoint that answers every request with these pieces."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in said:
            await response.write(piece)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with http_session(url, None) as session:
            is_chat = b"delta" in b"".join(said)
            yield OpenAiEndpoint(session, "m", ignore_eos=True, temperature=0.0, is_chat=is_chat)
    finally:
        await runner.cleanup()


async def outcome_of(*said: bytes, status: int = 200) -> Outcome:
    async with scripted(*said, status=status) as endpoint:
        (outcome,) = await Generator(endpoint, timeout_s=20).open_loop([Request(0.0, "p", 1, 2)])
    return outcome


TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "said, status, error",
    [
        ((TOKEN,), 200, "broken_off"),
        ((b"data: {\n\n",), 200, "no_json"),
        ((b"data: []\n\n",), 200, "no_json"),
        ((b'data: {"choices": 5}\n\n',), 200, "malformed_chunk"),
        ((b'data: {"choices": ["a"]}\n\n',), 200, "malformed_chunk"),
        ((TOKEN, b'data: {"usage": {"prompt_tokens": "many"}}\n\n'), 200, "malformed_chunk"),
        ((TOKEN, b'data: {"error": {"code": "engine_failed"}}\n\n', DONE), 200, "engine_failed"),
        (
            (TOKEN, b'data: {"error": {"message": "%s"}}\n\n' % KEY.encode(), DONE),
            200,
            "error_in_stream",
        ),
        ((DONE,), 200, "no_output"),
        ((b"not json",), 500, "500"),
        ((b'{"error": {"code": 7, "type": "too_many"}}',), 429, "429 too_many"),
        ((b'{"error": "%s"}' % KEY.encode(),), 401, "401"),
    ],
)
async def test_outcome_error_is_a_short_code(
    said: tuple[bytes, ...], status: int, error: str
) -> None:
    assert (await outcome_of(*said, status=status)).error == error


async def test_outcome_pieces_exclude_chunks_without_output() -> None:
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "h"}}]}\n\n'
    call = b'data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]}\n\n'
    end = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}\n\n'
    outcome = await outcome_of(role, thought, call, end, usage, DONE)
    assert (len(outcome.pieces), outcome.output_tokens, outcome.error) == (2, 5, "")
    assert outcome.counted_by is CountedBy.USAGE


async def test_outcome_pieces_include_tokens_without_text() -> None:
    silent = b'data: {"choices": [{"text": "", "finish_reason": null}]}\n\n'
    end = b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
    outcome = await outcome_of(TOKEN, silent, end, DONE)
    assert len(outcome.pieces) == 2, "a token may have no text of its own"


@pytest.mark.parametrize("choice", [b'"text": ""', b'"delta": {}'])
async def test_answer_of_special_tokens_only_counts_as_output(choice: bytes) -> None:
    end = b'data: {"choices": [{%s, "finish_reason": "length"}]}\n\n' % choice
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}\n\n'
    outcome = await outcome_of(end, usage, DONE)
    assert (len(outcome.pieces), outcome.output_tokens, outcome.error) == (1, 5, "")


# an Everlift cluster


async def loaded(parts: Cluster, tmp_path: Path, *arguments: str) -> Any:
    return await bench(
        tmp_path,
        *("--requests", "12", "--rate", "100", "--input-tokens", "8", "--output-tokens", "6"),
        *("--detailed", *arguments),
    )


async def test_bench_load_is_the_same_over_grpc_and_http(tmp_path: Path) -> None:
    async with cluster(workers=1) as parts:
        by_grpc = await loaded(parts, tmp_path, "--address", parts.address)
        url = f"http://{parts.routers[0].http_address}"
        by_http = await loaded(parts, tmp_path, "--url", url)
    for found in (by_grpc, by_http):
        assert (found["completed"], found["total_output_tokens"]) == (12, 72)
        assert found["output_lens"] == [6] * 12
        assert found["everlift"]["tokens_counted_by"] == {"usage": 12}
    assert by_grpc["input_lens"] == [8] * 12
    assert (by_grpc["backend"], by_http["backend"]) == ("everlift", "openai")


async def test_bench_compare_shows_two_reports(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a.json", "b.json", "both.html")]
    async with serving(TimedServer()) as url:
        for name, rate in zip(names, ("50", "60"), strict=False):
            await run(
                *("bench", "serve", "--url", url, "--requests", "4", "--rate", rate),
                *("--json", name, "--output-tokens", "2"),
            )
    said = await run("bench", "compare", *names[:2], "--html", names[2])
    assert "B / A" in said and "request_rate differs: 50 in A, 60 in B" in said
    assert Path(names[2]).read_text().count("<svg") >= 3
