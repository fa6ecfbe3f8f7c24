"""Sequences: their conversion from a Start, and their end by tokens."""

import pytest

from everlift.errors import EmptyPrompt, InvalidRequest, OutOfRange, PromptTooLong
from everlift.hashes import block_hashes
from everlift.images import Image
from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from tests.support.worker.worker_support import limits, prompt, sequence, start
from worker.engine.limits import blocks_for
from worker.engine.outcome import SequenceKey, Stop
from worker.engine.plan import Row
from worker.engine.sequence import Sequence

LIMITS = limits(num_blocks=4, max_model_len=100)
#: Other ranks wait for no confirmations, and their sequences have all tokens.
OMITTED_BY_TO_START = {"confirm_first_step", "omitted_prefix"}


def test_sequence_from_start_round_trips() -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=9)
    message = start(
        *(7, [1, 2, 3], 10),
        output=[4, 5],
        choice=1,
        sampling=sampling,
        stop_token_ids=[8],
        salt=b"s",
        num_computed=4,
        priority=-2,
        predicted_tokens=6,
        session=1 << 63,
        expected_cached_tokens=3,
        adapter="sql",
    )
    message.adapter_digest, message.adapter_source = "digest", "sql=org/sql"
    image = Image(b"digest", b"file")
    message.images.add(digest=image.digest, data=image.data)
    fields = {field.name for field, _ in message.ListFields()}
    assert fields == {*session_pb2.Start.DESCRIPTOR.fields_by_name} - OMITTED_BY_TO_START
    this = Sequence.from_start(message, LIMITS, images=(image,))
    assert (this.key, this.request_id) == (SequenceKey(7, 1), "request-7")
    assert (this.tokens, this.num_prompt, this.num_output) == ([1, 2, 3, 4, 5], 3, 2)
    assert (this.max_tokens, this.sampling, this.salt) == (10, sampling, b"s")
    assert this.stop_token_ids == {8}
    assert (this.num_known, this.num_computed, this.remaining) == (5, 0, 5)
    assert (this.num_computed_before, this.priority, this.session) == (4, -2, 1 << 63)
    assert this.to_start() == message


def test_sequence_computed_before_is_capped_at_known() -> None:
    assert sequence(LIMITS, 1, [1, 2, 3], num_computed=900).num_computed_before == 3


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        (start(0, [1]), InvalidRequest, "epoch"),
        (start(1, []), EmptyPrompt, "no tokens"),
        (start(1, [], output=[1]), EmptyPrompt, "no tokens"),
        (start(1, [1], max_tokens=0), OutOfRange, "max_tokens must be at least 1"),
        (
            start(1, [1], max_tokens=1, output=[2, 3]),
            OutOfRange,
            "the 2 output tokens so far, not 1",
        ),
        (start(1, [1024]), OutOfRange, "vocabulary"),
        (start(1, [1], output=[1024]), OutOfRange, "vocabulary"),
        (start(1, prompt(100)), PromptTooLong, "100 prompt tokens .* context of 100"),
        (
            start(1, prompt(99), output=[1, 2]),
            PromptTooLong,
            "99 prompt tokens and 2 output tokens",
        ),
    ],
)
def test_sequence_from_invalid_start_is_refused(
    message: object, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        Sequence.from_start(message, LIMITS)  # type: ignore[arg-type]


def test_sequence_larger_than_pool_is_refused() -> None:
    small = limits(num_blocks=2, max_model_len=1000)
    Sequence.from_start(start(1, prompt(63)), small)
    with pytest.raises(PromptTooLong, match=r"64 tokens need 3 blocks of KV cache; .* has 2"):
        Sequence.from_start(start(1, prompt(64)), small)


@pytest.mark.parametrize(
    ("output", "stop"),
    [
        ([], None),
        ([5], None),
        ([5, 7], Stop.EOS),
        ([7, 5], None),
        ([5, 5, 5], Stop.LENGTH),
        ([5, 5, 7], Stop.EOS),
    ],
)
def test_sequence_stops_at_stop_token_or_length(output: list[int], stop: Stop | None) -> None:
    this = sequence(LIMITS, 1, [7], max_tokens=3, output=output, stop_token_ids=[7])
    assert this.stop(LIMITS) is stop


@pytest.mark.parametrize(
    ("output", "stop"),
    [([7], None), ([7, 7], None), ([5, 5, 7], Stop.EOS), ([7, 7, 5, 5], Stop.LENGTH)],
)
def test_stop_token_within_min_tokens_is_ignored(output: list[int], stop: Stop | None) -> None:
    sampling = SamplingParams(min_tokens=2)
    fields = {"max_tokens": 4, "stop_token_ids": [7], "sampling": sampling}
    assert sequence(LIMITS, 1, [1], output=output, **fields).stop(LIMITS) is stop


def test_sequence_stops_at_context_end() -> None:
    assert sequence(LIMITS, 1, prompt(98), output=[1]).stop(LIMITS) is None
    assert sequence(LIMITS, 1, prompt(98), output=[1, 1]).stop(LIMITS) is Stop.LENGTH


def test_row_samples_only_at_last_known_token() -> None:
    this = sequence(LIMITS, 1, [1, 2, 3], output=[4], choice=2)
    this.num_computed, this.slot, this.block_table = 1, 5, (9,)
    assert this.row(2) == Row(5, (2, 3), 1, (9,), samples=False)
    assert this.row(3) == Row(5, (2, 3, 4), 1, (9,), samples=True)
    assert this.row(3, (8, 7)) == Row(5, (2, 3, 4, 8, 7), 1, (9,), samples=True, num_drafts=2)


def test_sequence_block_hashes_match_router() -> None:
    roomy = limits()
    this = sequence(roomy, 1, prompt(100), salt=b"tenant")
    assert [this.block_hash(i) for i in (2, 0, 1)] == [
        list(block_hashes(prompt(100), b"tenant"))[i] for i in (2, 0, 1)
    ]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks
