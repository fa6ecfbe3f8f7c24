"""Messages are decoded as they were encoded, for any fragmentation by the socket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.grammar.messages import (
    CompileResult,
    Frames,
    Reply,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)

NUMBERS = st.integers(0, 2**32 - 1)
REPLIES = st.lists(
    st.builds(Reply, st.booleans(), NUMBERS, st.binary(), st.floats(min_value=0, max_value=1e6))
)


@given(REPLIES, st.integers(1, 9))
def test_reply_messages_survive_any_split(replies: list[Reply], size: int) -> None:
    sent = b"".join(map(encode_reply, replies))
    frames = Frames()
    chunks = [sent[at : at + size] for at in range(0, len(sent), size)]
    got = [decode_reply(frame) for chunk in chunks for frame in frames.feed(chunk)]
    assert got == replies


def test_request_message_round_trips() -> None:
    request = {"do": "compile", "kind": "choice", "texts": ["é", "\0"]}
    assert [decode_request(f) for f in Frames().feed(encode_request(request))] == [request]


def test_frames_raise_eof_on_empty_read() -> None:
    with pytest.raises(EOFError):
        next(Frames().feed(b""))


def test_compiled_message_round_trips() -> None:
    compiled = CompileResult(num_bytes=9, eos_token_ids=(1, 2))
    assert CompileResult.decode(compiled.encode()) == compiled
