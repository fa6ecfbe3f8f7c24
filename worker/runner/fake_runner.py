"""Runner without a model, whose tokens show whether scheduler and block tables are correct.

Each position of the runner's simulated KV cache stores the token computed there and the position.
The next token is a hash of everything that a row's block table refers to. A wrong block, a wrong
start, a missing or stale computation, or any other fault that would corrupt attention yields a
token that differs from that of ``expected_tokens``. Log probabilities are another hash of the same
data. Rows are computed in order, so that a row can read what an earlier row has written.

Penalties, logit_bias and filters change the hash, so that every value yields other tokens. If any
of them is set, the boundary between prompt and output changes it too. A grammar is a
``FakeGrammar``.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Protocol, cast

from everlift.hashes import BLOCK_SIZE
from everlift.sampling import SamplingParams, TokenLogprobs
from worker.config import FakeModel
from worker.device.device_kind import DeviceKind
from worker.engine.limits import blocks_for
from worker.engine.plan import UNKNOWN, Admission, Launch, LaunchedStep, Plan, Row, RowResult
from worker.runner.banned_tokens import BannedTokens

_ENTRY = 2  # uint32: token, position
_ENTRY_BYTES = _ENTRY * array("I").itemsize
_NEVER_WRITTEN = 0xFFFFFFFF


class FakeGrammar(Protocol):
    """Grammar of the fake runner."""

    def allowed(self, output: Sequence[int]) -> Sequence[int]:
        """Return the tokens that may follow ``output``, at least one."""
        ...


class FakeRunner:
    """Runner without a model, whose steps take as long as the model's settings say.

    ``sleep`` is called with the duration of each step in seconds: by ``execute`` before it
    computes, and for a launched step by ``results``. ``faults`` maps step numbers to exceptions:
    such a step writes wrong data to the KV cache and then raises its exception.
    """

    def __init__(
        self,
        num_blocks: int,
        model: FakeModel,
        num_host_blocks: int = 0,
        sleep: Callable[[float], None] = time.sleep,
        faults: Mapping[int, Exception] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self._sleep = sleep
        self._faults = faults
        #: last sampled token by slot, for launched steps
        self._last_tokens: dict[int, int] = {}
        self._kv = _blocks(num_blocks)
        self._host = _blocks(num_host_blocks)
        self._slots: dict[int, _Slot] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._kv)

    @property
    def num_host_blocks(self) -> int:
        return len(self._host)

    @property
    def host_load_s(self) -> float:
        return 0.0

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._model.max_model_len

    @property
    def device_kind(self) -> DeviceKind:
        return DeviceKind.CPU

    @property
    def adapters(self) -> Mapping[str, str]:
        return {}

    @property
    def adapter_slots(self) -> None:
        return None

    def unready_slots(self) -> frozenset[int]:
        return frozenset()

    @property
    def launch(self) -> Launch | None:
        return self._launch if self._model.runs_ahead else None

    def execute(self, plan: Plan) -> list[RowResult]:
        self._take_time(plan)
        self._start_step(plan)
        return [self._compute(row) for row in plan.rows]

    def _launch(self, plan: Plan) -> LaunchedStep:
        self._start_step(plan)
        return FakeStep(
            lambda: [self._compute_launched(row) for row in plan.rows],
            lambda: self._take_time(plan),
        )

    def _take_time(self, plan: Plan) -> None:
        if seconds := self._model.step_time + self._model.token_time * plan.num_tokens:
            self._sleep(seconds)

    def _start_step(self, plan: Plan) -> None:
        for admission in plan.admissions:
            self._slots[admission.slot] = _Slot.of(admission, self._model)
        for block, place in plan.saves:
            self._host[place][:] = self._kv[block]
        for block, place in plan.loads:
            self._kv[block][:] = self._host[place]
        if (fault := self._faults.get(plan.step)) is not None:
            self._spoil(plan)
            raise fault

    def release(self, slots: Collection[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    def close(self) -> None:
        self._kv.clear()

    def _spoil(self, plan: Plan) -> None:
        rubbish = array("I", [_NEVER_WRITTEN]) * (BLOCK_SIZE * _ENTRY)
        for copy in plan.saves:
            self._host[copy.host_block][:] = rubbish
        for copy in plan.loads:
            self._kv[copy.block][:] = rubbish
        for row in plan.rows:
            self._write(replace(row, tokens=(_NEVER_WRITTEN,) * len(row.tokens)))
            self._slots.pop(row.slot, None)

    def _compute_launched(self, row: Row) -> RowResult:
        if row.tokens[0] == UNKNOWN:
            row = replace(row, tokens=(self._last_tokens[row.slot],))
        result = self._compute(row)
        if result.tokens:
            self._last_tokens[row.slot] = result.tokens[-1]
        return result

    def _compute(self, row: Row) -> RowResult:
        self._write(row)
        cache, slot = self._read(row), self._slots[row.slot]
        scores = slot.scored(cache, row) if row.scores_prompt else ()
        if not row.samples:
            return RowResult(prompt_logprobs=tuple(scores))
        tokens, logprobs = slot.sample(cache, row)
        return RowResult(tuple(tokens), tuple(logprobs), tuple(scores))

    def _write(self, row: Row) -> None:
        for position, token in enumerate(row.tokens, row.start):
            at = position % BLOCK_SIZE * _ENTRY
            block = self._kv[row.block_table[position // BLOCK_SIZE]]
            block[at : at + _ENTRY] = array("I", (token, position))

    def _read(self, row: Row) -> bytes:
        end = row.start + len(row.tokens)
        blocks = (self._kv[block].tobytes() for block in row.block_table[: blocks_for(end)])
        return b"".join(blocks)[: end * _ENTRY_BYTES]


class FakeStep:
    """LaunchedStep of the fake runner.

    ``compute`` computes the rows and is called by ``sample``. ``wait`` spends the step's time and
    is called by ``results``.
    """

    def __init__(self, compute: Callable[[], list[RowResult]], wait: Callable[[], None]) -> None:
        self._compute = compute
        self._wait = wait
        self._results: list[RowResult] = []

    def sample(self) -> None:
        self._results = self._compute()

    def results(self) -> list[RowResult]:
        self._wait()
        return self._results


def _blocks(count: int) -> list[array[int]]:
    empty = array("I", [_NEVER_WRITTEN]) * (BLOCK_SIZE * _ENTRY)
    return [array("I", empty) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class _Slot:
    model: FakeModel
    sampling: SamplingParams
    choice: int
    stop_token_ids: Collection[int]
    prompt: Sequence[int]
    twist: bytes = b""
    grammar: FakeGrammar | None = None

    @classmethod
    def of(cls, admission: Admission, model: FakeModel) -> _Slot:
        return cls(
            model=model,
            sampling=admission.sampling,
            choice=admission.choice,
            stop_token_ids=admission.stop_token_ids,
            prompt=admission.tokens[: admission.num_prompt],
            twist=_twist(admission.sampling, admission.num_prompt),
            grammar=cast("FakeGrammar | None", admission.grammar),
        )

    def sample(self, cache: bytes, row: Row) -> tuple[list[int], list[TokenLogprobs]]:
        """Sample the row's accepted drafts and one more token; return them with log probabilities.

        ``cache`` has the entries of the simulated KV cache up to the row's last token. The list of
        log probabilities is empty unless the sequence requests them.
        """
        end = row.start + len(row.tokens)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for known in range(end - row.num_drafts, end + 1):
            before = cache[: known * _ENTRY_BYTES]
            token = self.next_token(before, known - len(self.prompt))
            tokens.append(token)
            if self.sampling.logprobs is not None:
                logprobs.append(self.logprobs(before, token, self.sampling.logprobs))
            if known == end or token != row.tokens[known - row.start]:
                break
        return tokens, logprobs

    def scored(self, cache: bytes, row: Row) -> Iterator[TokenLogprobs]:
        """Yield the log probabilities of each prompt token whose preceding token is in ``row``.

        The sequence must request prompt log probabilities.
        """
        assert self.sampling.prompt_logprobs is not None, "no prompt logprobs are requested"
        end = row.start + len(row.tokens) - row.num_drafts
        for position in range(row.start + 1, min(end + 1, len(self.prompt))):
            before = cache[: position * _ENTRY_BYTES]
            yield self.logprobs(before, self.prompt[position], self.sampling.prompt_logprobs)

    def next_token(self, cache: bytes, position: int) -> int:
        """Return the output token at ``position`` of the output.

        ``cache`` has the entries of the simulated KV cache of all tokens before it.
        """
        token = self._preferred_token(cache, position)
        if self.grammar is not None:
            follow = self.grammar.allowed(_tokens(cache)[len(self.prompt) :])
            return follow[token % len(follow)]
        vocab_size, sampling = self.model.vocab_size, self.sampling
        if position >= sampling.min_tokens and not sampling.has_restrictions:
            return token
        banned = BannedTokens(sampling.banned_sequences, _tokens(cache)[len(self.prompt) :]).after()
        if position < sampling.min_tokens:
            banned |= {*self.stop_token_ids}
        allowed = sampling.allowed_token_ids or range(vocab_size)
        following = (i % vocab_size for i in range(token, token + vocab_size))
        return next((i for i in following if i in allowed and i not in banned), token)

    def _preferred_token(self, cache: bytes, position: int) -> int:
        model = self.model
        digest = blake2b(cache, digest_size=24)
        digest.update(self.twist)
        if self.sampling.temperature > 0:
            digest.update(array("Q", (self.sampling.seed, self.choice, position)).tobytes())
        value, chance, surprise = array("Q", digest.digest())
        if model.eos_one_in and chance % model.eos_one_in == 0:
            return model.eos_token_id
        if model.surprise_one_in and surprise % model.surprise_one_in:
            value = model.eos_token_id + 1
        token = value % model.vocab_size
        if token == model.eos_token_id:
            return (token + 1) % model.vocab_size
        return token

    def logprobs(self, cache: bytes, token: int, most: int) -> TokenLogprobs:
        """Return the log probabilities of ``token`` after ``cache`` with ``most`` alternatives.

        ``cache`` has the entries of all tokens before it. The k-th most probable token has k times
        the log probability of the most probable one; all values are exact in float32.
        """
        digest = blake2b(cache, digest_size=16, person=b"logprobs")
        distance, place = array("Q", digest.digest())
        vocab_size = self.model.vocab_size
        step = -(distance % 64 + 1) / 64
        rank = 1 + place % min(8, vocab_size)
        ranks = range(1, min(most, vocab_size - 1) + 1)
        top = [((token + at) % vocab_size, step * at) for at in ranks]
        if rank in ranks:
            top[rank - 1] = (token, step * rank)
        return TokenLogprobs(step * rank, rank, tuple(top))


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    model: FakeModel | None = None,
    sampling: SamplingParams | None = None,
    choice: int = 0,
    stop_token_ids: Iterable[int] = (),
    grammar: FakeGrammar | None = None,
) -> list[int]:
    """Return the first ``count`` tokens that a correct worker generates after ``prompt``.

    There are fewer if a stop token is generated, which is then the last. Without ``sampling`` the
    tokens are greedy.
    """
    sampling = sampling or SamplingParams(temperature=0.0)
    stops = frozenset(stop_token_ids)
    twist = _twist(sampling, len(prompt))
    slot = _Slot(model or FakeModel(), sampling, choice, stops, prompt, twist, grammar)
    cache = array("I", _entries(prompt, start=0))
    output: list[int] = []
    while len(output) < count:
        token = slot.next_token(cache.tobytes(), len(output))
        cache.extend(_entries([token], start=len(prompt) + len(output)))
        output.append(token)
        if token in stops and len(output) > sampling.min_tokens:
            break
    return output


def expected_logprobs(
    tokens: Sequence[int], first: int, most: int, model: FakeModel | None = None
) -> list[TokenLogprobs]:
    """Return the log probabilities that a correct worker reports for ``tokens[first:]``.

    ``tokens`` are the prompt followed by the output; prompt and output tokens are scored alike.
    Each entry has ``most`` alternatives.
    """
    slot = _Slot(model or FakeModel(), SamplingParams(), 0, frozenset(), ())
    cache = array("I", _entries(tokens, start=0)).tobytes()
    return [
        slot.logprobs(cache[: position * _ENTRY_BYTES], tokens[position], most)
        for position in range(first, len(tokens))
    ]


def _twist(sampling: SamplingParams, num_prompt: int) -> bytes:
    """Return what the sampling parameters add to the hash for the next token.

    The result depends on penalties, logit_bias, top_p, top_k, min_p and ``num_prompt``, the number
    of prompt tokens. The result is empty if all these parameters have their defaults.
    """
    shape = (
        *(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        *(sampling.top_p, sampling.top_k, sampling.min_p, sampling.logit_bias),
    )
    return b"" if shape == _PLAIN else repr((*shape, num_prompt)).encode()


_PLAIN = (1.0, 0.0, 0.0, 1.0, 0, 0.0, ())


def _tokens(cache: bytes) -> Sequence[int]:
    entries = array("I")
    entries.frombytes(cache)
    return entries[::_ENTRY]


def _entries(tokens: Sequence[int], start: int) -> Iterable[int]:
    return (value for at, token in enumerate(tokens, start) for value in (token, at))
