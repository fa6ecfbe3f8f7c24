"""Turns of sessions that a router remembers, and their limits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from everlift.messages import Submission
from everlift.v1 import inference_pb2 as pb
from router.requests.request import LiveRequest
from router.requests.splicing import Prefix, PromptMark, Turn
from router.requests.turns import Turns


def submission(request_id: str = "new", session: str = "s", salt: str = "") -> Submission:
    message = pb.GenerateRequest(text="hi", session_id=session, cache_salt=salt)
    return Submission.from_proto(message, request_id, seed=1)


def finished(
    request_id: str,
    prompt: Sequence[int],
    session: str = "s",
    salt: str = "",
    output: int = 0,
    model: str = "m",
) -> LiveRequest:
    like = submission(request_id, session, salt)
    mark = PromptMark(Prefix(10 * len(prompt), len(prompt), b"d" * 16), Prefix())
    request: dict[str, Any] = {"request_id": request_id, "session_id": session, "salt": like.salt}
    request["model"] = model
    request |= {"prompt_ids": tuple(prompt), "turn": mark.to_bytes() if prompt else b""}
    request["chunk_hashes"] = ()
    choice = SimpleNamespace(output=SimpleNamespace(tokens=[9] * output, whole_text="x"))
    return cast(
        "LiveRequest", SimpleNamespace(request=SimpleNamespace(**request), choices=[choice])
    )


def ids(turns: Sequence[Turn]) -> list[str]:
    return [turn.request_id for turn in turns]


def test_turns_are_those_of_session_tenant_and_salt() -> None:
    turns = Turns(60.0)
    for request_id, session, salt in (
        ("r", "s", ""),
        ("r2", "other", ""),
        ("a/r", "s", ""),
        ("b/r", "s", ""),
        ("b/r2", "s", "salt"),
    ):
        turns.add(finished(request_id, (1, 2), session, salt), 0.0)
    turns.add(finished("of-another-model", (1, 2), model="n"), 0.0)
    assert ids(turns.of(submission(), "m", 0.0)) == ["r"]
    assert ids(turns.of(submission(), "n", 0.0)) == ["of-another-model"]
    assert ids(turns.of(submission("a/new"), "m", 0.0)) == ["a/r"]
    assert ids(turns.of(submission("b/new"), "m", 0.0)) == ["b/r"]
    assert ids(turns.of(submission("b/new", salt="salt"), "m", 0.0)) == ["b/r2"]
    assert not turns.of(submission(session=""), "m", 0.0)
    assert not turns.of(submission(session="t"), "m", 0.0)


def test_turns_skip_requests_without_session_or_text() -> None:
    turns = Turns(60.0)
    turns.add(finished("r", (1,), session=""), 0.0)
    turns.add(finished("r2", ()), 0.0)
    assert not turns.of(submission(), "m", 0.0) and not turns.of(submission(session=""), "m", 0.0)


def test_turns_end_with_the_ledgers_retention() -> None:
    turns = Turns(60.0)
    turns.add(finished("r", range(5)), 0.0)
    turns.add(finished("r2", range(9)), 30.0)
    assert ids(turns.of(submission(), "m", 59.0)) == ["r2", "r"]
    assert ids(turns.of(submission(), "m", 60.0)) == ["r2"]
    assert not turns.of(submission(), "m", 90.0)
    assert turns._num_ids == len(turns._ends) == len(turns._key_of) == 0


def test_turns_keep_the_last_eight_of_a_session() -> None:
    turns = Turns(60.0)
    for number in range(10):
        turns.add(finished(f"r{number}", range(number + 1)), 0.0)
    assert ids(turns.of(submission(), "m", 0.0)) == [f"r{number}" for number in range(9, 1, -1)]


def test_turns_share_the_ids_of_a_growing_prompt() -> None:
    turns = Turns(60.0, max_ids=110)
    for number, prompt in enumerate((range(50), range(100), range(100), range(70))):
        turns.add(finished(f"r{number}", prompt), 0.0)
    kept = turns.of(submission(), "m", 0.0)
    assert len({id(turn.ids) for turn in kept}) == 1
    assert all(
        turn.ids[: turn.mark.whole.num_ids] == array("I", range(n))
        for turn, n in zip(kept, (70, 100, 100, 50), strict=True)
    )
    # A branch has ids of its own.
    turns.add(finished("r4", (*range(5), 7)), 0.0)
    assert len({id(turn.ids) for turn in turns.of(submission(), "m", 0.0)}) == 2


def test_turns_evict_the_least_recently_used_session() -> None:
    turns = Turns(60.0, max_ids=100)
    turns.add(finished("a", range(40), "one"), 0.0)
    turns.add(finished("b", range(30), "two", output=10), 0.0)
    turns.of(submission(session="one"), "m", 0.0)
    turns.add(finished("c", range(30), "three"), 0.0)
    assert [ids(turns.of(submission(session=it), "m", 0.0)) for it in ("one", "two", "three")] == [
        ["a"],
        [],
        ["c"],
    ]
    turns.add(finished("d", range(101), "four"), 0.0)
    assert not any(turns.of(submission(session=it), "m", 0.0) for it in ("one", "three", "four"))
    turns.add(finished("e", range(99), "five"), 0.0)
    assert ids(turns.of(submission(session="five"), "m", 0.0)) == ["e"]


def test_forgotten_request_is_no_turn() -> None:
    turns = Turns(60.0, max_ids=100)
    turns.add(finished("a", range(40)), 0.0)
    turns.add(finished("b", range(60)), 0.0)
    turns.forget("b")
    turns.forget("unknown")
    assert ids(turns.of(submission(), "m", 0.0)) == ["a"]
    turns.forget("a")
    assert not turns.of(submission(), "m", 0.0)
    turns.add(finished("c", range(100), "other"), 0.0)
    assert ids(turns.of(submission(session="other"), "m", 0.0)) == ["c"]
