"""Progress of one answer: the output that was read, and the output that its client has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from everlift.errors import DataLoss
from everlift.hashes import TokenDigest
from everlift.messages import FinishReason
from everlift.v1 import inference_pb2 as pb
from router.api.http.event_id import BEGIN, Position, written

_FINISH_REASONS = {FinishReason.STOP.value: "stop", FinishReason.LENGTH.value: "length"}


class NewOutput(NamedTuple):
    """New output of a choice: the text and the tokens that one message of the stream adds.

    After a reconnection, ``known_text`` and the first ``num_known`` of ``tokens`` are output that
    the client had before; ``text`` is new. ``is_first``: the client has no output of the choice
    yet. ``is_known``: the client has all of the choice, including its end. ``prompt_logprobs`` are
    those of the prompt's tokens from the second one on, if requested.
    """

    choice: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[pb.TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    known_text: str = ""
    num_known: int = 0
    is_first: bool = False
    is_known: bool = False
    prompt_logprobs: Sequence[pb.TokenLogprobs] = ()


@dataclass(slots=True)
class Usage:
    """Token counts of one answer, summed over all of its requests.

    ``completion_tokens`` is the number of output tokens that were read so far. ``cached_tokens`` is
    the number of prompt tokens that were found in the prefix cache. It includes only requests whose
    usage was already reported, in the last message of their streams. ``reasoning_tokens`` is the
    number of output tokens that belong to the reasoning; None if the model writes none.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None


class Transcript:
    """Record of how much output a client has, of one or more requests with several choices each.

    Choices are numbered over all requests; those of the first request come first. ``resumed`` has
    the position in each choice up to which the client has the output; empty means the beginning.

    ``hides_output`` implements OpenAI's ``max_tokens`` of 0. The client receives each choice
    without tokens, with the finish reason ``length``. Internally, each choice has one output token,
    which is not sent to the client. This token costs no extra step: the last step of the prefill
    samples it from the logits of the prompt's last token. The worker, the ledger and recovery thus
    need no special case for a choice without tokens. The ledger, metrics and quotas count the
    token, and the context must have room for it. ``usage`` does not count it.
    """

    def __init__(
        self,
        name: str,
        num_requests: int,
        choices_each: int,
        resumed: Sequence[Position] = (),
        *,
        hides_output: bool = False,
    ) -> None:
        """Create the record; ``name`` is the request's name, which is written into event ids."""
        self.usage = Usage()
        #: time breakdown, if requested; of several requests, that of the last one to end
        self.spans: Sequence[pb.Span] = ()
        self.num_choices = num_choices = num_requests * choices_each
        self._name = name
        self._choices_each = choices_each
        self._hides_output = hides_output
        #: log probabilities of the prompts, by the index of the request
        self._prompt_logprobs: dict[int, Sequence[pb.TokenLogprobs]] = {}
        self._read = [BEGIN] * num_choices
        self._digests = [TokenDigest() for _ in range(num_choices)]
        #: client's position in each choice
        self._sent = list(resumed) or [BEGIN] * num_choices
        self._resumed = tuple(self._sent)
        #: positions in ``_sent`` as text; each event has all of them, but changes only one
        self._written = [str(position) for position in self._sent]
        #: choices for which the client's tokens were not compared with the output yet
        self._unverified = set(range(num_choices)) if resumed else set()

    @property
    def event_id(self) -> str:
        return written(self._name, self._written)

    @property
    def resume_headers(self) -> dict[str, str]:
        """Headers of a POST that continues the stream after the output that the client has.

        If the client has no output, the POST repeats the request under the same name.
        """
        headers = {"idempotency-key": self._name}
        if self._sent != [BEGIN] * self.num_choices:
            headers["last-event-id"] = self.event_id
        return headers

    @property
    def had_output(self) -> bool:
        """Return whether the client already had output when this stream began.

        If so, all requests of the call had already been accepted.
        """
        return self._resumed != (BEGIN,) * self.num_choices

    def read(self, request: int, piece: pb.GenerateResponse) -> NewOutput:
        """Process the next message of a request's stream, and return what it adds to its choice.

        ``request`` is the index of the request. Raises DataLoss if the client has different tokens,
        more tokens than the choice has, or an end before the last token of the choice.
        """
        choice = request * self._choices_each + piece.choice
        if not self._hides_output:
            self.usage.completion_tokens += len(piece.token_ids)
        if piece.prompt_logprobs:
            self._prompt_logprobs[request] = piece.prompt_logprobs
        if piece.HasField("usage"):
            self.usage.cached_tokens += piece.usage.cached_tokens
            self.spans = piece.timing.spans
        before, resumed = self._read[choice], self._resumed[choice]
        self._read[choice] = after = self._after(choice, before, piece)
        if after.is_end and after.tokens < resumed.tokens:
            raise _data_loss(choice, resumed, f"it ended after {after.tokens} tokens")
        if resumed.is_end and after.tokens > resumed.tokens:
            raise _data_loss(choice, resumed, "it did not end there")
        is_known = resumed.is_end
        prompt_logprobs = self._prompt_logprobs.get(request, ())
        is_first = self._sent[choice] == BEGIN
        if self._hides_output:
            reason = "length" if after.is_end else None
            return NewOutput(
                choice,
                "",
                (),
                (),
                reason,
                is_first=is_first,
                is_known=is_known,
                prompt_logprobs=prompt_logprobs,
            )
        known = len(piece.text) if is_known else max(0, resumed.characters - before.characters)
        return NewOutput(
            choice,
            piece.text[known:],
            piece.token_ids,
            piece.logprobs,
            _FINISH_REASONS.get(piece.finish_reason),
            _stop_reason(piece),
            piece.text[:known],
            min(max(0, resumed.tokens - before.tokens), len(piece.token_ids)),
            is_first=is_first,
            is_known=is_known,
            prompt_logprobs=prompt_logprobs,
        )

    def _after(self, choice: int, before: Position, piece: pb.GenerateResponse) -> Position:
        digest = self._digests[choice]
        tokens: Sequence[int] = piece.token_ids
        if choice in self._unverified:
            known = max(0, self._resumed[choice].tokens - before.tokens)
            digest.add(tokens[:known])
            if known <= len(tokens):
                self._compare(choice)
            tokens = tokens[known:]
        digest.add(tokens)
        return Position(
            before.tokens + len(piece.token_ids),
            before.characters + len(piece.text),
            digest.value,
            bool(piece.finish_reason),
        )

    def _compare(self, choice: int) -> None:
        resumed = self._resumed[choice]
        if self._digests[choice].value != resumed.digest:
            raise _data_loss(choice, resumed, "the client has different tokens before it")
        self._unverified.remove(choice)

    def mark_read(self, choice: int) -> None:
        """Set the client's position in a choice to the end of the output that was read so far."""
        self._sent[choice] = self._read[choice]
        self._written[choice] = str(self._read[choice])


def _stop_reason(piece: pb.GenerateResponse) -> str | int | None:
    match piece.WhichOneof("stop_reason"):
        case "stop_string":
            return piece.stop_string
        case "stop_token_id":
            return piece.stop_token_id
        case _:
            return None


def _data_loss(choice: int, resumed: Position, cause: str) -> DataLoss:
    return DataLoss(f"choice {choice} cannot be continued at token {resumed.tokens}: {cause}")


@dataclass(slots=True)
class Collected:
    """Complete choice, collected from the messages of its stream."""

    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[pb.TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, output: NewOutput) -> None:
        self.parts.append(output.text)
        self.tokens.extend(output.tokens)
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
