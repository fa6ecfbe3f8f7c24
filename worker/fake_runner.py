"""A runner without a model: its tokens show whether scheduler and block tables are right.

Each position of its simulated KV cache holds the token that was computed there and its position.
The next token is a hash over all that a row's block table leads to, so a wrong block, a wrong
start, a missing or stale computation, anything that would spoil attention, makes another token
than ``expected_tokens`` says.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from everlift.blockhash import BLOCK_SIZE
from everlift.sampling import SamplingParams
from worker.config import FakeModel
from worker.limits import blocks_for
from worker.plan import Admission, Plan, Row, RowResult

_ENTRY = 2  # uint32: token, position
_NEVER_WRITTEN = 0xFFFFFFFF


class FakeRunner:
    """A Runner, whose steps take ``model.step_time`` seconds."""

    def __init__(self, num_blocks: int, model: FakeModel) -> None:
        self._model = model
        empty = array("I", [_NEVER_WRITTEN]) * (BLOCK_SIZE * _ENTRY)
        self._kv = [array("I", empty) for _ in range(num_blocks)]
        self._slots: dict[int, Admission] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._kv)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._model.max_model_len

    @property
    def num_host_blocks(self) -> int:
        return 0

    def execute(self, plan: Plan) -> list[RowResult]:
        if self._model.step_time:
            time.sleep(self._model.step_time)
        for admission in plan.admissions:
            self._slots[admission.slot] = admission
        # All rows are written before any is read, as in a layer of attention.
        for row in plan.rows:
            self._write(row)
        return [self._draw(row) if row.samples else RowResult() for row in plan.rows]

    def close(self) -> None:
        self._kv.clear()

    def _write(self, row: Row) -> None:
        for position, token in enumerate(row.tokens, row.start):
            at = position % BLOCK_SIZE * _ENTRY
            block = self._kv[row.block_table[position // BLOCK_SIZE]]
            block[at : at + _ENTRY] = array("I", (token, position))

    def _draw(self, row: Row) -> RowResult:
        slot, end = self._slots[row.slot], row.start + len(row.tokens)
        blocks = (self._kv[block].tobytes() for block in row.block_table[: blocks_for(end)])
        cache = b"".join(blocks)[: end * _ENTRY * array("I").itemsize]
        position = end - slot.num_prompt
        return RowResult((_next_token(cache, self._model, slot.sampling, slot.choice, position),))


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    model: FakeModel | None = None,
    sampling: SamplingParams | None = None,
    choice: int = 0,
    stop_token_ids: Iterable[int] = (),
) -> list[int]:
    """The first ``count`` tokens after ``prompt`` that a right worker makes, fewer where a stop
    token comes. Greedy unless ``sampling`` says otherwise."""
    model = model or FakeModel()
    sampling = sampling or SamplingParams(temperature=0.0)
    stops = frozenset(stop_token_ids)
    cache = array("I", _entries(prompt, start=0))
    output: list[int] = []
    while len(output) < count and not stops.intersection(output[-1:]):
        token = _next_token(cache.tobytes(), model, sampling, choice, len(output))
        cache.extend(_entries([token], start=len(prompt) + len(output)))
        output.append(token)
    return output


def _entries(tokens: Sequence[int], start: int) -> Iterable[int]:
    return (value for at, token in enumerate(tokens, start) for value in (token, at))


def _next_token(
    cache: bytes, model: FakeModel, sampling: SamplingParams, choice: int, position: int
) -> int:
    digest = blake2b(cache, digest_size=16)
    if sampling.temperature > 0:
        digest.update(array("Q", (sampling.seed, choice, position)).tobytes())
    value, chance = array("Q", digest.digest())
    if model.eos_one_in and chance % model.eos_one_in == 0:
        return model.eos_token_id
    token = value % model.vocab_size
    if token == model.eos_token_id:
        return (token + 1) % model.vocab_size
    return token
