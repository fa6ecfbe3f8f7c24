"""Ranks with the fake runner in separate processes, synchronised by the step log alone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from everlift.hashes import CHUNK_SIZE
from everlift.v1 import chaos_pb2, session_pb2
from tests.support.example_counts import long
from tests.support.router.session_support import Router
from tests.support.worker.worker_support import prompt, shortened, start, tensor_parallel
from worker.config import WorkerConfig
from worker.parallel.step_log import ChannelBroken, StepLogListener, StepLogReader
from worker.runner.fake_runner import expected_tokens
from worker.serving.rank import Rank, RankFailed

CHILD = Path(__file__).with_name("worker_rank_child.py")
ROOT = CHILD.parents[2]
CONFIG = tensor_parallel(2)
in_steps_and_ahead = pytest.mark.parametrize(
    "config", [long(CONFIG), tensor_parallel(2, ahead=True)], ids=["in steps", "ahead"]
)


async def child(rendezvous: str, num_blocks: int = 8, ahead: bool = False) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(CHILD), "1", rendezvous),
        *(str(os.getpid()), str(num_blocks), *(["ahead"] if ahead else [])),
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        stdout=PIPE,
    )


async def said(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60.0):
        return (await process.stdout.readline()).decode().strip()


@asynccontextmanager
async def two_ranks(
    num_blocks: int = 8, config: WorkerConfig = CONFIG
) -> AsyncIterator[tuple[Rank, Process, str]]:
    """Yield rank 0 of this process, the process of rank 1 with ``num_blocks``, and the address."""
    rank = Rank(config)
    process = await child(await rank.open(), num_blocks, config.fake.runs_ahead)
    try:
        info = await rank.start()
        assert await said(process) == "ready"
        yield rank, process, info.address
    finally:
        await rank.stop()
        try:
            async with asyncio.timeout(30.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            raise


@asynccontextmanager
async def router_of(address: str) -> AsyncIterator[Router]:
    router = Router(address)
    try:
        await router.hello()
        yield router
    finally:
        await router.close()


@in_steps_and_ahead
async def test_ranks_serve_as_one_worker_and_stop_together(config: WorkerConfig) -> None:
    """More sequences than blocks, and an abort, would make wrong plans differ."""
    async with two_ranks(config=config) as (rank, process, address), router_of(address) as router:
        await router.start(*(start(e, prompt(20 + e, e), 60) for e in range(1, 16)))
        await router.until(lambda: router.tokens.get(2))
        await router.abort(2)
        kept = [epoch for epoch in range(1, 16) if epoch != 2]
        await router.ended(*kept)
        for epoch in kept:
            assert router.tokens[epoch] == expected_tokens(prompt(20 + epoch, epoch), 60)
        assert router.state.preemptions > 0
        await rank.stop()
        await rank.wait()
        assert await process.wait() == 0


@in_steps_and_ahead
async def test_omitted_prefix_is_completed_for_both_ranks(config: WorkerConfig) -> None:
    config, long = replace(config, num_blocks=80), prompt(2 * CHUNK_SIZE + 9)
    async with two_ranks(80, config) as (_, _, address), router_of(address) as router:
        await router.start(start(1, long, 300), shortened(start(2, long, 40), 2))
        await router.ended(1, 2)
        whole = expected_tokens(long, 300)
        assert (router.tokens[1], router.tokens[2]) == (whole, whole[:40])
        # The third chunk contains generated tokens.
        again = start(3, [*long, *whole[:280], 5], 40)
        await router.start(shortened(again, 3), shortened(start(4, long[1:], 40), 1))
        await router.ended(3)
        assert router.tokens[3] == expected_tokens(list(again.prompt_ids), 40)
        assert [it.epoch for frame in router.frames for it in frame.incomplete_starts] == [4]
        await router.start(start(4, long[1:], 40))
        await router.ended(4)
        assert router.tokens[4] == expected_tokens(long[1:], 40)


@in_steps_and_ahead
async def test_policy_changes_apply_to_both_ranks_together(config: WorkerConfig) -> None:
    """The policies run and queue different sequences."""
    async with two_ranks(config=config) as (_, _, address), router_of(address) as router:
        for version, name in enumerate(("static", "slai", "magnus", "default"), 1):
            epochs = range(100 * version, 100 * version + 8)
            await router.start(*(start(e, prompt(20 + e % 9, e), 60) for e in epochs))
            await router.until(lambda first=epochs[0]: router.tokens.get(first))
            await router.set_policy(version, name)
        await router.ended(*(100 * version + each for version in (1, 2, 3, 4) for each in range(8)))
        for epoch, tokens in router.tokens.items():
            assert tokens == expected_tokens(prompt(20 + epoch % 9, epoch), 60)


@in_steps_and_ahead
async def test_drain_stops_both_ranks(config: WorkerConfig) -> None:
    async with two_ranks(config=config) as (rank, process, address), router_of(address) as router:
        await router.start(*(start(e, prompt(20), 200) for e in range(1, 9)))
        await router.until(lambda: router.tokens.get(1))
        draining = asyncio.create_task(rank.drain())
        await router.rest()
        await draining
        assert {*router.stops} >= {*range(2, 9)}
        await rank.stop()
        assert await process.wait() == 0


async def test_drain_of_both_ranks_returns_all_sequences() -> None:
    first = Rank(CONFIG)
    second = Rank(CONFIG, 1, await first.open())
    info, _ = await asyncio.gather(first.start(), second.start())

    async def leave(rank: Rank) -> None:
        await rank.drain()
        await rank.stop()
        await rank.wait()

    async with router_of(info.address) as router:
        await router.start(*(start(e, prompt(20), 200) for e in range(1, 9)))
        await router.until(lambda: router.tokens.get(1))
        leaving = asyncio.gather(leave(second), leave(first))
        await router.rest()
        assert {*router.stops} == {*range(1, 9)}
        await leaving


async def test_rank_0_opened_but_never_started_closes_cleanly() -> None:
    rank = Rank(CONFIG)
    await rank.open()
    await rank.stop()


async def test_idle_worker_detects_a_killed_rank_promptly() -> None:
    async with two_ranks() as (rank, process, address), router_of(address) as router:
        await router.read()
        process.kill()
        # Detection by silence gives another cause, so a generous limit hides no slow detection.
        async with asyncio.timeout(30.0):
            with pytest.raises(RankFailed, match="rank 1 is gone"):
                await rank.wait()
            await router_is_cut_off(router)


@in_steps_and_ahead
async def test_killed_rank_ends_the_worker_with_the_cause(
    config: WorkerConfig,
) -> None:
    async with two_ranks(config=config) as (rank, process, address), router_of(address) as router:
        await router.start(*(start(e, prompt(20), 200) for e in range(1, 5)))
        await router.until(lambda: router.tokens.get(1))
        process.kill()
        async with asyncio.timeout(30.0):
            with pytest.raises(RankFailed, match="rank 1 is gone"):
                await rank.wait()
            await router_is_cut_off(router)


async def test_frozen_rank_ends_the_worker() -> None:
    config = replace(CONFIG, rank_silence=1.0)
    async with two_ranks(config=config) as (rank, process, address), router_of(address) as router:
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(30.0):
            with pytest.raises(RankFailed, match="rank 1 was silent for more than 1 s"):
                await rank.wait()
            await router_is_cut_off(router)
        process.send_signal(signal.SIGCONT)
        assert (await said(process)).startswith("rank 0 is gone")
        assert await process.wait() == 3


@pytest.mark.long
async def test_busy_rank_keeps_sending_heartbeats() -> None:
    async with two_ranks() as (rank, _, address), router_of(address) as router:
        waiting = asyncio.create_task(rank.wait())
        for epoch in range(1, 40, 4):
            await router.start(*(start(e, prompt(20), 180) for e in range(epoch, epoch + 4)))
            await router.ended(*range(epoch, epoch + 4))
        assert not waiting.done()
        waiting.cancel()


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (chaos_pb2.FAULT_KIND_KILL, "rank 1 is gone"),
        (chaos_pb2.FAULT_KIND_PAUSE, "rank 1 was silent"),
    ],
)
async def test_injected_fault_hits_the_named_rank(kind: chaos_pb2.FaultKind, cause: str) -> None:
    chaotic = replace(CONFIG, chaos=True, rank_silence=1.0)
    async with two_ranks(config=chaotic) as (rank, process, address), router_of(address) as router:
        # The pause is longer than a stall of this event loop, which would hide the silence.
        fault = chaos_pb2.Fault(kind=kind, rank=1, seconds=6.0)
        await router.call.write(session_pb2.RouterFrame(fault=fault))
        async with asyncio.timeout(30.0):
            with pytest.raises(RankFailed, match=cause):
                await rank.wait()
        killed = kind == chaos_pb2.FAULT_KIND_KILL
        assert await process.wait() == (-signal.SIGKILL if killed else 3), "it goes on, and ends"


async def router_is_cut_off(router: Router) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await router.until(lambda: False)


async def test_rank_1_exits_when_rank_0_is_gone() -> None:
    listener = StepLogListener("127.0.0.1", "fake 0 0 0")
    process = await child(listener.address)
    writer = await asyncio.to_thread(listener.accept, 2, 60.0)
    assert await said(process) == "ready"
    writer.close()
    listener.close()
    assert (await said(process)).startswith("rank 0 is gone")
    assert await process.wait() == 3


@in_steps_and_ahead
async def test_diverging_ranks_fail_with_an_error(config: WorkerConfig) -> None:
    """Rank 1 has a smaller pool, and so preempts where rank 0 does not."""
    two = two_ranks(5, config)
    async with two as (rank, process, address), router_of(address) as router:
        await router.start(*(start(e, prompt(30), 100) for e in range(1, 5)))
        assert "differs from rank 0's" in await said(process)
        assert await process.wait() == 3
        with pytest.raises(RankFailed):
            await rank.wait()


async def test_rank_exits_with_its_parent_process() -> None:
    listener = StepLogListener("127.0.0.1", "fake 0 0 0")
    middle = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MIDDLE, str(CHILD), listener.address),
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        stdout=PIPE,
    )
    writer = await asyncio.to_thread(listener.accept, 2, 60.0)
    middle.kill()
    await middle.wait()
    (line,) = writer.descriptors()
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(line, gone.set)
    async with asyncio.timeout(30.0):
        await gone.wait()
    asyncio.get_running_loop().remove_reader(line)
    writer.close()
    listener.close()


#: Program that starts a rank and waits for it.
MIDDLE = """
import os, subprocess, sys
subprocess.run([sys.executable, sys.argv[1], "1", sys.argv[2], str(os.getpid()), "8"])
"""


async def test_step_log_rejects_connections_that_are_no_rank() -> None:
    listener = StepLogListener("127.0.0.1", "model")
    host, port = listener.address.partition("/")[0].split(":")
    accepting = asyncio.create_task(asyncio.to_thread(listener.accept, 2, 10.0))
    with socket.create_connection((host, int(port))) as stranger:
        await asyncio.to_thread(stranger.sendall, b"\xff\xff\xff\xffGET / HTTP/1.1\r\n\r\n")
    wrong_token = StepLogReader.connect(f"{host}:{port}/0000", 1, "model")
    odd_token = StepLogReader.connect(f"{host}:{port}/\u00fc", 1, "model")
    wrong_rank = StepLogReader.connect(listener.address, 2, "model")
    right = StepLogReader.connect(listener.address, 1, "model")
    writer = await accepting
    entry = session_pb2.StepLog(aborts=[session_pb2.Abort(epoch=7)])
    writer.write(entry)
    assert next(iter(right)) == entry
    for reader in (wrong_token, odd_token, wrong_rank):
        with pytest.raises(ChannelBroken):
            await asyncio.to_thread(next, iter(reader))
    for end in (wrong_token, odd_token, wrong_rank, right, writer, listener):
        end.close()


async def test_step_log_rejects_a_rank_with_another_model() -> None:
    listener = StepLogListener("127.0.0.1", "model")
    other = StepLogReader.connect(listener.address, 1, "another model")
    with pytest.raises(ChannelBroken, match="rank 1 has another model"):
        await asyncio.to_thread(listener.accept, 2, 10.0)
    other.close()
    listener.close()


async def test_step_log_accept_times_out_for_a_missing_rank() -> None:
    listener = StepLogListener("127.0.0.1", "model")
    with pytest.raises(ChannelBroken, match="not all ranks"):
        await asyncio.to_thread(listener.accept, 2, 0.05)
    listener.close()
