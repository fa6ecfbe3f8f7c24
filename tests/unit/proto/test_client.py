"""The client against the fake router, over gRPC and without a socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

import everlift
from everlift import (
    AsyncClient,
    Cancelled,
    Chunk,
    Client,
    DataLoss,
    DeadlineExceeded,
    EmptyPrompt,
    EverliftError,
    FinishReason,
    GenerateOptions,
    LedgerUnavailable,
    NotUtf8,
    OnDisconnect,
    OutOfRange,
    QueueFull,
    RequestConflict,
    RouterStopping,
    Stream,
    UnknownModel,
    UnknownRequest,
    Unreachable,
    errors,
)
from everlift.messages import Submission
from everlift.sampling import SamplingParams, TokenLogprobs
from everlift.testing import (
    Break,
    BreakOff,
    FakeRouter,
    Fault,
    Hold,
    Output,
    Overlap,
    Refuse,
    Repeat,
    Skip,
)
from everlift.v1 import admin_pb2
from everlift.v1 import inference_pb2 as pb
from tests.support.free_port import free_port
from tests.support.router.wires import WIRES, Wire

PROMPT = "zero one two three four"
TEXT = PROMPT
CHUNKS = [
    Chunk(0, (0,), "zero", 1, False),
    Chunk(1, (1,), " one", 1, False),
    Chunk(2, (2,), " two", 1, False),
    Chunk(3, (3,), " three", 1, False),
    Chunk(4, (4,), " four", 1, False),
]


@pytest.fixture(params=WIRES, ids=["grpc", "memory"])
def wire(request: pytest.FixtureRequest) -> Wire:
    made: Wire = request.param()
    return made


async def chunks(
    wire: Wire, *faults: Fault | None, reconnect_s: float = 5.0
) -> tuple[list[Chunk], list[str]]:
    """Return a stream's chunks under a script of faults, and the calls that it made."""
    async with wire.router(faults=faults) as router:
        async with wire.client(router, reconnect_s=reconnect_s) as client:
            got = [chunk async for chunk in client.generate(PROMPT)]
        return got, router.calls


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_stream_yields_each_token_with_text_once(wire: Wire) -> None:
    assert await chunks(wire) == (CHUNKS, ["Generate"])


async def test_stream_has_reason_usage_and_timing_after_last_chunk(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        stream = client.generate(PROMPT, max_tokens=3)
        assert (stream.finish_reason, stream.usage, stream.timing) == (None, None, None)
        assert await stream.text() == "zero one two"
        assert stream.finish_reason is FinishReason.LENGTH
        assert stream.usage is not None
        assert stream.usage.output_tokens == 3
        assert stream.timing is not None
        assert stream.timing.attempts == 1
        assert await stream.text() == ""


@pytest.mark.parametrize("fault", [Break, BreakOff])
@pytest.mark.parametrize("offset", range(6))
async def test_stream_resumes_at_offset_of_break(
    wire: Wire, offset: int, fault: type[Break] | type[BreakOff]
) -> None:
    assert await chunks(wire, fault(offset)) == (CHUNKS, ["Generate", f"Attach {offset}"])


async def test_stream_survives_break_before_every_token(wire: Wire) -> None:
    got, calls = await chunks(wire, *(Break(offset) for offset in range(6)))
    assert got == CHUNKS
    assert calls == ["Generate"] + [f"Attach {offset}" for offset in range(6)]


async def test_stream_tail_text_survives_break(wire: Wire) -> None:
    def answer(submission: Submission) -> Output:
        return Output(((7, "a"), (8, "")), tail="b")

    async with wire.router(answer, [Break(2)]) as router, wire.client(router) as client:
        got = [chunk async for chunk in client.generate("x")]
    assert got == [
        Chunk(0, (7,), "a", 1, False),
        Chunk(1, (8,), "", 1, False),
        Chunk(2, (), "b", 1, False),
    ]


@pytest.mark.parametrize("offset", range(5))
async def test_stream_drops_repeated_piece(wire: Wire, offset: int) -> None:
    assert await chunks(wire, Repeat(offset)) == (CHUNKS, ["Generate"])


@pytest.mark.parametrize("offset", range(4))
async def test_stream_reattaches_after_overlapping_piece(wire: Wire, offset: int) -> None:
    assert await chunks(wire, Overlap(offset)) == (CHUNKS, ["Generate", f"Attach {offset + 1}"])


async def test_stream_gap_raises_data_loss(wire: Wire) -> None:
    with pytest.raises(DataLoss, match="offsets 2 to 2"):
        await chunks(wire, Skip(2))


@pytest.mark.parametrize("error", [RouterStopping, LedgerUnavailable])
async def test_stream_retries_temporarily_unavailable_router(
    wire: Wire, error: type[EverliftError]
) -> None:
    assert await chunks(wire, Refuse(error())) == (CHUNKS, ["Generate", "Generate"])
    got = await chunks(wire, Break(2), Refuse(error()))
    assert got == (CHUNKS, ["Generate", "Attach 2", "Attach 2"])


async def test_stream_of_lost_request_raises_data_loss(wire: Wire) -> None:
    with pytest.raises(DataLoss, match="lost a request that it had accepted"):
        await chunks(wire, Break(2), Refuse(UnknownRequest()))


async def test_client_raises_each_error_type_with_its_message(wire: Wire) -> None:
    final = [e for e in errors.BY_SLUG.values() if e.grpc_status != "UNAVAILABLE"]
    assert len(final) > 12
    async with wire.router(faults=[Refuse(e(f"why {e.slug}")) for e in final]) as router:
        async with wire.client(router, retry_s=0) as client:
            for error in final:
                with pytest.raises(error, match=f"why {error.slug}") as caught:
                    await client.generate(PROMPT).text()
                assert type(caught.value) is error


async def test_client_error_carries_retry_after(wire: Wire) -> None:
    async with wire.router(faults=[Refuse(QueueFull(retry_after_s=1.5))]) as router:
        async with wire.client(router, retry_s=1.4) as client:
            with pytest.raises(QueueFull) as caught:
                await client.generate(PROMPT).text()
    assert caught.value.retry_after_s == 1.5


async def test_stream_ends_after_error(wire: Wire) -> None:
    async with wire.router(faults=[Refuse(EmptyPrompt())]) as router:
        async with wire.client(router) as client:
            async with client.generate(PROMPT) as stream:
                with pytest.raises(EmptyPrompt):
                    await anext(stream)
                assert await stream.text() == ""
    assert router.calls == ["Generate"]


async def test_client_gives_up_on_silent_router_after_reconnect_s() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}", reconnect_s=0.3) as client:
        with pytest.raises(Unreachable):
            await client.generate(PROMPT).text()
        with pytest.raises(Unreachable):
            await client.status()


async def test_deadline_ends_search_for_router() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(DeadlineExceeded, match="no router answered"):
            await client.generate(PROMPT, timeout_s=0.3).text()


async def test_deadline_ends_stalled_stream(wire: Wire) -> None:
    async with wire.router(faults=[Hold(2)]) as router, wire.client(router) as client:
        stream = client.generate(PROMPT, timeout_s=0.3)
        assert (await anext(stream), await anext(stream)) == (CHUNKS[0], CHUNKS[1])
        with pytest.raises(DeadlineExceeded):
            await anext(stream)


async def test_stream_resumes_after_router_restart(wire: Wire) -> None:
    async with wire.router(faults=[Hold(2)]) as router, wire.client(router) as client:
        stream = client.generate(PROMPT)
        got = [await anext(stream), await anext(stream)]
        await router.stop()
        rest = asyncio.create_task(stream.text())
        await router.start()
        assert await rest == " two three four"
        assert got == CHUNKS[:2]


async def test_client_fails_over_from_stopped_router() -> None:
    async with FakeRouter() as router:
        targets = [f"127.0.0.1:{free_port()}", router.address]
        async with AsyncClient(targets) as client:
            assert await client.generate(PROMPT).text() == TEXT
        async with AsyncClient(targets) as client:
            assert (await client.status()).completed == 1


async def test_client_fails_over_from_frozen_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frozen router's kernel still accepts connections."""
    monkeypatch.setattr(everlift.client.client, "_TRY_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        async with FakeRouter() as router:
            targets = [f"127.0.0.1:{frozen.getsockname()[1]}", router.address]
            async with AsyncClient(targets) as client:
                assert (await client.status()).completed == 0
            async with AsyncClient(targets[0], retry_s=0) as client:
                with pytest.raises(Unreachable, match="no answer within"):
                    await client.status()


async def test_client_waits_long_for_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may download the adapter first, which takes longer than other calls."""
    monkeypatch.setattr(everlift.client.client, "_TRY_TIMEOUT_S", 0.2)

    class SlowRouter(FakeRouter):
        async def LoadAdapter(self, *arguments: Any) -> admin_pb2.LoadAdapterResponse:
            await asyncio.sleep(0.6)
            return await super().LoadAdapter(*arguments)

    async with SlowRouter() as router, AsyncClient(router.address) as client:
        assert (await client.load_adapter("sql", "org/sql")).name == "sql"
        assert router.calls.count("LoadAdapter") == 1


async def test_stream_close_cancels_request(wire: Wire) -> None:
    async with wire.router(faults=[Hold(2)]) as router, wire.client(router) as client:
        async with client.generate(PROMPT) as stream:
            await anext(stream)
        assert router.requests[stream.request_id].state == pb.REQUEST_STATE_CANCELLED


async def test_stream_task_cancellation_cancels_request(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1)]) as router, wire.client(router) as client:
        stream = client.generate(PROMPT)

        async def work() -> None:
            async with stream:
                await stream.text()

        task = asyncio.create_task(work())
        await until(lambda: bool(router.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert router.requests[stream.request_id].state == pb.REQUEST_STATE_CANCELLED


async def test_stream_close_after_end_makes_no_call(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        async with client.generate(PROMPT) as stream:
            await stream.text()
        assert router.calls == ["Generate"]


async def test_stream_close_without_router_does_not_fail() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}") as client:
        stream = client.generate(PROMPT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.02)
        await stream.aclose()


async def test_unread_stream_close_cancels_no_other_request(wire: Wire) -> None:
    async with wire.router(faults=[Hold(2)]) as router, wire.client(router) as client:
        other = client.generate(PROMPT, request_id="job")
        await anext(other)
        async with client.generate(PROMPT, request_id="job"):
            pass
        assert router.requests["job"].state == pb.REQUEST_STATE_RUNNING
        assert router.calls == ["Generate"]


async def test_attached_stream_close_does_not_cancel_request(wire: Wire) -> None:
    async with wire.router(faults=[Hold(2), Hold(2)]) as router:
        async with wire.client(router) as client:
            owner = client.generate(PROMPT)
            await anext(owner)
            async with client.attach(owner.request_id) as stream:
                assert await anext(stream) == CHUNKS[0]
            assert "Cancel" not in router.calls
            await owner.aclose()


async def test_client_close_breaks_streams_without_cancelling(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1)]) as router:
        client = wire.client(router)
        stream = client.generate(PROMPT)
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Unreachable):
            await waiting
        await stream.aclose()
        with pytest.raises(Unreachable, match="the client is closed"):
            await client.status()
        assert router.calls == ["Generate"]


ABC = (
    Output(((1, "a"), (2, "b"), (3, "c")), tail="!"),
    Output(((4, "x"),), tail="?"),
    Output(((5, "k"), (6, "l"))),
)


async def choices(wire: Wire, *faults: Fault | None) -> tuple[list[str], Stream, list[str]]:
    """Return the texts of three choices under a script of faults, their stream and its calls."""
    async with wire.router(lambda _: ABC, faults) as router:
        async with wire.client(router, reconnect_s=5.0) as client:
            stream = client.generate(PROMPT, n=3)
            return await stream.texts(), stream, router.calls


async def test_stream_separates_choices(wire: Wire) -> None:
    texts, stream, calls = await choices(wire)
    assert texts == ["abc!", "x?", "kl"]
    assert stream.finish_reasons == dict.fromkeys(range(3), FinishReason.STOP)
    assert stream.finish_reason is FinishReason.STOP
    assert stream.usage is not None
    assert stream.usage.output_tokens == 6
    assert calls == ["Generate"]


@pytest.mark.parametrize("fault", [Break, BreakOff])
@pytest.mark.parametrize(
    ("choice", "offset", "attach"),
    [
        (0, 0, "Attach 0"),
        (2, 0, "Attach 1 1"),
        (1, 1, "Attach 2 1 1"),
        (0, 2, "Attach 2 1 2"),
        (2, 2, "Attach 3 1 2"),
        (0, 3, "Attach 3 1 2"),
    ],
)
async def test_stream_resumes_each_choice_at_its_offset(
    wire: Wire, fault: type[Break] | type[BreakOff], choice: int, offset: int, attach: str
) -> None:
    texts, stream, calls = await choices(wire, fault(offset, choice))
    assert texts == ["abc!", "x?", "kl"]
    assert len(stream.finish_reasons) == 3
    assert calls == ["Generate", attach]


async def test_stream_fault_of_one_choice_leaves_others_intact(wire: Wire) -> None:
    assert (await choices(wire, Repeat(1, choice=2)))[0] == ["abc!", "x?", "kl"]
    texts, _, calls = await choices(wire, Overlap(0, choice=2))
    assert (texts, calls) == (["abc!", "x?", "kl"], ["Generate", "Attach 2 1 1"])
    with pytest.raises(DataLoss, match="offsets 0 to 0"):
        await choices(wire, Skip(0, choice=2))


async def test_attach_takes_one_offset_per_choice(wire: Wire) -> None:
    async with wire.router(lambda _: ABC) as router, wire.client(router) as client:
        request_id = client.generate(PROMPT, n=3).request_id
        await client.generate(PROMPT, n=3, request_id=request_id).text()
        for offsets, texts in [
            (2, ["c!", "x?", "kl"]),
            ([1], ["bc!", "x?", "kl"]),
            ([3, 1, 2], ["!", "?", ""]),
            ([], ["abc!", "x?", "kl"]),
        ]:
            assert await client.attach(request_id, offsets).texts() == texts
        assert await client.attach(request_id).text() == "abc!"
        with pytest.raises(everlift.OffsetOutOfRange):
            await client.attach(request_id, [0, 0, 0, 0]).text()


async def test_chunks_carry_logprobs_of_their_tokens(wire: Wire) -> None:
    logprobs = tuple(TokenLogprobs(-float(at), at + 1, ((7, -0.5),)) for at in range(3))
    output = Output(((1, "a"), (2, "b"), (3, "c")), logprobs=logprobs, prompt_logprobs=logprobs[:2])
    async with wire.router(lambda _: output, [Break(1), Break(2)]) as router:
        async with wire.client(router) as client:
            stream = client.generate(PROMPT, logprobs=1, prompt_logprobs=1)
            got = [chunk async for chunk in stream]
    assert [chunk.logprobs for chunk in got] == [(it,) for it in logprobs]
    assert stream.prompt_logprobs == logprobs[:2]


async def test_attach_accepts_any_offset(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        stream = client.generate(PROMPT)
        await stream.text()
        for offset in range(6):
            got = [chunk async for chunk in client.attach(stream.request_id, offset)]
            assert got == CHUNKS[offset:]


async def test_attach_continues_after_received_tokens(wire: Wire) -> None:
    async with wire.router(lambda _: ABC) as router, wire.client(router) as client:
        request_id = client.generate(PROMPT, n=3).request_id
        stream = client.generate(PROMPT, n=3, request_id=request_id)
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for chunk in stream:
            tokens[chunk.choice] += chunk.token_ids
        received = [tokens[0][:1], tokens[1][:0], tokens[2][:2]]
        rest = await client.attach(request_id, received=received).texts()
        assert rest == await client.attach(request_id, [1, 0, 2]).texts()
        # Different tokens, or more than exist, are data loss.
        for received in ([[*tokens[0][:1], 999]], [[*tokens[0], 5, 5, 5]]):
            with pytest.raises(everlift.DataLoss):
                await client.attach(request_id, received=received).text()
        with pytest.raises(everlift.InvalidRequest, match="give either received or from_offset"):
            client.attach(request_id, 1, received=[[1]])


async def test_stream_is_readable_after_read_timeout(wire: Wire) -> None:
    async with wire.router(faults=[Hold(2)]) as router, wire.client(router) as client:
        stream = client.generate(PROMPT)
        got = [await anext(stream), await anext(stream)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.1)
        assert got + [chunk async for chunk in stream] == CHUNKS


async def test_stream_read_timeout_is_no_router_failure(wire: Wire) -> None:
    """Retries are disabled, so the first failure would end the stream."""
    async with wire.router(faults=[Hold(0)] * 3) as router:
        async with wire.client(router, reconnect_s=0) as client:
            stream = client.generate(PROMPT)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.05)
            assert await stream.text() == TEXT


async def test_stream_short_reads_end_failure_series(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everlift.client.output_reader, "_STEADY_S", 0.15)
    faults = [Break(0), *[Hold(0)] * 8, Break(0)]
    async with wire.router(faults=faults) as router:
        async with wire.client(router, reconnect_s=0.3) as client:
            stream = client.generate(PROMPT)
            while len(router.calls) < 9:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.06)
            assert await stream.text() == TEXT


async def test_stream_reattaches_with_explain() -> None:
    asked: list[bool] = []

    class Router(FakeRouter):
        async def Attach(
            self, request: pb.AttachRequest, context: Any
        ) -> AsyncIterator[pb.GenerateResponse]:
            asked.append(request.explain)
            async for piece in super().Attach(request, context):
                yield piece

    async with Router(faults=[Break(2), None, Break(2)]) as router:
        async with AsyncClient(router.address) as client:
            assert await client.generate(PROMPT, explain=True).text() == TEXT
            assert await client.generate(PROMPT).text() == TEXT
    assert asked == [True, False]


async def test_request_id_is_idempotent_and_conflicts_on_other_body(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        assert await client.generate(PROMPT, request_id="a").text() == TEXT
        assert await client.generate(PROMPT, request_id="a", timeout_s=9).text() == TEXT
        with pytest.raises(RequestConflict):
            await client.generate("another", request_id="a").text()


async def test_client_gets_and_cancels_requests_by_id(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        await client.generate(PROMPT, request_id="a").text()
        known = await client.get_request("a")
        assert (known.state, known.output_tokens) == (pb.REQUEST_STATE_FINISHED, 5)
        assert (await client.cancel("a")).state == pb.REQUEST_STATE_FINISHED
        calls: list[Awaitable[object]] = [client.get_request("b"), client.cancel("b")]
        for call in calls:
            with pytest.raises(UnknownRequest):
                await call


async def test_cancel_ends_streams_with_cancelled(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1)]) as router, wire.client(router) as client:
        stream = client.generate(PROMPT)
        await anext(stream)
        await client.cancel(stream.request_id)
        with pytest.raises(Cancelled):
            await anext(stream)


async def test_generate_options_reach_router(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        stream = client.generate(
            [5, 6],
            max_tokens=1,
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            min_p=0.125,
            seed=9,
            stop="END",
            stop_token_ids=[4],
            ignore_eos=True,
            model="m",
            request_id="r",
            on_disconnect=OnDisconnect.CONTINUE,
            timeout_s=60.0,
        )
        await stream.text()
        got = router.requests["r"].submission
    sampling = got.sampling
    assert (got.prompt, got.max_tokens, got.stop, got.stop_token_ids) == ((5, 6), 1, ("END",), (4,))
    assert (got.ignore_eos, got.model) == (True, "m")
    assert got.on_disconnect is OnDisconnect.CONTINUE
    assert got.timeout_s == pytest.approx(60, abs=5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.min_p, sampling.seed) == (0.125, 9)


async def test_choice_and_logit_options_reach_router(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        stream = client.generate(
            PROMPT,
            n=3,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias={7: -100.0, 2: 0.5},
            min_tokens=2,
            include_stop=True,
            logprobs=0,
            prompt_logprobs=4,
            cache_salt="mine",
            session_id="chat",
            request_id="r",
        )
        await stream.texts()
        got = router.requests["r"].submission
    assert (got.n, got.include_stop, got.cache_salt) == (3, True, "mine")
    assert got.session_id == "chat"
    assert got.sampling == SamplingParams(
        seed=got.sampling.seed,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((2, 0.5), (7, -100.0)),
        min_tokens=2,
        logprobs=0,
        prompt_logprobs=4,
    )


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"json_schema": {"type": "object"}}, ("json_schema", ('{"type": "object"}',))),
        ({"json_schema": "{}"}, ("json_schema", ("{}",))),
        ({"regex": "a+"}, ("regex", ("a+",))),
        ({"ebnf": 'root ::= "a"'}, ("ebnf", ('root ::= "a"',))),
        ({"choice": ["yes", "no"]}, ("choice", ("yes", "no"))),
        ({"choice": "yes"}, ("choice", ("yes",))),
    ],
)
async def test_grammar_options_reach_router(
    wire: Wire, option: GenerateOptions, expected: tuple[str, tuple[str, ...]]
) -> None:
    async with wire.router() as router, wire.client(router) as client:
        await client.generate(PROMPT, request_id="r", **option).text()
        grammar = router.requests["r"].submission.sampling.grammar
    assert grammar is not None
    assert (grammar.kind.value, grammar.texts) == expected


async def test_client_requests_default_to_disconnect_grace(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        await client.generate(PROMPT, request_id="r").text()
        assert router.requests["r"].submission.on_disconnect is OnDisconnect.GRACE


async def test_generate_rejects_invalid_arguments() -> None:
    client = AsyncClient("127.0.0.1:1")
    with pytest.raises(OutOfRange):
        client.generate("x", max_tokens=-1)
    with pytest.raises(OutOfRange):
        client.generate([1 << 40])
    with pytest.raises(OutOfRange):
        client.generate("x", timeout_s=float("inf"))
    with pytest.raises(NotUtf8):
        client.generate("\ud800")
    with pytest.raises(everlift.InvalidRequest, match="request_id"):
        client.generate("x", request_id="no spaces")
    with pytest.raises(everlift.InvalidRequest, match="only one of regex and choice"):
        client.generate("x", regex="a", choice=["b"])
    with pytest.raises(OutOfRange):
        client.generate("x", logit_bias={-1: 0.5})
    with pytest.raises(everlift.InvalidRequest, match="session_id must be a string"):
        client.generate("x", session_id=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_token"):
        client.generate("x", max_token=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="not bytes"):
        client.generate(b"x")
    with pytest.raises(ValueError, match="at least one"):
        AsyncClient([])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda client: client.cancel("\udcff"), NotUtf8),
        (lambda client: client.forget("\udcff"), NotUtf8),
        (lambda client: client.get_request("\udcff"), NotUtf8),
        (lambda client: client.explain("\udcff"), NotUtf8),
        (lambda client: client.list_requests(tenant="\udcff"), NotUtf8),
        (lambda client: client.list_requests(page_size=1 << 40), OutOfRange),
        (lambda client: client.tokenize("\udcff"), NotUtf8),
        (lambda client: client.detokenize([1 << 40]), OutOfRange),
        (lambda client: client.drain("\udcff"), NotUtf8),
        (lambda client: client.set_policy(max_queued=1 << 70), OutOfRange),
        (lambda client: client.attach("r", 1 << 70).text(), OutOfRange),
        (lambda client: client.attach("r", received=[[1 << 40]]).text(), OutOfRange),
    ],
)
async def test_client_rejects_unencodable_values_without_a_call(
    wire: Wire, call: Callable[[AsyncClient], Awaitable[object]], error: type[Exception]
) -> None:
    async with wire.router() as router:
        async with wire.client(router) as client:
            with pytest.raises(error):
                await call(client)
        assert router.calls == []


async def test_blocking_client_streams_attaches_and_cancels(wire: Wire) -> None:
    def work(client: Client) -> None:
        with client:
            stream = client.generate(PROMPT, request_id="a")
            assert stream.request_id == "a"
            assert list(stream) == CHUNKS
            assert stream.finish_reason is FinishReason.STOP
            assert stream.usage is not None
            assert stream.timing is not None
            assert stream.finish_reasons == {0: FinishReason.STOP}
            assert stream.prompt_logprobs == ()
            assert client.attach("a", 3).text() == " three four"
            first = [token for chunk in CHUNKS[:3] for token in chunk.token_ids]
            assert client.attach("a", received=[first]).text() == " three four"
            assert client.generate("x y", n=2).texts() == ["x y", "x y"]
            assert client.get_request("a").output_tokens == 5
            assert client.cancel("a").state == pb.REQUEST_STATE_FINISHED
            assert client.status().completed == 2
            with pytest.raises(UnknownRequest):
                client.attach("b").text()
        client.close()

    async with wire.router(faults=[Break(2)]) as router:
        await asyncio.to_thread(work, wire.blocking(router))


async def test_blocking_stream_exit_cancels_request(wire: Wire) -> None:
    def work(client: Client) -> None:
        with client, client.generate(PROMPT, request_id="a") as stream:
            assert next(stream) == CHUNKS[0]

    async with wire.router(faults=[Hold(2)]) as router:
        await asyncio.to_thread(work, wire.blocking(router))
        assert router.requests["a"].state == pb.REQUEST_STATE_CANCELLED


async def test_blocking_client_close_makes_calls_unreachable(wire: Wire) -> None:
    def work(client: Client) -> None:
        stream, many = client.generate(PROMPT), client.generate_many([PROMPT])
        next(stream)
        next(many)
        client.close()
        unsent = client.generate(PROMPT)
        calls: list[Callable[[], object]] = [
            client.status,
            lambda: client.cancel("a"),
            lambda: next(stream),
            stream.text,
            lambda: next(many),
            many.texts,
            unsent.text,
        ]
        for call in calls:
            with pytest.raises(Unreachable, match="the client is closed"):
                call()
        for opened in (stream, many, unsent):
            opened.close()
        client.close()

    async with wire.router(faults=[Hold(1), Hold(1)]) as router:
        await asyncio.to_thread(work, wire.blocking(router))


async def test_blocking_client_close_ends_calls_of_other_threads(wire: Wire) -> None:
    """The call waits for a retry that is due long after the client is closed."""
    full = QueueFull("full", retry_after_s=5.0)
    async with wire.router(faults=[Refuse(full)]) as router:
        client = wire.blocking(router)
        stream = client.generate(PROMPT)
        reading = asyncio.create_task(asyncio.to_thread(stream.text))
        await until(lambda: router.calls == ["Generate"])
        await asyncio.sleep(0.1)
        await asyncio.to_thread(client.close)
        async with asyncio.timeout(3):
            with pytest.raises(Unreachable, match="the client is closed"):
                await reading


@pytest.mark.parametrize(("offset", "word"), [(2, "two"), (5, "none")])
async def test_stream_raises_data_loss_for_diverged_tokens(
    wire: Wire, offset: int, word: str
) -> None:
    """The router has regenerated lost tokens, of which one differs or is missing."""
    async with wire.router(faults=[Break(offset)]) as router:
        async with wire.client(router) as client:
            stream = client.generate(PROMPT)
            for _ in range(offset):
                await anext(stream)
            known = router.requests[stream.request_id]
            tokens = known.outputs[0].tokens
            other = tuple((token + (token == 1), text) for token, text in tokens[: offset + 1])
            known.outputs = (Output(other[:-1] if word == "none" else other),)
            with pytest.raises(DataLoss, match=f"choice 0 cannot be continued at offset {offset}"):
                await anext(stream)


async def test_attach_at_offset_needs_no_earlier_tokens(wire: Wire) -> None:
    async with wire.router(faults=[None, Break(4)]) as router:
        async with wire.client(router) as client:
            await client.generate(PROMPT, request_id="r").text()
            assert await client.attach("r", from_offset=3).text() == " three four"
            assert router.calls == ["Generate", "Attach 3", "Attach 4"]


async def test_forget_removes_request(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        await client.generate(PROMPT, request_id="r").text()
        await client.forget("r")
        for ask in (client.forget, client.get_request, client.cancel):
            with pytest.raises(UnknownRequest):
                await ask("r")


class LosesAnswers(FakeRouter):
    """Router that loses its first answer to each call that removes an object."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = set[str]()

    async def Forget(self, request: pb.ForgetRequest, context: Any) -> pb.ForgetResponse:
        return await self._lose_first("Forget", await super().Forget(request, context), context)

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: Any
    ) -> admin_pb2.UnloadAdapterResponse:
        answer = await super().UnloadAdapter(request, context)
        return await self._lose_first("UnloadAdapter", answer, context)

    async def _lose_first(self, call: str, answer: Any, context: Any) -> Any:
        if call not in self._lost:
            self._lost.add(call)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        return answer


async def test_client_removal_succeeds_if_its_answer_is_lost() -> None:
    async with LosesAnswers() as router, AsyncClient(router.address) as client:
        await client.load_adapter("sql", "org/sql")
        await client.unload_adapter("sql")
        with pytest.raises(UnknownModel):
            await client.unload_adapter("sql")
        await client.generate(PROMPT, request_id="r").text()
        await client.forget("r")
        with pytest.raises(UnknownRequest):
            await client.forget("r")
    assert router.calls.count("UnloadAdapter") == router.calls.count("Forget") == 3


async def test_client_deadline_starts_at_first_call(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        stream = client.generate(PROMPT, timeout_s=9.0)
        await asyncio.sleep(0.05)
        assert await stream.text() == TEXT
    assert router.requests[stream.request_id].submission.timeout_s == pytest.approx(9, abs=0.02)
