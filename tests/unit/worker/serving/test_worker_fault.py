"""Faults on purpose, as far as they need no process of their own."""

from __future__ import annotations

import asyncio

from everlift.v1 import chaos_pb2
from worker.serving.fault import Slowness, Wire


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


async def test_intact_wire_delays_no_router() -> None:
    await Wire().whole("router")


async def passes(wire: Wire, router_id: str) -> asyncio.Task[None]:
    """Who waits to come through, and has had its chance."""
    task = asyncio.create_task(wire.whole(router_id))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_partition_holds_only_its_routers() -> None:
    wire = Wire()
    wire.cut("ab", seconds=3600)
    cut_off, other = await passes(wire, "abc"), await passes(wire, "bcd")
    assert (cut_off.done(), other.done()) == (False, True)
    wire.mend()
    await cut_off
    await wire.whole("abc")


async def test_cut_wire_recovers_after_its_duration() -> None:
    wire = Wire()
    wire.cut("", seconds=0.01)
    cut_off = await passes(wire, "abc")
    assert not cut_off.done()
    await cut_off


async def test_wire_with_two_cuts_recovers_after_both() -> None:
    wire = Wire()
    wire.cut("", seconds=0.01)
    wire.cut("a", seconds=3600)
    other = await passes(wire, "b")
    await other
    cut_off = await passes(wire, "a")
    assert not cut_off.done()
    wire.mend()
    await cut_off
