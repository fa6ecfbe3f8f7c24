"""Injected faults that need no process of their own."""

from __future__ import annotations

import asyncio

from everlift.v1 import chaos_pb2
from worker.serving.fault import NetworkPartitions, Slowness


def slow(factor: float, seconds: float) -> chaos_pb2.Fault:
    return chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_SLOW, factor=factor, seconds=seconds)


def test_slowness_adds_sleep_until_it_expires() -> None:
    slowness = Slowness()
    assert slowness.extra_s(0.1, now=0.0) == 0
    slowness.start(slow(factor=10, seconds=5), now=100.0)
    assert slowness.extra_s(0.25, now=101.0) == 9 * 0.25
    assert slowness.extra_s(0.25, now=104.5) == 0.5, "until the fault is over"
    assert slowness.extra_s(0.25, now=105.0) == 0


def test_slowness_factor_below_one_has_no_effect() -> None:
    slowness = Slowness()
    slowness.start(slow(factor=0, seconds=5), now=0.0)
    assert slowness.extra_s(0.25, now=1.0) == 0


async def test_partitions_delay_no_router_if_none_is_set() -> None:
    await NetworkPartitions().wait_until_connected("router")


async def passes(partitions: NetworkPartitions, router_id: str) -> asyncio.Task[None]:
    """Return a task that waits for the connection, after it had time to finish."""
    task = asyncio.create_task(partitions.wait_until_connected(router_id))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_partition_holds_only_its_routers() -> None:
    partitions = NetworkPartitions()
    partitions.add("ab", seconds=3600)
    cut_off, other = await passes(partitions, "abc"), await passes(partitions, "bcd")
    assert (cut_off.done(), other.done()) == (False, True)
    partitions.heal()
    await cut_off
    await partitions.wait_until_connected("abc")


async def test_partition_heals_after_its_duration() -> None:
    partitions = NetworkPartitions()
    partitions.add("", seconds=0.01)
    cut_off = await passes(partitions, "abc")
    assert not cut_off.done()
    await cut_off


async def test_router_in_two_partitions_waits_for_both() -> None:
    partitions = NetworkPartitions()
    partitions.add("", seconds=0.01)
    partitions.add("a", seconds=3600)
    other = await passes(partitions, "b")
    await other
    cut_off = await passes(partitions, "a")
    assert not cut_off.done()
    partitions.heal()
    await cut_off
