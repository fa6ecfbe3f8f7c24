"""Complete choices, and their streams in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everlift.messages import FinishReason
from everlift.sampling import TokenLogprobs
from everlift.text import Stops, TextState
from everlift.v1 import inference_pb2 as pb
from router.requests.request import Choice, Output
from router.requests.tokenizer import Tokenizer


def finished(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    stops: Stops,
    top: Sequence[tuple[int, float]] = (),
    reason: FinishReason = FinishReason.STOP,
) -> Choice:
    output = Output(TextState(tokenizer, stops))
    scores = [TokenLogprobs(-1.0 - place, 1, tuple(top)) for place in range(len(tokens))]
    output.extend(tokens, scores)
    return Choice("r", 0, output, reason)


def pieces(choice: Choice, ends: Sequence[int]) -> Iterator[pb.GenerateResponse]:
    """Cut the choice at ``ends``, as a stream that is read while the choice grows."""
    total = len(choice.output)
    choice.is_complete, choice.readable = False, 0
    for end in sorted({min(end, total) for end in ends} - {0}):
        begin, choice.readable = choice.readable, end
        yield choice.piece(begin)
    begin, choice.readable = choice.readable, total
    choice.complete()
    yield choice.piece(begin)
