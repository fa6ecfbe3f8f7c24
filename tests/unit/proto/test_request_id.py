from __future__ import annotations

from everlift.request_id import (
    check_request_id,
    in_session,
    is_named,
    shard_key,
    unnamed_request_id,
)


def test_shard_key_is_the_same_in_one_session() -> None:
    ids = [in_session(name, "chat 1") for name in ("a", "b", unnamed_request_id("1"))]
    keys = {shard_key(each) for each in (*ids, f"{ids[0]}:0", f"{ids[0]}:17")}
    assert len(keys) == 1
    assert keys != {shard_key(in_session("a", "chat 2"))}
    assert keys != {shard_key(f"tenant/{ids[0]}")}
    assert shard_key(f"tenant/{ids[0]}") == shard_key(f"tenant/{ids[1]}")


def test_shard_key_of_other_ids_is_the_id() -> None:
    for each in ("a", "a:1", "tenant/a:b:c"):
        assert shard_key(each) == each


def test_session_tag_keeps_an_id_valid() -> None:
    assert in_session("a", "") == "a"
    tagged = in_session(unnamed_request_id("1"), "ä" * 64)
    assert check_request_id(tagged) == tagged
    assert not is_named(tagged)
