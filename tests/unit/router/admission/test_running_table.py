"""Running requests, in the order in which they would be evicted."""

from __future__ import annotations

from everlift.v1 import session_pb2 as pb
from router.admission.request import Running, RunningTable, Waiting


def running(request_id: str, **fields: object) -> Running:
    made = Running(
        request_id, "g", "w", epoch=1, priority=0, known_tokens=10, arrived=0.0, moves_left=1
    )
    return made._replace(**fields)  # type: ignore[arg-type]


def table_of(*entries: Running) -> RunningTable:
    table = RunningTable()
    for entry in entries:
        table.add(entry)
    return table


def names(entries: object) -> list[str]:
    return [entry.request_id for entry in entries]  # type: ignore[attr-defined]


def test_running_table_orders_by_class_then_known_tokens() -> None:
    table = table_of(
        running("long", known_tokens=50),
        running("high", priority=2),
        running("short", known_tokens=5),
        running("low", priority=-1, known_tokens=99),
        running("elsewhere", worker_id="other"),
    )
    assert names(table.below(1, "w")) == ["low", "short", "long"]
    assert names(table.below(0, "w")) == ["low"]
    assert names(table.from_class(0, "w")) == ["short", "long", "high"]
    assert not list(table.below(5, "unknown"))


def test_running_table_replaces_a_repeated_entry() -> None:
    table = table_of(running("r", choices=3), running("r", choices=2, is_preempted=True))
    assert table.preempted() == [running("r", choices=2, is_preempted=True)]
    table.add(running("r", epoch=2, worker_id="other"))
    assert table.get("r") == running("r", epoch=2, worker_id="other")
    assert not table.has_preempted and not list(table.below(1, "w"))


def test_running_table_removes_ended_entries_from_all_indexes() -> None:
    table = table_of(running("a", is_preempted=True), running("b", gateway="other"))
    assert table.remove("a") is not None
    assert table.remove("a") is None
    table.remove_gateway("other")
    table.remove_gateway("other")
    assert len(table) == 0
    assert not table._of_gateway and not table._ranks and not table._preempted


def test_remove_gateway_removes_only_its_entries() -> None:
    table = table_of(running("a"), running("b", gateway="dead"), running("c", gateway="dead"))
    table.remove_gateway("dead")
    assert names(table.below(1, "w")) == ["a"]


def test_running_from_proto_keeps_all_fields() -> None:
    message = pb.Running(
        request_id="r",
        worker_id="w",
        epoch=7,
        priority=1,
        known_tokens=20,
        moves_left=4,
        preempted=True,
        arrived=3.0,
        choices=2,
    )
    assert Running.from_proto("owner", message) == Running(
        "r", "owner", "w", 7, 1, 20, 3.0, 4, choices=2, is_preempted=True
    )


def test_running_dispatched_keeps_fields_of_the_request() -> None:
    waiting = Waiting("r", "g", 3.0, 20, 5, choices=2, priority=1, moves_left=4)
    assert Running.dispatched(waiting, "owner", "w", 7) == Running(
        "r", "owner", "w", 7, 1, 20, 3.0, 4, choices=2
    )
