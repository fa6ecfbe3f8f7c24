"""The head of the queue waits, up to a timeout, for gateways that may report older requests."""

from __future__ import annotations

from router.admission.handover import QueueHandover
from router.admission.request import Key


def key(arrived: float, priority: int = 0) -> Key:
    return (-priority, arrived, "r")


def handover(*living: str) -> QueueHandover:
    call = QueueHandover(now=0.0, timeout_s=1.0)
    call.set_live_gateways(living)
    return call


def test_handover_blocks_until_live_gateways_are_known() -> None:
    call = QueueHandover(now=0.0, timeout_s=1.0)
    call.connect("a", 0.0)
    call.complete("a")
    assert not call.allows(key(1.0), 0.9)
    call.set_live_gateways(["a"])
    assert call.allows(key(1.0), 0.9)


def test_handover_allows_head_once_all_gateways_reached_it() -> None:
    call = handover("a", "b")
    for gateway, arrived in (("a", 3.0), ("b", 2.0)):
        call.connect(gateway, 0.0)
        assert not call.allows(key(1.0), 0.0)
        call.on_waiting(gateway, key(arrived), 0.0)
    assert call.allows(key(2.0), 0.0)
    assert not call.allows(key(2.5), 0.0)
    call.complete("b")
    assert call.allows(key(2.5), 0.0)
    assert not call.allows(key(4.0), 0.0)


def test_handover_orders_later_higher_class_before_lower() -> None:
    call = handover("a")
    call.connect("a", 0.0)
    call.on_waiting("a", key(9.0, priority=1), 0.0)
    assert call.allows(key(5.0, priority=1), 0.0)
    assert not call.allows(key(5.0), 0.0)


def test_handover_mark_never_moves_back() -> None:
    call = handover("a")
    call.connect("a", 0.0)
    call.on_waiting("a", key(5.0), 0.0)
    call.on_waiting("a", key(1.0), 0.0)
    assert call.allows(key(4.0), 0.0)


def test_handover_waits_for_missing_gateway_until_timeout() -> None:
    call = handover("a", "dead")
    call.connect("a", 0.0)
    call.complete("a")
    assert call.is_awaiting_gateways(0.9) and not call.allows(key(1.0), 0.9)
    assert not call.is_awaiting_gateways(1.0) and call.allows(key(1.0), 1.0)


def test_handover_stops_waiting_for_expired_gateway() -> None:
    call = handover("a", "dying")
    call.connect("a", 0.0)
    call.complete("a")
    assert not call.allows(key(1.0), 0.1)
    call.set_live_gateways(["a"])
    assert call.allows(key(1.0), 0.1)


def test_handover_stops_waiting_for_silent_gateway() -> None:
    call = handover("a")
    call.connect("a", 0.0)
    call.on_waiting("a", key(1.0), 0.5)
    assert not call.allows(key(2.0), 1.4)
    assert call.allows(key(2.0), 1.5)
    call.on_waiting("a", key(1.5), 1.6)
    assert not call.allows(key(2.0), 1.6)


def test_handover_restarts_for_reconnected_gateway() -> None:
    call = handover("a")
    call.connect("a", 0.0)
    call.complete("a")
    call.disconnect("a")
    assert call.allows(key(1.0), 0.0)
    call.connect("a", 0.1)
    assert not call.allows(key(1.0), 0.1)
