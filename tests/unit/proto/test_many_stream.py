"""Many requests at once, over gRPC and without a socket."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from everlift import (
    AsyncClient,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    EmptyPrompt,
    EngineFailed,
    FinishReason,
    InvalidRequest,
    ManyStream,
    MessageTooLarge,
    NotUtf8,
    QueueFull,
    RequestConflict,
    RouterStopping,
    Unauthenticated,
    UnknownRequest,
    Unreachable,
)
from everlift.messages import Submission
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
from everlift.v1 import inference_pb2 as pb
from tests.support.router.wires import WIRES, GrpcWire, Wire

PROMPTS = ["a b c", "d", "e f"]


@pytest.fixture(params=WIRES, ids=["grpc", "memory"])
def wire(request: pytest.FixtureRequest) -> Wire:
    made: Wire = request.param()
    return made


async def texts(wire: Wire, *faults: Fault | None) -> tuple[list[object], list[str]]:
    """Return the prompts' results under a script of faults, and the calls that were made."""
    async with wire.router(faults=faults) as router:
        async with wire.client(router, reconnect_s=5.0) as client:
            got = await client.generate_many(PROMPTS, request_id="r").texts()
        return list(got), router.calls


async def by_index(stream: ManyStream) -> dict[int, list[tuple[int, str]]]:
    got: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    async for index, chunk in stream:
        got[index].append((chunk.offset, chunk.text))
    return got


async def test_generate_many_sends_one_request_per_prompt_in_one_call(wire: Wire) -> None:
    assert await texts(wire) == (PROMPTS, ["GenerateMany 3"])
    async with wire.router() as router, wire.client(router) as client:
        stream = client.generate_many(PROMPTS, max_tokens=2)
        assert await by_index(stream) == {
            0: [(0, "a"), (1, " b")],
            1: [(0, "d")],
            2: [(0, "e"), (1, " f")],
        }
    assert len(set(stream.request_ids)) == 3
    assert set(router.requests) == set(stream.request_ids)
    assert stream.outcomes[0].finish_reasons == {0: FinishReason.LENGTH}
    assert stream.outcomes[1].finish_reasons == {0: FinishReason.STOP}
    usage = stream.outcomes[2].usage
    assert usage is not None and usage.output_tokens == 2


async def test_generate_many_without_prompts_makes_no_call(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        assert await client.generate_many([]).texts() == []
    assert router.calls == []


async def test_generate_many_separates_choices(wire: Wire) -> None:
    async with wire.router(faults=[Break(1, choice=1, index=1)]) as router:
        async with wire.client(router) as client:
            stream = client.generate_many(["a b", "c d"], n=2)
            got: defaultdict[tuple[int, int], str] = defaultdict(str)
            async for index, chunk in stream:
                got[index, chunk.choice] += chunk.text
    assert got == {(0, 0): "a b", (0, 1): "a b", (1, 0): "c d", (1, 1): "c d"}
    assert stream.outcomes[1].finish_reasons.keys() == {0, 1}


@pytest.mark.parametrize("fault", [Break, BreakOff])
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("offset", range(4))
async def test_generate_many_survives_break_at_any_offset(
    wire: Wire, fault: type[Break] | type[BreakOff], index: int, offset: int
) -> None:
    got, calls = await texts(wire, fault(offset, index=index))
    assert got == PROMPTS
    assert calls[0] == "GenerateMany 3"
    assert all(call.startswith("Attach") for call in calls[1:])


async def test_generate_many_reattaches_each_request_after_break(wire: Wire) -> None:
    got, calls = await texts(wire, Break(2), Break(2))
    assert got == PROMPTS
    # The first Attach breaks again.
    assert calls[0] == "GenerateMany 3"
    assert sorted(calls[1:]) in (
        ["Attach 2", "Attach 2", "Attach 2"],
        ["Attach 2", "Attach 2"],
    )


async def test_generate_many_refused_request_leaves_others_intact(wire: Wire) -> None:
    got, calls = await texts(wire, Refuse(EngineFailed("no luck"), index=1))
    assert calls == ["GenerateMany 3"]
    assert (got[0], got[2]) == ("a b c", "e f")
    assert isinstance(got[1], EngineFailed)
    assert str(got[1]) == "no luck"


async def test_generate_many_retries_refused_call_as_a_whole(wire: Wire) -> None:
    assert await texts(wire, Refuse(RouterStopping())) == (PROMPTS, ["GenerateMany 3"] * 2)
    full = QueueFull(retry_after_s=0.01)
    assert await texts(wire, Refuse(full)) == (PROMPTS, ["GenerateMany 3"] * 2)


async def test_generate_many_retries_queue_full_request_under_its_id(wire: Wire) -> None:
    full = Refuse(QueueFull(retry_after_s=0.01), index=2)
    assert await texts(wire, full) == (PROMPTS, ["GenerateMany 3", "Generate"])


async def test_generate_many_accepted_request_is_not_resubmitted(wire: Wire) -> None:
    got, calls = await texts(wire, Break(1, index=0), *[Refuse(QueueFull())] * 3)
    assert calls == ["GenerateMany 3", *calls[1:4]]
    assert [type(each) for each in got if not isinstance(each, str)] == [QueueFull] * 3


async def test_generate_many_call_refusal_fails_every_request(wire: Wire) -> None:
    got, calls = await texts(wire, Refuse(Unauthenticated("who?")))
    assert [type(each) for each in got] == [Unauthenticated] * 3
    assert calls == ["GenerateMany 3"]


async def test_generate_many_halves_call_that_is_too_large(wire: Wire) -> None:
    got, calls = await texts(wire, Refuse(MessageTooLarge()))
    assert got == PROMPTS
    assert (calls[0], sorted(calls[1:])) == ("GenerateMany 3", ["GenerateMany 1", "GenerateMany 2"])


async def test_generate_many_request_too_large_by_itself_fails(wire: Wire) -> None:
    got, calls = await texts(wire, *[Refuse(MessageTooLarge())] * 5)
    assert [type(each) for each in got] == [MessageTooLarge] * 3
    assert sorted(calls) == ["GenerateMany 1"] * 3 + ["GenerateMany 2", "GenerateMany 3"]


async def test_generate_many_gap_is_data_loss_of_one_request(wire: Wire) -> None:
    got, _ = await texts(wire, Skip(0, index=2))
    assert got[:2] == PROMPTS[:2]
    assert isinstance(got[2], DataLoss)


async def test_generate_many_drops_repeats_and_reattaches_on_overlap(wire: Wire) -> None:
    assert await texts(wire, Repeat(1)) == (PROMPTS, ["GenerateMany 3"])
    assert await texts(wire, Overlap(0)) == (PROMPTS, ["GenerateMany 3", "Attach 1"])


async def test_generate_many_lost_request_is_data_loss(wire: Wire) -> None:
    got, _ = await texts(wire, Break(1, index=2), Refuse(UnknownRequest()))
    assert sorted(type(each).__name__ for each in got) == ["DataLoss", "str", "str"]


async def test_generate_many_held_request_delays_no_other(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1)]) as router, wire.client(router) as client:
        async with client.generate_many(PROMPTS, request_id="r") as stream:
            got = [await anext(stream) for _ in range(4)]
            await client.cancel("r:0")
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
    assert [(index, chunk.text) for index, chunk in got if index] == [
        (1, "d"),
        (2, "e"),
        (2, " f"),
    ]
    assert isinstance(stream.outcomes[0].error, Cancelled)


async def test_generate_many_deadline_applies_to_each_request(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1)]) as router, wire.client(router) as client:
        got = await client.generate_many(PROMPTS, timeout_s=0.3).texts()
    assert isinstance(got[0], DeadlineExceeded)
    assert got[1:] == PROMPTS[1:]


async def test_generate_many_close_cancels_only_unfinished_requests(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1, index=2)]) as router, wire.client(router) as client:
        async with client.generate_many(PROMPTS, request_id="r") as stream:
            for _ in range(5):
                await anext(stream)
            while len(stream.outcomes) < 2:
                await asyncio.sleep(0.001)
        assert router.calls == ["GenerateMany 3", "Cancel"]
        assert router.requests["r:2"].state == pb.REQUEST_STATE_CANCELLED
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_generate_many_close_before_first_chunk_makes_no_call(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        async with client.generate_many(PROMPTS) as stream:
            pass
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert [type(each) for each in await stream.texts()] == [Cancelled] * 3
    assert router.calls == []


async def test_generate_many_task_cancellation_cancels_requests(wire: Wire) -> None:
    async with wire.router(faults=[Hold(0)]) as router, wire.client(router) as client:
        is_held = asyncio.Event()

        async def work() -> None:
            async with client.generate_many(["a", "b"], request_id="r") as stream:
                await anext(stream)
                is_held.set()
                await stream.texts()

        task = asyncio.create_task(work())
        await is_held.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert router.requests["r:0"].state == pb.REQUEST_STATE_CANCELLED


async def test_generate_many_client_close_cancels_no_request(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1)]) as router:
        client = wire.client(router)
        stream = client.generate_many(["a b", "c d"])
        rest = asyncio.create_task(stream.texts())
        while not router.requests:
            await asyncio.sleep(0)
        await client.close()
        assert {type(each) for each in await rest} <= {Unreachable, str}
        assert "Cancel" not in router.calls


async def test_generate_many_respects_concurrency(wire: Wire) -> None:
    under_way: list[int] = []

    def answer(submission: Submission) -> Output:
        states = [known.state for known in router.requests.values()]
        under_way.append(states.count(pb.REQUEST_STATE_RUNNING))
        return Output(((1, "x"),))

    prompts = [str(number) for number in range(30)]
    async with wire.router(answer) as router, wire.client(router) as client:
        assert await client.generate_many(prompts, concurrency=8).texts() == ["x"] * 30
    assert max(under_way) < 8
    assert router.calls[0] == "GenerateMany 8"
    assert {int(call.split()[1]) for call in router.calls[1:]} <= set(range(1, 9))


async def test_generate_many_splits_calls_by_request_count(wire: Wire) -> None:
    prompts = [str(number) for number in range(2500)]
    async with wire.router() as router, wire.client(router) as client:
        assert await client.generate_many(prompts, concurrency=5000).texts() == prompts
    assert sorted(router.calls) == [
        "GenerateMany 1024",
        "GenerateMany 1024",
        "GenerateMany 452",
    ]


async def test_generate_many_splits_calls_by_prompt_size(wire: Wire) -> None:
    prompts = [f"{number}" + "x" * 400_000 for number in range(3)] + ["y" * 2_000_000]
    async with wire.router() as router, wire.client(router) as client:
        assert await client.generate_many(prompts).texts() == prompts
    assert sorted(router.calls) == ["GenerateMany 1", "GenerateMany 1", "GenerateMany 2"]


async def test_generate_many_resumes_a_thousand_broken_requests(wire: Wire) -> None:
    prompts = [f"{number} x" for number in range(1000)]
    async with wire.router(faults=[Break(1)]) as router, wire.client(router) as client:
        assert await client.generate_many(prompts).texts() == prompts


async def test_generate_many_slow_reader_applies_backpressure(wire: Wire) -> None:
    many = Output(tuple((at, " " * 10_000) for at in range(500)))
    async with wire.router(lambda _: many) as router, wire.client(router) as client:
        now = asyncio.get_running_loop().time
        began = now()
        await client.generate_many(["a", "b"], request_id="fast").texts()
        async with client.generate_many(["a", "b"], request_id="slow") as stream:
            await anext(stream)
            # A reader without pauses receives everything in this time.
            await asyncio.sleep(2 * (now() - began))
            assert not stream.outcomes
            assert router.requests["slow:0"].state == pb.REQUEST_STATE_RUNNING


async def test_generate_many_resumes_after_router_restart(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1)]) as router, wire.client(router) as client:
        stream = client.generate_many(["a b", "c d"])
        index, _ = await anext(stream)
        await router.stop()
        rest = asyncio.create_task(stream.texts())
        await router.start()
        expected = ["a b", "c d"]
        expected[index] = expected[index][1:]
        assert await rest == expected


async def test_generate_many_unreachable_router_fails_every_request() -> None:
    async with GrpcWire().router() as router:
        pass
    async with GrpcWire().client(router, reconnect_s=0.2) as client:
        got = await client.generate_many(["a", "b"]).texts()
    assert [type(each) for each in got] == [Unreachable] * 2


async def test_generate_many_fails_over_from_stopped_router() -> None:
    async with FakeRouter() as gone:
        pass
    wire = GrpcWire()
    async with wire.router(faults=[Break(0)]) as router, wire.client(gone) as client:
        client = type(client)([gone.address, router.address])
        async with client:
            assert await client.generate_many(PROMPTS).texts() == PROMPTS


async def test_generate_many_resumes_at_next_router() -> None:
    """Every request was accepted, so only the requests' own calls report the failed router."""
    async with FakeRouter(faults=[Break(1)]) as failed, FakeRouter() as other:
        other.requests = failed.requests
        async with AsyncClient([failed.address, other.address]) as client:
            assert await client.generate_many(["a b c"]).texts() == ["a b c"]
    assert (failed.calls, other.calls) == (["GenerateMany 1"], ["Attach 1"])


async def test_generate_many_request_leaves_stopping_router() -> None:
    stopping = Refuse(RouterStopping(), index=1)
    async with FakeRouter(faults=[stopping]) as failed, FakeRouter() as other:
        async with AsyncClient([failed.address, other.address]) as client:
            assert await client.generate_many(PROMPTS).texts() == PROMPTS
    assert (failed.calls, other.calls) == (["GenerateMany 3"], ["Generate"])


async def test_generate_many_cancelled_texts_close_the_stream(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1)]) as router, wire.client(router) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.generate_many(PROMPTS, request_id="r").texts(), 0.1)
        assert router.calls == ["GenerateMany 3", "Cancel"]
        assert router.requests["r:0"].state == pb.REQUEST_STATE_CANCELLED


async def test_generate_many_request_ids_are_idempotent(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        assert await client.generate_many(["a", "b"], request_id="job").texts() == ["a", "b"]
        got = await client.generate_many(["a", "c"], request_id="job").texts()
        assert list(router.requests) == ["job:0", "job:1"]
    assert got[0] == "a"
    assert isinstance(got[1], RequestConflict)


async def test_generate_many_returns_request_errors_as_values(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        got = await client.generate_many(["a", "", "b"]).texts()
    assert (got[0], type(got[1]), got[2]) == ("a", EmptyPrompt, "b")


async def test_generate_many_rejects_invalid_arguments(wire: Wire) -> None:
    async with wire.router() as router, wire.client(router) as client:
        with pytest.raises(TypeError, match="a list of prompts"):
            client.generate_many("abc")
        with pytest.raises(TypeError, match="not bytes"):
            client.generate_many([b"abc"])
        with pytest.raises(TypeError, match="max_token"):
            client.generate_many(["a"], max_token=1)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="request_id"):
            client.generate_many(["a"], request_id="no spaces")
        with pytest.raises(NotUtf8):
            client.generate_many(["a"], session_id="\udcff")
        with pytest.raises(InvalidRequest, match="session_id must be a string"):
            client.generate_many(["a"], session_id=5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least 1"):
            client.generate_many(["a"], concurrency=0)
    assert router.calls == []


async def test_blocking_client_supports_generate_many(wire: Wire) -> None:
    async with wire.router(faults=[Hold(1)]) as router:

        def work() -> None:
            with wire.blocking(router) as client:
                with client.generate_many(["a b", "c"], request_id="r") as stream:
                    assert stream.request_ids == ("r:0", "r:1")
                    assert next(stream)[1].offset == 0
                assert client.generate_many(["x", "y"]).texts() == ["x", "y"]
                again = client.generate_many(["x", "y z"])
                assert sorted((at, chunk.text) for at, chunk in again) == [
                    (0, "x"),
                    (1, " z"),
                    (1, "y"),
                ]
                assert again.outcomes.keys() == {0, 1}

        await asyncio.to_thread(work)
