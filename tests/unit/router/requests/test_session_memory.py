"""Turns that a router remembers of its sessions, and how many."""

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
    request_id: str, prompt: Sequence[int], session: str = "s", salt: str = "", output: int = 0
) -> LiveRequest:
    like = submission(request_id, session, salt)
    mark = PromptMark(Prefix(10 * len(prompt), len(prompt), b"d" * 16), Prefix())
    request: dict[str, Any] = {"request_id": request_id, "session_id": session, "salt": like.salt}
    request |= {"prompt_ids": tuple(prompt), "turn": mark.to_bytes() if prompt else b""}
    request["chunk_hashes"] = ()
    choice = SimpleNamespace(output=SimpleNamespace(tokens=[9] * output, whole_text="x"))
    return cast(
        "LiveRequest", SimpleNamespace(request=SimpleNamespace(**request), choices=[choice])
    )


def ids(turns: Sequence[Turn]) -> list[str]:
    return [turn.request_id for turn in turns]


def test_turns_are_those_of_session_tenant_and_salt() -> None:
    turns = Turns()
    for request_id, session, salt in (
        ("r", "s", ""),
        ("r2", "other", ""),
        ("a/r", "s", ""),
        ("b/r", "s", ""),
        ("b/r2", "s", "salt"),
    ):
        turns.add(finished(request_id, (1, 2), session, salt))
    assert ids(turns.of(submission())) == ["r"]
    assert ids(turns.of(submission("a/new"))) == ["a/r"]
    assert ids(turns.of(submission("b/new"))) == ["b/r"]
    assert ids(turns.of(submission("b/new", salt="salt"))) == ["b/r2"]
    assert ids(turns.of(submission(session=""))) == ids(turns.of(submission(session="t"))) == []


def test_turns_skip_requests_without_session_or_text() -> None:
    turns = Turns()
    turns.add(finished("r", (1,), session=""))
    turns.add(finished("r2", ()))
    assert not turns.of(submission()) and not turns.of(submission(session=""))


def test_turns_keep_the_last_eight_of_a_session() -> None:
    turns = Turns()
    for number in range(10):
        turns.add(finished(f"r{number}", range(number + 1)))
    assert ids(turns.of(submission())) == [f"r{number}" for number in range(9, 1, -1)]


def test_turns_share_the_ids_of_a_growing_prompt() -> None:
    turns = Turns(max_ids=110)
    for number, prompt in enumerate((range(50), range(100), range(100), range(70))):
        turns.add(finished(f"r{number}", prompt))
    kept = turns.of(submission())
    assert len({id(turn.ids) for turn in kept}) == 1
    assert all(
        turn.ids[: turn.mark.whole.num_ids] == array("I", range(n))
        for turn, n in zip(kept, (70, 100, 100, 50), strict=True)
    )
    # A branch has ids of its own.
    turns.add(finished("r4", (*range(5), 7)))
    assert len({id(turn.ids) for turn in turns.of(submission())}) == 2


def test_turns_evict_the_least_recently_used_session() -> None:
    turns = Turns(max_ids=100)
    turns.add(finished("a", range(40), "one"))
    turns.add(finished("b", range(30), "two", output=10))
    turns.of(submission(session="one"))
    turns.add(finished("c", range(30), "three"))
    assert [ids(turns.of(submission(session=it))) for it in ("one", "two", "three")] == [
        ["a"],
        [],
        ["c"],
    ]
    turns.add(finished("d", range(101), "four"))
    assert not any(turns.of(submission(session=it)) for it in ("one", "three", "four"))
    turns.add(finished("e", range(99), "five"))
    assert ids(turns.of(submission(session="five"))) == ["e"]


def test_forgotten_request_is_no_turn() -> None:
    turns = Turns(max_ids=100)
    turns.add(finished("a", range(40)))
    turns.add(finished("b", range(60)))
    turns.forget("b")
    turns.forget("unknown")
    assert ids(turns.of(submission())) == ["a"]
    turns.forget("a")
    assert not turns.of(submission())
    turns.add(finished("c", range(100), "other"))
    assert ids(turns.of(submission(session="other"))) == ["c"]
