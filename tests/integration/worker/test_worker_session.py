"""A worker with the fake runner, over gRPC streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import median

import grpc
import pytest

from everlift.v1 import session_pb2
from tests.support.in_process import Held, until
from tests.support.router.session_support import Router
from tests.support.worker.worker_support import prompt, start
from worker.config import FakeModel, WorkerConfig
from worker.runner.fake_runner import expected_tokens
from worker.serving import server
from worker.serving.rank import Rank

CONFIG = WorkerConfig(
    model="fake",
    num_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    cluster_id="here",
    # A stall of the test's event loop must not cut a drain short.
    drain_timeout=30.0,
)
#: Slow enough that a test can act in the middle of a sequence.
SLOW = replace(CONFIG, fake=FakeModel(step_time=0.005))
#: Output tokens of a sequence that runs for ten seconds, longer than a stall.
LONG = 1900
CONNECT = "/everlift.v1.WorkerSession/Connect"


@asynccontextmanager
async def serving(config: WorkerConfig) -> AsyncIterator[tuple[Rank, str]]:
    rank = Rank(config)
    info = await rank.start()
    try:
        yield rank, info.address
    finally:
        await rank.stop()
        await rank.wait()


@asynccontextmanager
async def connected(address: str, name: str = "router") -> AsyncIterator[Router]:
    router = Router(address, name)
    try:
        await router.hello()
        await router.read()
        yield router
    finally:
        await router.close()


@pytest.fixture
async def worker() -> AsyncIterator[str]:
    async with serving(CONFIG) as (_, address):
        yield address


@pytest.fixture
async def slow_worker() -> AsyncIterator[tuple[Rank, str]]:
    async with serving(SLOW) as served:
        yield served


@asynccontextmanager
async def held_worker() -> AsyncIterator[tuple[Held, str]]:
    """Yield the hold and the address of a worker whose steps wait until the test releases them.

    Otherwise the engine's thread would continue while the event loop stalls.
    """
    async with serving(SLOW) as (rank, address):
        held = Held(rank)
        try:
            yield held, address
        finally:
            held.release()


async def idle(router: Router) -> None:
    """Wait until the worker has no sequences and no used blocks."""
    await router.until(
        lambda: router.state.num_running + router.state.num_waiting + router.state.blocks_used == 0
    )


async def test_worker_hello_describes_the_worker(worker: str) -> None:
    async with connected(worker) as router:
        hello = router.frames[0].hello
    assert hello.address == worker
    assert (hello.model, hello.num_blocks, hello.max_model_len) == ("fake", 64, 64 * 32)
    assert (hello.block_size, hello.vocab_size, hello.max_num_seqs) == (32, 1024, 8)
    assert (hello.max_num_batched_tokens, hello.tensor_parallel) == (64, 1)
    assert len(hello.worker_id) == 16 and len(hello.fingerprint) == 64 and hello.pid


async def test_start_returns_tokens_and_stop_reason(worker: str) -> None:
    async with connected(worker) as router:
        await router.start(start(1, prompt(40), max_tokens=20))
        await router.ended(1)
        assert router.tokens[1] == expected_tokens(prompt(40), 20)
        assert router.stops[1] == "LENGTH"
        await idle(router)


async def test_breakdown_is_sent_with_the_end_of_a_sequence(slow_worker: tuple[Rank, str]) -> None:
    _, address = slow_worker
    async with connected(address) as router:
        began = time.monotonic()
        await router.start(start(1, prompt(40), max_tokens=20), start(2, prompt(9), max_tokens=9))
        await router.ended(1)
        elapsed = time.monotonic() - began
        breakdowns = {it.epoch: it for frame in router.frames for it in frame.breakdowns}
    breakdown = breakdowns[1]
    seconds = [value for field, value in breakdown.ListFields() if field.name.endswith("_s")]
    assert 20 * SLOW.fake.step_time <= sum(seconds) <= elapsed
    assert (breakdown.steps, breakdown.most_neighbours) == (20, 1)
    assert breakdown.prefill_interference_s and breakdowns[2].steps == 9


async def test_starts_are_accepted_with_the_hello(worker: str) -> None:
    router = Router(worker)
    await router.hello(start(1, prompt(3), max_tokens=2))
    await router.ended(1)
    assert router.tokens[1] == expected_tokens(prompt(3), 2)
    await router.close()


@pytest.mark.parametrize("done", [1, 7, 19])
async def test_continuation_resumes_at_its_offset(worker: str, done: int) -> None:
    whole = expected_tokens(prompt(40), 20)
    async with connected(worker) as router:
        await router.start(start(1, prompt(40), max_tokens=20, output=whole[:done]))
        await router.ended(1)
        assert router.frames[-1].progress[0].offset >= done
        assert router.tokens[1] == whole[done:]


async def test_continuation_of_a_complete_output_ends_at_once(worker: str) -> None:
    whole = expected_tokens(prompt(4), 6)
    async with connected(worker) as router:
        await router.start(
            start(1, prompt(4), max_tokens=6, output=whole),
            start(2, prompt(4), max_tokens=9, output=whole, stop_token_ids=[whole[-1]]),
        )
        await router.ended(1, 2)
    assert router.tokens == {1: [], 2: []}
    assert router.stops == {1: "LENGTH", 2: "EOS"}


async def test_stop_token_ends_the_sequence_and_is_included(worker: str) -> None:
    whole = expected_tokens(prompt(4), 6)
    async with connected(worker) as router:
        await router.start(start(1, prompt(4), max_tokens=100, stop_token_ids=[whole[3]]))
        await router.ended(1)
    assert router.tokens[1] == whole[:4]
    assert router.stops[1] == "EOS"


async def test_routers_receive_only_the_tokens_of_their_sequences(worker: str) -> None:
    async with connected(worker, "a") as a, connected(worker, "b") as b:
        prompts = {epoch: prompt(5 + 11 * epoch, first=epoch % 3) for epoch in range(1, 25)}
        for router, parity in ((a, 0), (b, 1)):
            mine = [epoch for epoch in prompts if epoch % 2 == parity]
            await router.start(*(start(epoch, prompts[epoch], 30) for epoch in mine))
        await asyncio.gather(a.ended(*range(2, 25, 2)), b.ended(*range(1, 25, 2)))
        tokens = a.tokens | b.tokens
        assert tokens == {epoch: expected_tokens(p, 30) for epoch, p in prompts.items()}
        assert not a.tokens.keys() & b.tokens.keys()


async def test_accepted_starts_are_reported_to_all_routers(worker: str) -> None:
    async with connected(worker, "a") as a, connected(worker, "b") as b:
        await a.start(start(1, prompt(3)), start(2, []))
        await a.until(lambda: len(a.accepted) == 2)
        await b.until(lambda: len(b.accepted) == 2)
        assert a.accepted == b.accepted == [1, 2]


async def test_accepted_start_is_counted_in_the_same_frame() -> None:
    """The count does not wait for the engine's step, which takes 0.5 s."""
    config = replace(CONFIG, fake=FakeModel(step_time=0.5))
    async with serving(config) as (_, address), connected(address) as router:
        await router.start(start(1, prompt(10)))
        await router.until(lambda: 1 in router.accepted)
        await router.start(start(2, prompt(20)), start(3, prompt(30)))
        await router.until(lambda: 3 in router.accepted)
        state = router.state
        assert state.num_running + state.num_waiting == 3
        assert state.committed_tokens >= 60 and state.pending_prefill_tokens >= 50


async def test_invalid_starts_are_rejected_with_the_reason(worker: str) -> None:
    good = start(1, prompt(10), max_tokens=30)
    bad = {
        2: (start(2, []), "no tokens"),
        3: (start(3, [5, 1024]), "vocabulary"),
        4: (start(4, prompt(10), max_tokens=0), "max_tokens"),
        5: (start(5, prompt(64 * 32)), "context"),
        6: (start(6, prompt(3), max_tokens=2, output=[1, 2, 3]), "max_tokens"),
        7: (start(7, prompt(3), output=[1024]), "vocabulary"),
    }
    bad[8] = (start(8, prompt(3)), "temperature")
    bad[8][0].sampling.temperature = float("nan")
    async with connected(worker) as router:
        await router.start(good, *(message for message, _ in bad.values()))
        await router.ended(1, *bad)
    assert router.tokens[1] == expected_tokens(prompt(10), 30)
    for epoch, (_, reason) in bad.items():
        assert router.stops[epoch] == "REFUSED" and reason in router.errors[epoch]


async def test_epoch_held_by_another_router_is_rejected() -> None:
    async with (
        held_worker() as (held, address),
        connected(address, "a") as a,
        connected(address, "b") as b,
    ):
        await a.start(start(1, prompt(10), max_tokens=40))
        held.let(1)
        await a.until(lambda: a.tokens.get(1))
        await b.start(start(1, prompt(10), max_tokens=40))
        await b.abort(1)
        await b.ended(1)
        assert b.stops[1] == "REFUSED"
        held.release()
        await a.ended(1)
        assert a.tokens[1] == expected_tokens(prompt(10), 40)


async def test_duplicate_start_is_ignored() -> None:
    async with held_worker() as (held, address), connected(address) as router:
        for _ in range(3):
            await router.start(start(1, prompt(10), max_tokens=20))
        # The refusal of a later start shows that all three have arrived.
        await router.start(start(2, []))
        await router.ended(2)
        held.release()
        await router.ended(1)
        assert router.tokens[1] == expected_tokens(prompt(10), 20)
        await idle(router)
        assert router.state.output_tokens == 20


async def test_abort_frees_blocks_within_two_steps() -> None:
    async with held_worker() as (held, address), connected(address) as router:
        await router.start(start(1, prompt(100), max_tokens=500), start(2, prompt(5), 500))
        held.let(4)
        await router.until(lambda: router.tokens.get(1) and router.tokens.get(2))
        await router.abort(1)
        # Aborts are not acknowledged. The acknowledgement of a later start shows its arrival.
        await router.start(start(3, prompt(2), max_tokens=1))
        await router.until(lambda: 3 in router.accepted)
        assert router.state.blocks_used > 3
        held.let(2)
        await router.until(lambda: router.state.blocks_used <= 3)
        assert 1 not in router.stops


async def test_router_disconnect_aborts_its_sequences() -> None:
    async with held_worker() as (held, address), connected(address, "stays") as stays:
        async with connected(address, "goes") as goes:
            await goes.start(*(start(epoch, prompt(60), 500) for epoch in range(1, 6)))
            await stays.start(start(9, prompt(10), 60))
            held.let(8)
            await goes.until(lambda: goes.state.num_running == 6)
        await until(lambda: held.num_requests == 1)
        held.release()
        await stays.ended(9)
        assert stays.tokens[9] == expected_tokens(prompt(10), 60)
        await idle(stays)
        assert stays.state.output_tokens < 60 + 5 * 100


async def test_half_closed_stream_ends_the_session(slow_worker: tuple[Rank, str]) -> None:
    _, address = slow_worker
    async with connected(address, "stays") as stays, connected(address, "goes") as goes:
        await goes.start(start(1, prompt(60), 500))
        await goes.until(lambda: goes.tokens.get(1))
        await goes.call.done_writing()
        await goes.rest()
        assert await goes.call.code() is grpc.StatusCode.OK
        await idle(stays)


async def test_router_reconnect_replaces_its_stream(
    slow_worker: tuple[Rank, str],
) -> None:
    _, address = slow_worker
    async with connected(address, "same") as old:
        await old.start(start(1, prompt(60), 500))
        await old.until(lambda: old.tokens.get(1))
        async with connected(address, "same") as new:
            await old.rest()
            await new.start(start(2, prompt(60), max_tokens=3))
            await new.ended(2)
            assert new.tokens[2] == expected_tokens(prompt(60), 3)
            await idle(new)


async def test_prefix_cache_hits_freed_blocks(worker: str) -> None:
    async with connected(worker) as router:
        await router.start(start(1, prompt(321), max_tokens=1))
        await router.ended(1)
        steps = router.state.step
        await router.start(start(2, prompt(321), max_tokens=1))
        await router.ended(2)
        assert router.state.step == steps + 1, "a prefix hit leaves one step's work"
        assert router.tokens[2] == router.tokens[1]


async def median_gap_s(router: Router, count: int, is_counted: Callable[[], object]) -> float:
    """Read ``count`` frames that are counted; return the median time between two, in seconds.

    A stall of the event loop lengthens only a few of these times.
    """
    times: list[float] = []
    async with asyncio.timeout(60.0):
        while len(times) < count:
            await router.read()
            if is_counted():
                times.append(time.monotonic())
    return median(later - earlier for earlier, later in pairwise(times))


async def test_heartbeats_reach_an_idle_router_five_times_a_second(
    slow_worker: tuple[Rank, str],
) -> None:
    _, address = slow_worker
    async with connected(address) as router:
        assert 0.1 <= await median_gap_s(router, 15, lambda: True) <= 0.2
        numbers = [frame.state.sequence_number for frame in router.frames]
        assert numbers == sorted({*numbers})


async def test_heartbeats_continue_during_a_long_step() -> None:
    async with held_worker() as (held, address), connected(address) as router:
        await router.start(start(1, prompt(3), max_tokens=1))
        await router.until(lambda: 1 in router.accepted)
        count = len(router.frames)
        await router.until(lambda: len(router.frames) - count >= 5)
        assert not router.stops
        held.release()
        await router.ended(1)


async def test_running_slots_are_reported_a_few_times_a_second(
    slow_worker: tuple[Rank, str],
) -> None:
    _, address = slow_worker
    async with connected(address) as router:
        await router.start(start(1, prompt(3), LONG), start(2, prompt(3), LONG))
        gap_s = await median_gap_s(router, 8, lambda: len(router.state.running))
        assert 0.17 <= gap_s <= 0.55
        reports = [f.state.running for f in router.frames if f.state.running]
        assert len(reports) < len(router.frames)
        assert {(r.request_id, r.slot) for r in reports[-1]} == {("request-1", 0), ("request-2", 1)}


#: Starts whose refusals have more bytes than flow control sends to a router that does not read.
FLOOD = [start(epoch, []) for epoch in range(1000, 11_000)]


async def test_slow_reader_delays_no_other_router_and_loses_no_token() -> None:
    """The tokens of a router that does not read are merged into few frames."""
    async with serving(CONFIG) as (_, address), connected(address, "quick") as quick:
        async with connected(address, "slow") as slow:
            await slow.start(*FLOOD)
            await slow.start(*(start(epoch, prompt(4, epoch), 500) for epoch in (1, 2, 3)))
            await quick.start(start(99, prompt(50), max_tokens=300))
            await quick.ended(99)
            assert quick.tokens[99] == expected_tokens(prompt(50), 300)
            await quick.until(lambda: quick.state.output_tokens == 300 + 3 * 500)
            before = len(slow.frames)
            await slow.ended(1, 2, 3, *(refused.epoch for refused in FLOOD))
            for epoch in (1, 2, 3):
                assert slow.tokens[epoch] == expected_tokens(prompt(4, epoch), 500)
            assert len(slow.frames) - before < 10


async def test_drain_returns_all_sequences_with_intact_tokens(
    slow_worker: tuple[Rank, str],
) -> None:
    _, address = slow_worker
    async with connected(address, "a") as a, connected(address, "b") as b:
        await a.start(*(start(epoch, prompt(30, epoch), LONG) for epoch in range(1, 13)))
        await b.start(start(20, prompt(30), LONG))
        await a.until(lambda: len(a.tokens) >= 5)
        await b.call.write(session_pb2.RouterFrame(drain=True))
        await asyncio.gather(a.ended(*range(1, 13)), b.ended(20))
        assert {*a.stops.values(), *b.stops.values()} == {"RETURNED"}
        for epoch, tokens in a.tokens.items():
            assert tokens == expected_tokens(prompt(30, epoch), len(tokens))
        await a.start(start(50, prompt(3), 5, output=[1, 2]))
        await a.ended(50)
        assert a.stops[50] == "RETURNED" and a.frames[-1].progress[0].offset == 2
        assert a.state.draining and not a.state.blocks_used


async def test_drain_ends_streams_after_the_last_token(
    slow_worker: tuple[Rank, str],
) -> None:
    rank, address = slow_worker
    async with connected(address) as router:
        await router.start(start(1, prompt(30), LONG))
        await router.until(lambda: router.tokens.get(1))
        draining = asyncio.create_task(rank.drain())
        await router.rest()
        assert router.stops == {1: "RETURNED"}
        assert router.tokens[1] == expected_tokens(prompt(30), len(router.tokens[1]))
        await draining


async def test_start_received_during_a_drain_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    # Streams end this long after the last request; the event loop may stall before the start.
    monkeypatch.setattr(server, "_LINGER_S", 4.0)
    async with serving(CONFIG) as (rank, address), connected(address) as router:
        draining = asyncio.create_task(rank.drain())
        await router.until(lambda: router.state.draining)
        await router.start(start(1, prompt(3)))
        await router.rest()
        await draining
        assert router.stops == {1: "RETURNED"}


async def test_drain_ends_a_stream_only_after_all_is_sent() -> None:
    """The router begins to read after the drain has ended its session in the middle of a write."""
    async with serving(SLOW) as (rank, address), connected(address, "quick") as quick:
        async with connected(address, "slow") as slow:
            await slow.start(start(1, prompt(30), LONG))
            await slow.until(lambda: slow.tokens.get(1))
            await slow.start(*FLOOD)
            await quick.until(lambda: FLOOD[-1].epoch in quick.accepted)
            draining = asyncio.create_task(rank.drain())
            await quick.rest()
            await slow.rest()
            await draining
            assert slow.stops[1] == "RETURNED"
            assert slow.tokens[1] == expected_tokens(prompt(30), len(slow.tokens[1]))


async def test_drain_times_out_for_a_router_that_does_not_read() -> None:
    config = replace(SLOW, drain_timeout=0.3)
    async with serving(config) as (rank, address), connected(address) as router:
        await router.start(start(1, prompt(30), 500))
        await router.until(lambda: router.tokens.get(1))
        await router.start(*FLOOD)
        await router.until(lambda: FLOOD[0].epoch in router.accepted)
        await router.start(*FLOOD)
        begin = time.monotonic()
        async with asyncio.timeout(30.0):
            await rank.drain()
        assert time.monotonic() - begin >= 0.3, "the time was up"


async def test_router_of_another_cluster_is_rejected(worker: str) -> None:
    router = Router(worker, cluster="elsewhere")
    await router.hello()
    assert await router.refusal() is grpc.StatusCode.FAILED_PRECONDITION
    await router.close()


async def test_stream_without_a_hello_is_rejected(worker: str) -> None:
    router = Router(worker)
    await router.start(start(1, prompt(3)))
    assert await router.refusal() is grpc.StatusCode.INVALID_ARGUMENT
    await router.close()


@pytest.mark.parametrize("greeted", [False, True])
async def test_malformed_frame_ends_only_its_stream(worker: str, greeted: bool) -> None:
    hello = session_pb2.RouterFrame(
        hello=session_pb2.RouterHello(router_id="broken", cluster_id="here"),
        starts=[start(1, prompt(30), 2000)],
    ).SerializeToString()
    async with connected(worker) as router, grpc.aio.insecure_channel(worker) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(CONNECT)()
        if greeted:
            await call.write(hello)
        await call.write(b"\xff\xff\xff no frame")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async with asyncio.timeout(30.0):
                while True:
                    await call.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await router.start(start(2, prompt(10), 20))
        await router.ended(2)
        assert router.tokens[2] == expected_tokens(prompt(10), 20)
        await idle(router)


async def test_worker_start_fails_on_a_port_in_use(worker: str) -> None:
    port = int(worker.rpartition(":")[2])
    other = Rank(replace(CONFIG, port=port))
    with pytest.raises(OSError, match="cannot listen"):
        await other.start()
    await other.stop()
