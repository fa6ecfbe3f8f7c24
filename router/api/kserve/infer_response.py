"""Output of a request as tensors. Pure.

A response has the new output of one or several choices of a request, in the order of their
indices. A tensor of token ids or log probabilities concatenates the values of these choices. The
tensor ``num_output_tokens`` has the number of tokens of each choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from everlift.v1 import inference_pb2 as wire
from router.api.kserve.tensors import Scalar, Tensor

#: Parameter of each response of ModelStreamInfer; true in the last response to a request.
FINAL = "triton_final_response"
_FINISH_REASONS = {
    wire.FINISH_REASON_UNSPECIFIED: b"",
    wire.FINISH_REASON_STOP: b"stop",
    wire.FINISH_REASON_LENGTH: b"length",
}


@dataclass(slots=True)
class Part:
    """New output of one choice; ``finish_reason`` is empty if more output follows."""

    choice: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    finish_reason: bytes = b""
    stop_reason: str | int | None = None


class Answer:
    """Combined output of one or more messages of a request's stream.

    ``num_input_tokens`` is the number of prompt tokens. It is None until the last message of the
    stream, which contains it.
    """

    def __init__(self, *pieces: wire.GenerateResponse) -> None:
        self.num_input_tokens: int | None = None
        self._parts: dict[int, Part] = {}
        for piece in pieces:
            self.add(piece)

    def add(self, piece: wire.GenerateResponse) -> None:
        part = self._parts.setdefault(piece.choice, Part(piece.choice))
        part.text.append(piece.text)
        part.token_ids.extend(piece.token_ids)
        part.logprobs.extend(piece.logprobs)
        part.finish_reason = _FINISH_REASONS[piece.finish_reason] or part.finish_reason
        if (field := piece.WhichOneof("stop_reason")) is not None:
            part.stop_reason = getattr(piece, field)
        if piece.HasField("usage"):
            self.num_input_tokens = piece.usage.prompt_tokens

    @property
    def parts(self) -> list[Part]:
        return [self._parts[choice] for choice in sorted(self._parts)]

    @property
    def is_final(self) -> bool:
        """Return whether the answer includes the last message of the request's stream."""
        return self.num_input_tokens is not None

    @property
    def is_empty(self) -> bool:
        """Return whether the answer has neither output nor a finish reason nor the last message."""
        return not self.is_final and not any(
            part.token_ids or any(part.text) or part.finish_reason for part in self.parts
        )

    def tensors(self, names: frozenset[str], *, has_logprobs: bool) -> Iterator[Tensor]:
        """Yield the output tensors that are in ``names``, or all outputs if ``names`` is empty.

        Without ``has_logprobs``, tensors with log probabilities are omitted. Tensors whose values
        are not known yet are always omitted.
        """
        for output in OUTPUTS:
            is_available = has_logprobs or output.name not in LOGPROBS
            if is_available and (output.name in names or not names):
                if (values := output.values(self)) is not None:
                    yield Tensor(output.name, output.datatype, (len(values),), values)


@dataclass(frozen=True, slots=True)
class Output:
    """Description of an output tensor.

    ``values`` computes its values from an answer; it returns None if they are not known yet.
    """

    name: str
    datatype: str
    values: Callable[[Answer], Sequence[Scalar] | None]


def _texts(answer: Answer) -> Sequence[Scalar]:
    return ["".join(part.text).encode() for part in answer.parts]


def _token_ids(answer: Answer) -> Sequence[Scalar]:
    return [token for part in answer.parts for token in part.token_ids]


def _num_output_tokens(answer: Answer) -> Sequence[Scalar]:
    return [len(part.token_ids) for part in answer.parts]


def _choices(answer: Answer) -> Sequence[Scalar]:
    return [part.choice for part in answer.parts]


def _finish_reasons(answer: Answer) -> Sequence[Scalar]:
    return [part.finish_reason for part in answer.parts]


def _stop_reasons(answer: Answer) -> Sequence[Scalar]:
    """Return as JSON, for each choice, the stop string or token id that ended it, or null."""
    return [json.dumps(part.stop_reason).encode() for part in answer.parts]


def _num_input_tokens(answer: Answer) -> Sequence[Scalar] | None:
    return None if answer.num_input_tokens is None else [answer.num_input_tokens]


def _log_probs(answer: Answer) -> Sequence[Scalar]:
    return [token.logprob for part in answer.parts for token in part.logprobs]


def _alternatives(answer: Answer) -> Sequence[Scalar]:
    return [
        json.dumps(list(map(_by_token, part.token_ids, part.logprobs))).encode()
        for part in answer.parts
    ]


def _by_token(token: int, scores: wire.TokenLogprobs) -> dict[int, dict[str, float]]:
    found = {token: {"logprob": scores.logprob, "rank": scores.rank}}
    alternatives = zip(scores.top_ids, scores.top_logprobs, strict=True)
    for rank, (other, logprob) in enumerate(alternatives, start=1):
        found.setdefault(other, {"logprob": logprob, "rank": rank})
    return found


OUTPUTS = (
    Output("text_output", "BYTES", _texts),
    Output("output_ids", "INT32", _token_ids),
    Output("num_output_tokens", "UINT32", _num_output_tokens),
    Output("choice", "UINT32", _choices),
    Output("finish_reason", "BYTES", _finish_reasons),
    Output("stop_reason", "BYTES", _stop_reasons),
    Output("num_input_tokens", "UINT32", _num_input_tokens),
    Output("output_log_probs", "FP32", _log_probs),
    Output("logprobs", "BYTES", _alternatives),
)
NAMES = frozenset(output.name for output in OUTPUTS)
#: Outputs that exist only if log probabilities are requested.
LOGPROBS = frozenset({"output_log_probs", "logprobs"})
