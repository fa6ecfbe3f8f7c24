"""OpenAI's API over HTTP, on routers and fake workers: answers, rejections and resumption."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import QueueFull, Unauthenticated, UnknownRequest
from router.api.http import connection
from router.api.http.event_id import BEGIN, EventId
from router.auth.caller import Caller, Scope
from tests.support.in_process import (
    ROUTER,
    WORKER,
    Cluster,
    cluster,
    paced_cluster,
    right_tokens,
    until,
)
from tests.support.router.http_client import JSON, Event, ask, get, streamed
from worker.config import FakeModel

PROMPT = [5, 6, 7]
GREEDY = {"prompt": PROMPT, "temperature": 0}


def right_text(parts: Cluster, prompt: list[int], count: int) -> str:
    return parts.routers[0]._models.first.tokenizer.decode(right_tokens(prompt, count))


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    async with cluster(workers=1) as parts:
        yield parts


@pytest.fixture
def address(parts: Cluster) -> str:
    return parts.routers[0].http_address


async def events(address: str, body: Any, headers: Mapping[str, str] = JSON) -> list[Event]:
    async with streamed(address, "/v1/completions", {**body, "stream": True}, headers) as stream:
        assert stream.status == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        return [event async for event in stream.events()]


def text_of(chunks: list[Event], choice: int = 0) -> str:
    shown = [it for event in chunks for it in event.json["choices"] if it["index"] == choice]
    return "".join(it["text"] for it in shown)


async def busy(parts: Cluster) -> int:
    """Return the number of requests that the only worker runs or queues."""
    async with AsyncClient(parts.address) as client:
        [worker] = (await client.status()).workers
        return int(worker.num_running + worker.num_waiting)


# answers


async def test_completion_returns_text_and_usage(parts: Cluster, address: str) -> None:
    answer = await ask(address, "/v1/completions", {**GREEDY, "max_tokens": 20})
    [choice] = answer.json["choices"]
    assert (answer.status, choice["finish_reason"]) == (200, "length")
    assert choice["text"] == right_text(parts, PROMPT, 20)
    assert answer.json["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 20,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer.json["id"] == f"cmpl-{answer.headers['idempotency-key']}"
    assert answer.json["model"] == "fake"


async def test_completion_stream_matches_unary_answer(parts: Cluster, address: str) -> None:
    options = {"stream_options": {"include_usage": True}}
    *chunks, usage, done = await events(address, {**GREEDY, "max_tokens": 20, **options})
    assert text_of(chunks) == right_text(parts, PROMPT, 20)
    assert [it.json["choices"][0]["finish_reason"] for it in chunks] == [
        *[None] * (len(chunks) - 1),
        "length",
    ]
    assert usage.json["choices"] == [] and usage.json["usage"]["completion_tokens"] == 20
    assert done.data == "[DONE]"
    plain = await events(address, {**GREEDY, "max_tokens": 20})
    assert all(event.json["usage"] is None for event in plain[:-1])


async def test_usage_reports_prefix_cache_hits(address: str) -> None:
    body = {"prompt": list(range(100)), "temperature": 0, "max_tokens": 2}
    options = {"stream_options": {"include_usage": True}}
    first = await ask(address, "/v1/completions", body)
    again = await ask(address, "/v1/completions", body)
    *_, streamed_usage, _ = await events(address, {**body, **options})
    details = [it.json["usage"]["prompt_tokens_details"] for it in (first, again, streamed_usage)]
    assert details == [{"cached_tokens": 0}, {"cached_tokens": 96}, {"cached_tokens": 96}]


@pytest.mark.parametrize("prompt", [PROMPT, "abc", ["a", "bc"]])
async def test_continuous_usage_is_in_every_chunk(address: str, prompt: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, "stream_options": options}
    *chunks, last, _ = await events(address, body)
    total = 20 * (2 if len(prompt) == 2 else 1)
    counts = []
    for chunk in chunks:
        usage = chunk.json["usage"]
        assert usage["prompt_tokens"] == 3
        assert usage["total_tokens"] == 3 + usage["completion_tokens"]
        counts.append(usage["completion_tokens"])
    assert counts == sorted(counts) and counts[-1] == total
    assert last.json["usage"]["completion_tokens"] == total and last.json["choices"] == []
    # As in vLLM, it takes effect only with include_usage.
    alone = {**body, "stream_options": {"continuous_usage_stats": True}}
    *chunks, _ = await events(address, alone)
    assert all(chunk.json["usage"] is None and chunk.json["choices"] for chunk in chunks)


async def test_stop_reason_names_matched_stop(parts: Cluster, address: str) -> None:
    tokens = right_tokens(PROMPT, 20)
    text = right_text(parts, PROMPT, 20)
    for fields, reason in (
        ({"stop": [text[4:7]]}, text[4:7]),
        ({"stop_token_ids": [tokens[5]]}, tokens[5]),
        ({}, None),
    ):
        body = {**GREEDY, "max_tokens": 20, **fields}
        [choice] = (await ask(address, "/v1/completions", body)).json["choices"]
        finish = "length" if reason is None else "stop"
        assert (choice["finish_reason"], choice["stop_reason"]) == (finish, reason)
        *chunks, _ = await events(address, body)
        reasons = [chunk.json["choices"][0]["stop_reason"] for chunk in chunks]
        assert reasons == [*[None] * (len(chunks) - 1), reason]


async def test_choices_are_ordered_by_prompt_and_index(parts: Cluster, address: str) -> None:
    prompts = [[5], [6, 7], [8]]
    body = {"prompt": prompts, "n": 2, "temperature": 0, "max_tokens": 9}
    right = [right_text(parts, prompt, 9) for prompt in prompts for _ in range(2)]
    answer = await ask(address, "/v1/completions", body)
    assert [it["index"] for it in answer.json["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [it["text"] for it in answer.json["choices"]] == right
    assert answer.json["usage"]["prompt_tokens"] == 4
    *chunks, _ = await events(address, body)
    assert [text_of(chunks, choice) for choice in range(6)] == right


async def test_echo_prepends_prompt_to_text(parts: Cluster, address: str) -> None:
    body = {"prompt": ["ab", "c"], "temperature": 0, "max_tokens": 3, "echo": True}
    right = ["ab" + right_text(parts, list(b"ab"), 3), "c" + right_text(parts, list(b"c"), 3)]
    answer = await ask(address, "/v1/completions", body)
    assert [it["text"] for it in answer.json["choices"]] == right
    *chunks, _ = await events(address, body)
    assert [text_of(chunks, choice) for choice in range(2)] == right


async def test_models_tokenize_and_detokenize_endpoints(address: str) -> None:
    models = await get(address, "/v1/models")
    [model] = models.json["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("fake", 4096, "model")
    assert (await get(address, "/v1/models/fake")).json == model
    unknown = await get(address, "/v1/models/org/other")
    assert (unknown.status, unknown.error) == (404, ("unknown_model", "model"))
    tokens = await ask(address, "/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert tokens.json["tokens"] == list("hé".encode())
    assert tokens.json["token_strs"] == ["h", "<0xC3>", "<0xA9>"]
    assert (tokens.json["count"], tokens.json["max_model_len"]) == (3, 4096)
    text = await ask(address, "/detokenize", {"tokens": tokens.json["tokens"]})
    assert text.json == {"prompt": "hé"}


async def test_chat_without_template_is_rejected(address: str) -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = await ask(address, path, messages)
        assert (answer.status, answer.error[0]) == (400, "no_chat_template")


async def test_health_ready_and_metrics_endpoints(parts: Cluster, address: str) -> None:
    assert (await get(address, "/health")).status == 200
    assert (await ask(address, "/health", method="HEAD")).status == 200
    assert (await get(address, "/ready")).status == 200
    await ask(address, "/v1/completions", GREEDY)
    odd = {"accept": "application/openmetrics-text; version=latest"}
    for headers in ({}, odd):
        metrics = await get(address, "/metrics", headers)
        assert metrics.headers["content-type"].startswith("text/plain")
    assert b'everlift_requests_total{model="fake",outcome="ok"} 1.0' in metrics.body
    parts.routers[0]._requests._registry.is_closing = True
    answer = await get(address, "/ready")
    assert (answer.status, answer.error[0]) == (503, "router_stopping")
    assert (await get(address, "/health")).status == 200
    parts.routers[0]._requests._registry.is_closing = False


async def test_ping_answers_get_and_post_like_health(address: str) -> None:
    health = await get(address, "/health")
    for method in ("GET", "POST", "HEAD"):
        answer = await ask(address, "/ping", method=method)
        assert (answer.status, answer.body) == (200, b"" if method == "HEAD" else health.body)
    answer = await ask(address, "/ping", method="PUT")
    assert (answer.status, answer.error[0]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, POST, HEAD"


async def test_version_is_that_of_the_package(address: str) -> None:
    assert (await get(address, "/version")).json == {"version": version("everlift")}
    assert (await ask(address, "/version")).status == 405


async def test_load_counts_unfinished_requests(parts: Cluster, address: str) -> None:
    async def load() -> int:
        answer = await get(address, "/load")
        assert set(answer.json) == {"server_load"}
        return int(answer.json["server_load"])

    assert await load() == 0
    [held] = parts.hold()
    body = {"prompt": [[5, 6], [7]], "max_tokens": 3}
    asking = asyncio.create_task(ask(address, "/v1/completions", body))
    await until(lambda: held.num_requests == 2)
    assert await load() == 2
    held.release()
    assert (await asking).status == 200
    await until(lambda: not len(parts.routers[0]._requests))
    assert await load() == 0


async def test_status_and_models_report_http_address(parts: Cluster, address: str) -> None:
    async with AsyncClient(parts.address) as client:
        assert (await client.status()).http_address == address
        assert (await client.models()).http_address == address


# request ids


async def test_idempotency_key_makes_retry_same_request(parts: Cluster, address: str) -> None:
    headers = {**JSON, "idempotency-key": "mine"}
    body = {"prompt": "a", "temperature": 1, "max_tokens": 9}
    first = await ask(address, "/v1/completions", body, headers)
    again = await ask(address, "/v1/completions", body, headers)
    assert first.json["choices"] == again.json["choices"]
    assert again.headers["idempotency-key"] == again.headers["x-request-id"] == "mine"
    other = await ask(address, "/v1/completions", {**body, "prompt": "b"}, headers)
    assert (other.status, other.error[0]) == (409, "request_conflict")
    assert other.headers["x-should-retry"] == "false"
    assert (await parts.ledger.get("mine")).num_tokens == (9,)


async def test_x_request_id_does_not_merge_requests(address: str) -> None:
    headers = {**JSON, "x-request-id": "mesh/1"}
    answers = [
        await ask(address, "/v1/completions", {**GREEDY, "prompt": prompt}, headers)
        for prompt in ("a", "b")
    ]
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].json["id"] != answers[1].json["id"]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mesh/1"}
    unprintable = await ask(address, "/v1/completions", GREEDY, {**JSON, "x-request-id": "a b"})
    assert unprintable.headers["x-request-id"] == unprintable.headers["idempotency-key"]


async def test_response_echoes_x_request_id(address: str) -> None:
    headers = {**JSON, "x-request-id": "mesh/1"}
    paths = {"/tokenize": 200, "/v1/completions": 400, "/v1/models": 405, "/nothing": 404}
    for path, status in paths.items():
        answer = await ask(address, path, {"prompt": ""}, headers)
        assert (answer.status, answer.headers["x-request-id"]) == (status, "mesh/1")


async def test_prompts_of_one_call_get_indexed_request_ids(parts: Cluster, address: str) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 2}
    await ask(address, "/v1/completions", body, {**JSON, "idempotency-key": "mine"})
    assert [(await parts.ledger.get(f"mine:{i}")).num_tokens for i in range(2)] == [(2,), (2,)]


async def test_error_response_has_idempotency_key(address: str) -> None:
    answer = await ask(address, "/v1/completions", {"prompt": ""})
    assert answer.error == ("empty_prompt", "prompt")
    assert answer.headers["idempotency-key"]
    bad = await ask(address, "/v1/completions", GREEDY, {**JSON, "idempotency-key": "not one"})
    assert (bad.status, bad.error) == (400, ("invalid_request", "idempotency-key"))


# refusals


REFUSED: dict[str, tuple[Any, int, str, str | None]] = {
    "no JSON": (b"{", 400, "malformed_body", None),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, "not_utf8", None),
    "unknown field": ({"prompt": "a", "tempratur": 1}, 400, "unknown_field", "tempratur"),
    "no prompt": ({}, 400, "invalid_request", "prompt"),
    "unknown model": ({"prompt": "a", "model": "gpt-5"}, 404, "unknown_model", "model"),
    "unknown model of two prompts": (
        {"prompt": ["a", "b"], "model": "gpt-5", "stop": ["x"] * 17},
        404,
        "unknown_model",
        "model",
    ),
    "top_p above one": ({"prompt": "a", "top_p": 1.5}, 400, "out_of_range", "top_p"),
    "n above the most": ({"prompt": "a", "n": 129}, 400, "too_many_choices", "n"),
    "too many stops": ({"prompt": "a", "stop": ["x"] * 17}, 400, "too_many_stops", "stop"),
    "empty stop": ({"prompt": "a", "stop": ""}, 400, "invalid_request", "stop"),
    "unknown token": ({"prompt": [1024]}, 400, "out_of_range", "prompt"),
    "unknown token, echoed": (
        {"prompt": [[1], [1024]], "echo": True},
        400,
        "out_of_range",
        "prompt",
    ),
    "long prompt": ({"prompt": [1] * 4096}, 400, "prompt_too_long", "prompt"),
    "best_of above n": ({"prompt": "a", "best_of": 2}, 400, "out_of_range", "best_of"),
    "few tokens": ({"prompt": "a", "max_tokens": -1}, 400, "out_of_range", "max_tokens"),
    "logprobs": ({"prompt": "a", "logprobs": 21}, 400, "out_of_range", "logprobs"),
    "timeout": ({"prompt": "a", "timeout_ms": 0}, 400, "out_of_range", "timeout_ms"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_errors_have_openai_format(address: str, name: str, is_stream: bool) -> None:
    body, status, code, param = REFUSED[name]
    if isinstance(body, dict):
        body = {**body, "stream": is_stream}
    answer = await ask(address, "/v1/completions", body)
    assert (answer.status, answer.error) == (status, (code, param)), answer.body
    assert (await ask(address, "/v1/completions", GREEDY)).status == 200


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"prompt": "a"}, ("unknown_field", "prompt")),
        ({"logprobs": 5}, ("invalid_request", "logprobs")),
    ],
)
async def test_chat_error_names_invalid_field(
    address: str, asked: dict[str, Any], error: Any
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **asked}
    assert (await ask(address, "/v1/chat/completions", body)).error == error


async def test_echo_decodes_nothing_for_rejected_prompts(
    parts: Cluster, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    tokenizer = parts.routers[0]._models.first.tokenizer
    monkeypatch.setattr(type(tokenizer), "decode", lambda _, ids: decoded.extend(ids) or "")
    for last in ([1] * 5000, [1024]):
        body = {"prompt": [[1], last], "echo": True, "max_tokens": 1}
        assert (await ask(address, "/v1/completions", body)).status == 400
    assert not decoded


async def test_unary_logprobs_are_bounded(address: str) -> None:
    body = {"prompt": ["a", "b"], "n": 128, "max_tokens": 256, "logprobs": 20}
    answer = await ask(address, "/v1/completions", body)
    assert (answer.status, answer.error) == (400, ("out_of_range", "logprobs"))
    assert b"stream" in answer.body


async def test_http_rejects_unknown_paths_methods_and_media_types(address: str) -> None:
    other = await get(address, "/v1/embeddings")
    assert (other.status, other.error[0]) == (404, "unknown_path")
    wrong = await get(address, "/v1/completions")
    assert (wrong.status, wrong.error[0]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    for headers in (
        {"content-type": "application/x-www-form-urlencoded"},
        {**JSON, "content-encoding": "gzip"},
    ):
        form = await ask(address, "/v1/completions", b"prompt=a", headers)
        assert (form.status, form.error[0]) == (415, "unsupported_media_type")


async def test_body_larger_than_limit_is_rejected(parts: Cluster) -> None:
    parts.router_config = replace(ROUTER, max_body_bytes=2000)
    address = (await parts.add_router()).http_address
    body = json.dumps({"prompt": "a" * 1900, "max_tokens": 1}).encode()
    assert (await ask(address, "/v1/completions", body)).status == 200
    large = await ask(address, "/v1/completions", {"prompt": "a" * 2000})
    assert (large.status, large.error[0]) == (413, "message_too_large")
    # The limit applies without a Content-Length, too.
    pieces = b"".join(b"400\r\n" + b"a" * 1024 + b"\r\n" for _ in range(3)) + b"0\r\n\r\n"
    async with streamed(address, "/v1/completions", None, {**JSON, "content-length": "0"}):
        pass
    reader, writer = await asyncio.open_connection(*address.split(":"))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + pieces)
    assert b"413" in await reader.readline()
    writer.close()


async def test_malformed_http_is_rejected(address: str) -> None:
    for hello in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(hello)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"400 Bad Request" in head
        assert json.loads(body)["error"]["code"] == "malformed_body"
        writer.close()
    assert (await get(address, "/health")).status == 200


async def test_headers_larger_than_limit_are_rejected(address: str) -> None:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"GET /health HTTP/1.1\r\n" + b"x: " + b"a" * (1 << 17))
    assert b"431" in await reader.readline()
    writer.close()


async def test_trailers_larger_than_limit_are_rejected(address: str) -> None:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"2\r\n{}\r\n0\r\n")
    with suppress(ConnectionError):
        for _ in range(1 << 10):
            writer.write(b"x: " + b"a" * (1 << 10) + b"\r\n")
            await writer.drain()
    with suppress(ConnectionError):
        assert b"431" in await reader.readline()
    writer.close()
    assert (await get(address, "/health")).status == 200


async def test_body_in_many_small_chunks_is_accepted(address: str) -> None:
    body = json.dumps({**GREEDY, "user": "u" * 20_000}).encode()
    reader, writer = await asyncio.open_connection(*address.split(":"))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert b"200" in await reader.readline()
    writer.close()


async def test_connection_without_complete_headers_times_out(
    parts: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_HEAD_TIMEOUT_S", 0.05)
    address = parts.routers[0].http_address
    for begin in (b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost:"):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(begin)
        assert await reader.read() == b""
        writer.close()


async def test_empty_line_after_an_answer_times_out(
    parts: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = parts.routers[0].http_address
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    assert b"200" in await reader.readline()
    monkeypatch.setattr(connection, "_HEAD_TIMEOUT_S", 0.05)
    writer.write(b"\r\n")
    async with asyncio.timeout(30.0):
        await reader.read()
    writer.close()


async def test_pipelined_requests_are_answered_in_order(address: str) -> None:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    request = b"GET %s HTTP/1.1\r\nHost: a\r\n%s\r\n"
    writer.write(request % (b"/health", b"") + request % (b"/nowhere", b"Connection: close\r\n"))
    answers = (await reader.read()).decode()
    assert answers.index("200 OK") < answers.index("404 Not Found")
    writer.close()


async def test_timeout_ms_ends_request_with_deadline_exceeded(address: str) -> None:
    body = {**GREEDY, "max_tokens": 4000, "timeout_ms": 50}
    answer = await ask(address, "/v1/completions", body)
    assert (answer.status, answer.error[0]) == (504, "deadline_exceeded")
    # Long enough for the first token even on a busy machine, and too short for 4000 steps.
    *_, error = await events(address, {**body, "timeout_ms": 5000})
    assert error.json["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_full_queue_returns_429_with_retry_after(is_stream: bool) -> None:
    async with cluster(workers=0, router_config=replace(ROUTER, max_queued=1)) as parts:
        address = parts.routers[0].http_address
        waiting = asyncio.create_task(ask(address, "/v1/completions", GREEDY))
        await until(lambda: parts.routers[0]._leader_client.queued)
        answer = await ask(address, "/v1/completions", {**GREEDY, "stream": is_stream})
        assert (answer.status, answer.error[0]) == (429, QueueFull.slug)
        assert answer.headers["retry-after"] in ("1", "2", "3")
        assert answer.json["error"]["type"] == "rate_limit_error"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_accepted", [0, 1], ids=["none accepted", "one accepted"])
async def test_rejected_prompts_leave_no_request_ids_in_ledger(
    is_stream: bool, num_accepted: int
) -> None:
    """All prompts can be sent again after a rejection by the gateway or the leader."""
    router = replace(ROUTER, max_queued=1 + num_accepted)
    async with cluster(workers=0, router_config=router) as parts:
        address = parts.routers[0].http_address
        waiting = asyncio.create_task(ask(address, "/v1/completions", GREEDY))
        await until(lambda: parts.routers[0]._leader_client.queued)
        body = {"prompt": [[1], [2], [3], [4]], "max_tokens": 3, "stream": is_stream}
        headers = {**JSON, "idempotency-key": "mine"}
        refused = await ask(address, "/v1/completions", body, headers)
        assert (refused.status, refused.error[0]) == (429, QueueFull.slug)
        for place in range(4):
            with pytest.raises(UnknownRequest):
                await parts.ledger.get(f"mine:{place}")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


class Keys:
    """Authenticator with two keys, one for inference and one for metrics."""

    def admit(self, headers: Mapping[str, str]) -> Caller:
        match headers.get("authorization", ""):
            case "Bearer infer":
                return Caller("acme", frozenset({Scope.INFER}))
            case "Bearer metrics":
                return Caller("", frozenset({Scope.METRICS}))
        raise Unauthenticated("no key that is known")


async def test_http_paths_require_their_scopes(parts: Cluster, address: str) -> None:
    app = parts.routers[0]._http._config.loaded_app
    for route in app.routes:
        route.endpoint._authenticator = Keys()

    async def status(method: str, path: str, key: str) -> int:
        headers = {**JSON, "authorization": f"Bearer {key}"}
        answer = await ask(address, path, GREEDY, headers, method)
        if answer.status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json["error"]["type"] == "authentication_error"
        return answer.status

    posts = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    for path in posts:
        assert [await status("POST", path, key) for key in ("", "metrics")] == [401, 403]
        assert await status("POST", path, "infer") in (200, 400)
    for path in ("/v1/models", "/v1/models/fake"):
        assert [await status("GET", path, key) for key in ("", "metrics", "infer")] == [
            *(401, 403, 200)
        ]
    for path in ("/metrics", "/load"):
        assert [await status("GET", path, key) for key in ("", "infer", "metrics")] == [
            *(401, 403, 200)
        ]
    for path in ("/health", "/ready", "/openapi.json", "/ping", "/version"):
        assert await status("GET", path, "") == 200


async def test_cors_allows_only_configured_origins(parts: Cluster) -> None:
    origin = {"origin": "https://chat.example.com"}
    plain = await get(parts.routers[0].http_address, "/health", origin)
    assert "access-control-allow-origin" not in plain.headers
    parts.router_config = replace(ROUTER, cors_origins=("https://chat.example.com",))
    address = (await parts.add_router()).http_address
    asked = {**origin, "access-control-request-method": "POST"}
    preflight = await ask(address, "/v1/completions", None, asked, "OPTIONS")
    assert preflight.status == 200
    allowed = await get(address, "/health", origin)
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example.com"
    other = await get(address, "/health", {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_http_front_can_be_disabled_and_rejects_used_port(
    parts: Cluster, address: str
) -> None:
    parts.router_config = replace(ROUTER, http_host="")
    assert (await parts.add_router()).http_address == ""
    taken = int(address.rpartition(":")[2])
    parts.router_config = replace(ROUTER, http_port=taken)
    with pytest.raises(OSError):
        await parts.add_router()


# disconnects and resumption


@pytest.mark.parametrize("is_stream", [False, True])
async def test_http_disconnect_cancels_request(is_stream: bool) -> None:
    slow = replace(WORKER, fake=FakeModel(step_time=0.01))
    async with cluster(workers=1, worker_config=slow) as parts:
        body = {**GREEDY, "max_tokens": 4000, "stream": is_stream}
        headers = {**JSON, "idempotency-key": "mine"}
        asking = asyncio.create_task(
            hang_up_after_first_event(parts.routers[0].http_address, body, headers)
        )
        async with asyncio.timeout(20):
            while not await busy(parts):
                await asyncio.sleep(0.01)
            if is_stream:
                await asking
            else:
                asking.cancel()
            while await busy(parts):
                await asyncio.sleep(0.01)
        assert (await parts.ledger.get("mine")).error_slug == "cancelled"


async def test_http_disconnect_with_pipelined_request_cancels_stream() -> None:
    slow = replace(WORKER, fake=FakeModel(step_time=0.01))
    async with cluster(workers=1, worker_config=slow) as parts:
        body = json.dumps({**GREEDY, "max_tokens": 4000, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nIdempotency-Key: mine\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        reader, writer = await asyncio.open_connection(*parts.routers[0].http_address.split(":"))
        writer.write(head + length + body + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"\n\n")
        writer.transport.abort()
        async with asyncio.timeout(20):
            while await busy(parts):
                await asyncio.sleep(0.01)
        assert (await parts.ledger.get("mine")).error_slug == "cancelled"


async def hang_up_after_first_event(address: str, body: Any, headers: Mapping[str, str]) -> str:
    """Close the connection after the first event, and return the event's id."""
    async with streamed(address, "/v1/completions", body, headers) as stream:
        async for event in stream.events():
            stream.hang_up()
            return event.id
    raise AssertionError("there was none")


@pytest.mark.parametrize("session", [{}, {"x-session-id": "talk"}])
@pytest.mark.parametrize("router", [0, 1])
async def test_stream_resumes_on_any_router(router: int, session: dict[str, str]) -> None:
    async with paced_cluster(routers=2) as parts:
        body = {"prompt": [[5], [6]], "n": 2, "temperature": 0, "max_tokens": 60}
        body |= {"on_disconnect": "grace", "stream": True}
        seen: list[Event] = []
        headers = {**JSON, **session}
        address = parts.routers[0].http_address
        async with streamed(address, "/v1/completions", body, headers) as stream:
            async for event in stream.events():
                seen.append(event)
                if len(seen) == 25:
                    stream.hang_up()
                    break
        headers |= {"last-event-id": seen[-1].id}
        *rest, done = await events(parts.routers[router].http_address, body, headers)
        assert done.data == "[DONE]"
        for choice in range(4):
            right = right_text(parts, [5 + choice // 2], 60)
            assert text_of([*seen, *rest], choice) == right
        # The last event is not repeated.
        assert rest[0].id not in {event.id for event in seen}
        assert rest[0].json["id"] == seen[0].json["id"]


@pytest.mark.parametrize("router", [0, 1])
async def test_resume_with_different_body_is_conflict(router: int) -> None:
    """Every router detects the conflict; ``on_disconnect`` belongs to the call and may differ."""
    async with paced_cluster(routers=2) as parts:
        body = {**GREEDY, "n": 3, "max_tokens": 4000, "stream": True}
        named = {**JSON, "idempotency-key": "mine"}
        first, address = (parts.routers[each].http_address for each in (0, router))
        async with streamed(first, "/v1/completions", body, named):
            for fields in ({"n": 1}, {"n": 4}, {"logprobs": 1}, {"prompt": [5]}, {"stop": "x"}):
                other = {**body, **fields}
                headers = {**JSON, "last-event-id": str(EventId("mine", [BEGIN] * other["n"]))}
                answer = await ask(address, "/v1/completions", other, headers)
                assert (answer.status, answer.error) == (409, ("request_conflict", None))
            headers = {**JSON, "last-event-id": str(EventId("mine", [BEGIN] * 3))}
            same = {**body, "on_disconnect": "grace"}
            async with streamed(address, "/v1/completions", same, headers) as again:
                assert again.status == 200


async def test_stream_for_plain_client_has_data_lines_only(address: str) -> None:
    """Many clients parse every line, or everything before an empty line, as JSON."""
    body = {**GREEDY, "stream": True}
    async with streamed(address, "/v1/completions", body, {**JSON, "accept": "*/*"}) as stream:
        *chunks, done, end = (await stream.rest()).decode().split("\n\n")
    assert chunks and all(json.loads(each.removeprefix("data: "))["choices"] for each in chunks)
    assert (done, end) == ("data: [DONE]", "")


async def test_last_event_id_must_be_valid(address: str) -> None:
    body = {**GREEDY, "stream": True}
    for last, status, code in (
        ("nonsense", 400, "invalid_request"),
        (str(EventId("unknown", [BEGIN])), 404, "unknown_request"),
        (str(EventId("r", [BEGIN, BEGIN])), 400, "invalid_request"),
    ):
        headers = {**JSON, "last-event-id": last}
        answer = await ask(address, "/v1/completions", body, headers)
        assert (answer.status, answer.error[0]) == (status, code)
    answer = await ask(address, "/v1/completions", GREEDY, {**JSON, "last-event-id": "r/0"})
    assert answer.error == ("invalid_request", "last-event-id")


async def test_resume_with_wrong_digest_is_data_loss(address: str) -> None:
    body = {**GREEDY, "max_tokens": 20, "stream": True}
    *seen, _ = await events(address, body, {**JSON, "idempotency-key": "mine"})
    had = EventId.parse(seen[3].id)
    [other] = [each._replace(digest=each.digest ^ 1) for each in had.positions]
    for positions, status in ((had.positions, 200), ([other], 500)):
        headers = {**JSON, "last-event-id": str(EventId("mine", positions))}
        answer = await ask(address, "/v1/completions", body, headers)
        assert answer.status == status
    assert answer.error == ("data_loss", None)
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.long
async def test_slow_http_reader_pauses_writes_within_bound() -> None:
    """The router writes no more than the connection takes, and answers other requests."""
    async with cluster(workers=1, worker_config=replace(WORKER, num_blocks=1024)) as parts:
        router = parts.routers[0]
        body = {**GREEDY, "n": 8, "max_tokens": 4000, "stream": True, "logprobs": 5}
        async with streamed(router.http_address, "/v1/completions", body) as stream:
            [served] = router._http._state.connections
            await until(lambda: served.flow.write_paused)
            held = served.transport.get_write_buffer_size()
            assert held < 1 << 20
            answer = await ask(router.http_address, "/v1/completions", GREEDY)
            assert answer.status == 200
            assert served.transport.get_write_buffer_size() == held
            *_, done = [event async for event in stream.events()]
            assert done.data == "[DONE]"


async def test_cancelled_stream_ends_with_error_event(parts: Cluster, address: str) -> None:
    [held] = parts.hold()
    body = {**GREEDY, "max_tokens": 4000, "stream": True}
    headers = {**JSON, "idempotency-key": "mine"}
    reading = asyncio.create_task(events(address, body, headers))
    await until(lambda: held.num_requests)
    held.let(5)
    async with AsyncClient(parts.address) as client:
        while not (await parts.ledger.get("mine")).num_tokens[0]:
            await asyncio.sleep(0.002)
        await client.cancel("mine")
    *chunks, error = await reading
    assert chunks and error.json["error"]["code"] == "cancelled"


async def test_stopping_router_lets_streams_resume_on_another() -> None:
    async with paced_cluster(routers=2) as parts:
        leaving, other = parts.routers
        body = {**GREEDY, "max_tokens": 100, "stream": True}
        seen: list[Event] = []
        stopping = None
        async with streamed(leaving.http_address, "/v1/completions", body) as stream:
            async for event in stream.events():
                seen.append(event)
                if stopping is None:
                    stopping = asyncio.create_task(leaving.stop())
        assert stopping is not None
        error = seen.pop()
        assert error.json["error"]["code"] == "router_stopping"
        await stopping
        parts.routers.remove(leaving)
        headers = {**JSON, "last-event-id": error.id}
        *rest, _ = await events(other.http_address, body, headers)
        assert text_of([*seen, *rest]) == right_text(parts, PROMPT, 100)
