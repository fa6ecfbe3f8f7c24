"""Sampling parameters, grammars and log probabilities of requests. Pure.

``SamplingParams`` and ``Grammar`` are checked on construction, so that every instance is valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, Self, get_args

from everlift.checks import Range, limit_plus_one
from everlift.errors import GrammarTooLarge, InvalidRequest, LogitBiasTooLarge, OutOfRange
from everlift.v1 import inference_pb2 as pb

MAX_TOP_K = 1 << 20
_OptionalField = Literal[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "prompt_logprobs",
]
#: Fields that have the same name and type in the protobuf message, where they are optional.
_OPTIONAL_FIELDS: tuple[_OptionalField, ...] = get_args(_OptionalField)

#: The same limit as in OpenAI's API.
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_ALLOWED_TOKENS = 1 << 14
MAX_BANNED_SEQUENCES = 128
MAX_BANNED_SEQUENCE_TOKENS = 256

#: Valid ranges of the numeric sampling fields. They are the same in every API.
RANGES: Mapping[str, Range] = {
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, exclusive_low=True),
    # Both -1 and 0 mean that there is no limit.
    "top_k": Range(-1, MAX_TOP_K),
    "min_p": Range(0.0, 1.0),
    # A negative seed stands for the unsigned integer with the same 64 bits.
    "seed": Range(-(1 << 63), (1 << 64) - 1),
    "repetition_penalty": Range(0.01, 100.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "min_tokens": Range(0, 1 << 30),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
}
_TOKEN_IDS = Range(0, (1 << 32) - 1)
_BIASES = Range(-100.0, 100.0)


def unsigned_seed(seed: int) -> int:
    """Return ``seed`` modulo 2^64, which turns a negative seed into an unsigned one."""
    return seed % (1 << 64)


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    #: GBNF grammar whose start rule is called "root"
    EBNF = "ebnf"
    #: one of a list of texts
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on the form of an output.

    ``texts`` contains one JSON schema, regular expression or EBNF grammar, or the list of choices.
    The constructor raises InvalidRequest for an empty text, and GrammarTooLarge for too many texts
    or too many bytes. It does not check whether the grammar compiles, because only a worker can
    compile it.
    """

    kind: GrammarKind
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise InvalidRequest(f"the grammar's {self.kind.value} is empty", field="grammar")
        if sum(len(text.encode()) for text in self.texts) > MAX_GRAMMAR_BYTES:
            raise GrammarTooLarge(
                f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes", field="grammar"
            )
        if len(self.texts) > MAX_CHOICES:
            raise GrammarTooLarge(
                f"the grammar has more than {MAX_CHOICES} choices", field="grammar"
            )

    @classmethod
    def from_proto(cls, message: pb.Grammar) -> Self:
        form = message.WhichOneof("form")
        if form is None:
            forms = ", ".join(kind.value for kind in GrammarKind)
            raise InvalidRequest(f"grammar must have one of {forms}", field="grammar")
        kind = GrammarKind(form)
        if kind is GrammarKind.CHOICE:
            return cls(kind, limit_plus_one(message.choice.texts, MAX_CHOICES))
        return cls(kind, (getattr(message, form),))

    def to_proto(self) -> pb.Grammar:
        if self.kind is GrammarKind.CHOICE:
            return pb.Grammar(choice=pb.Choices(texts=self.texts))
        message = pb.Grammar()
        setattr(message, self.kind.value, self.texts[0])
        return message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request.

    ``temperature`` 0 selects greedy decoding, and ``top_k`` 0 or -1 sets no limit. ``logit_bias``
    contains pairs of a token id and a bias, each token id at most once. Only
    ``allowed_token_ids`` are sampled; empty means all. The output contains none of
    ``banned_sequences``, which are sequences of token ids. ``logprobs`` and
    ``prompt_logprobs`` are the numbers of alternative tokens that are reported besides each
    token's own log probability; None disables the report. The constructor raises OutOfRange if a
    value is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, valid in RANGES.items():
            if (value := getattr(self, name)) is not None:
                valid.check(name, value)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        object.__setattr__(self, "seed", unsigned_seed(self.seed))
        self._check_bias()
        self._check_restrictions()

    def _check_restrictions(self) -> None:
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
            raise OutOfRange(
                f"allowed_token_ids has more than {MAX_ALLOWED_TOKENS} tokens",
                field="allowed_token_ids",
            )
        for token in self.allowed_token_ids:
            _TOKEN_IDS.check("a token of allowed_token_ids", token, field="allowed_token_ids")
        sequences, most = self.banned_sequences, MAX_BANNED_SEQUENCE_TOKENS
        if len(sequences) > MAX_BANNED_SEQUENCES or any(len(each) > most for each in sequences):
            raise OutOfRange(
                f"banned_sequences may have at most {MAX_BANNED_SEQUENCES} sequences of at most "
                f"{most} tokens",
                field="banned_sequences",
            )
        if not all(sequences):
            raise InvalidRequest(
                "a sequence of banned_sequences is empty", field="banned_sequences"
            )

    @property
    def has_restrictions(self) -> bool:
        """Return whether ``allowed_token_ids`` or ``banned_sequences`` excludes tokens.

        Exclusions by the grammar and ``min_tokens`` do not count.
        """
        return bool(self.allowed_token_ids or self.banned_sequences)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise LogitBiasTooLarge(
                f"logit_bias has more than {MAX_LOGIT_BIAS} tokens", field="logit_bias"
            )
        for token, bias in self.logit_bias:
            _TOKEN_IDS.check("a token of logit_bias", token, field="logit_bias")
            _BIASES.check("logit_bias", bias)

    @property
    def has_penalties(self) -> bool:
        """Return whether any penalty is in effect, so that sampling depends on earlier tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @classmethod
    def from_proto(
        cls, message: pb.Sampling, seed: int, defaults: SamplingParams | None = None
    ) -> SamplingParams:
        """Return the parameters of ``message``.

        ``seed`` is used if the message sets none. The values of ``defaults`` are used for the other
        optional fields that the message does not set. Raises InvalidRequest if a value is invalid.
        """
        given = {
            name: getattr(message, name) for name in _OPTIONAL_FIELDS if message.HasField(name)
        }
        return replace(
            defaults or cls(),
            **{"seed": seed} | given,
            logit_bias=tuple(sorted(limit_plus_one(message.logit_bias.items(), MAX_LOGIT_BIAS))),
            min_tokens=message.min_tokens,
            grammar=Grammar.from_proto(message.grammar) if message.HasField("grammar") else None,
            allowed_token_ids=limit_plus_one(message.allowed_token_ids, MAX_ALLOWED_TOKENS),
            banned_sequences=tuple(
                limit_plus_one(sequence.ids, MAX_BANNED_SEQUENCE_TOKENS)
                for sequence in limit_plus_one(message.banned_sequences, MAX_BANNED_SEQUENCES)
            ),
        )

    def to_proto(self) -> pb.Sampling:
        """Return the protobuf message, in which only the fields that are None stay unset."""
        return pb.Sampling(
            **{name: getattr(self, name) for name in _OPTIONAL_FIELDS},
            logit_bias=dict(self.logit_bias),
            min_tokens=self.min_tokens,
            grammar=self.grammar.to_proto() if self.grammar is not None else None,
            allowed_token_ids=self.allowed_token_ids,
            banned_sequences=[pb.TokenIds(ids=sequence) for sequence in self.banned_sequences],
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token before temperature, penalties and filters are applied.

    ``rank`` is 1 for the most probable token of the vocabulary. ``top`` lists the most probable
    tokens as pairs of token id and log probability, in descending order of probability.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_proto(cls, message: pb.TokenLogprobs) -> Self:
        top = zip(message.top_ids, message.top_logprobs, strict=True)
        return cls(message.logprob, message.rank, tuple(top))

    def to_proto(self) -> pb.TokenLogprobs:
        return pb.TokenLogprobs(
            logprob=self.logprob,
            rank=self.rank,
            top_ids=[token for token, _ in self.top],
            top_logprobs=[logprob for _, logprob in self.top],
        )
