"""Preempted requests resume on another worker, in one process with real gRPC."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from everlift.client.client import AsyncClient
from tests.support.in_process import WORKER, cluster, receive, right_tokens, until
from worker.config import FakeModel

SLOW = replace(WORKER, fake=FakeModel(step_time=0.01, max_model_len=512))


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(5)
    return [[dice.randrange(1, 255) for _ in range(dice.randrange(20, 40))] for _ in range(count)]


async def test_preempted_requests_move_to_worker_with_free_blocks() -> None:
    asked = prompts(6)
    async with (
        cluster(workers=0, worker_config=SLOW) as parts,
        AsyncClient(parts.address) as client,
    ):
        await parts.add_worker(num_blocks=24, max_num_seqs=8)
        work = [asyncio.create_task(receive(client, p, 300)) for p in asked]
        link = parts.routers[0]._sessions.links[0]
        await until(lambda: link.state.preemptions)
        await parts.add_worker(num_blocks=400, max_num_seqs=8)
        received = await asyncio.gather(*work)
        status = await client.status()
        entries = [await parts.ledger.get(one.request_id) for one in received]
    for one, prompt in zip(received, asked, strict=True):
        assert one.tokens == right_tokens(prompt, 300, SLOW)
        assert one.is_contiguous
    assert status.moved > 0 and status.failed == 0
    assert sum(entry.losses for entry in entries) == 0


async def test_preemption_meets_higher_class_ttft_and_lower_resumes() -> None:
    asked = prompts(4)
    async with (
        cluster(workers=0, worker_config=SLOW) as parts,
        AsyncClient(parts.address) as client,
    ):
        await parts.add_worker(max_num_seqs=1)
        work = [asyncio.create_task(receive(client, p, 150, priority=-1)) for p in asked[:3]]
        link = parts.routers[0]._sessions.links[0]
        await until(lambda: link.state.num_running == 1 and link.state.num_waiting == 2)
        high = await receive(client, asked[3], 20, priority=1, ttft_target_s=0.55)
        assert not any(task.done() for task in work)
        received = await asyncio.gather(*work)
        status = await client.status()
        entries = [await parts.ledger.get(one.request_id) for one in received]
    assert high.tokens == right_tokens(asked[3], 20, SLOW)
    for one, prompt in zip(received, asked[:3], strict=True):
        assert one.tokens == right_tokens(prompt, 150, SLOW)
    assert sorted(entry.attempts for entry in entries) == [1, 1, 2]
    assert status.moved == 0 and status.failed == 0
