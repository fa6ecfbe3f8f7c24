"""Messages that report queued and running requests to the leader."""

from __future__ import annotations

from math import inf

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from everlift.v1 import session_pb2 as pb
from router.admission.request import QueueKey, Running, Waiting

#: Fields of a queued request that only the leader knows.
LEADER_FIELDS = {
    *("expires", "predicted_wait_s", "predicted_ttft_s", "predicted_tpot_s", "attained_rank"),
}


def full(descriptor: Descriptor) -> dict[str, object]:
    """Return a value for each field, different ones for fields of a type.

    ``attempt`` is only compared with 0 by the leader.
    """
    values = {field.name: value_of(field) for field in descriptor.fields}
    return values | {"attempt": 1} if "attempt" in values else values


def value_of(field: FieldDescriptor) -> object:
    value: object
    if field.type == FieldDescriptor.TYPE_STRING:
        value = field.name
    elif field.type == FieldDescriptor.TYPE_BOOL:
        value = True
    elif field.type == FieldDescriptor.TYPE_DOUBLE:
        value = field.number + 0.5
    elif field.type == FieldDescriptor.TYPE_FIXED64:
        value = 2**64 - field.number
    else:
        value = 1000 - field.number
    return [value] if field.is_repeated else value


def test_waiting_message_keeps_every_field() -> None:
    message = pb.Waiting(**full(pb.Waiting.DESCRIPTOR))  # type: ignore[arg-type]
    waiting = Waiting.from_proto("g", message)
    assert waiting.to_proto() == message
    unset = {it for it, value in Waiting._field_defaults.items() if getattr(waiting, it) == value}
    assert unset == LEADER_FIELDS
    assert all(waiting.queue_key)


def test_waiting_message_without_tokens_counts_one() -> None:
    """Requests without any work would end the leader's fair share."""
    waiting = Waiting.from_proto("g", pb.Waiting(request_id="r"))
    assert (waiting.prefill_tokens, waiting.work_tokens) == (1, 1)


def test_running_message_keeps_every_field() -> None:
    message = pb.Running(**full(pb.Running.DESCRIPTOR))  # type: ignore[arg-type]
    running = Running.from_proto("g", message)
    assert running.to_proto() == message
    assert not [
        it for it, value in Running._field_defaults.items() if getattr(running, it) == value
    ]
    assert all(running.queue_key)


def test_waiting_message_omits_infinite_deadlines() -> None:
    waiting = Waiting("r", "g", 1.0, 20, 5)
    message = waiting.to_proto()
    assert (message.deadline, message.ttft_deadline, message.attempt) == (0.0, 0.0, 0)
    assert Waiting.from_proto("g", message) == waiting


def test_running_message_omits_an_infinite_deadline() -> None:
    running = Running("r", "g", "w", 1, 0, 20, 1.0, 3)
    assert running.to_proto().due == 0.0
    assert Running.from_proto("g", running.to_proto()) == running


def test_waiting_message_omits_what_the_leader_sets() -> None:
    waiting = Waiting("r", "g", 1.0, 20, 5, deadline=9.0, queue_key=QueueKey(25, 0.5))
    seen = waiting._replace(
        expires=7.0,
        predicted_wait_s=1.0,
        predicted_ttft_s=2.0,
        predicted_tpot_s=3.0,
        attained_rank=0.5,
    )
    assert {it for it in Waiting._fields if getattr(seen, it) != getattr(waiting, it)} == (
        LEADER_FIELDS
    )
    assert Waiting.from_proto("g", seen.to_proto()) == waiting
    assert waiting.ttft_deadline == inf


def test_waiting_from_proto_limits_values_of_other_routers() -> None:
    """A router may send more cached tokens than known ones, and no least number of tokens."""
    message = pb.Waiting(prompt_tokens=20, cached_tokens=30, least_tokens=0, attempt=7)
    waiting = Waiting.from_proto("g", message)
    assert (waiting.cached_tokens, waiting.least_tokens, waiting.has_run) == (19, 1, True)
    assert Waiting.from_proto("g", pb.Waiting(cached_tokens=30)).cached_tokens == 0
