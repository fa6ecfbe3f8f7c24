"""Measurement of how long an engine's steps of known sizes take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from statistics import median

from cluster.simulator.hardware.fit import Step
from everlift.sampling import SamplingParams
from everlift.step_time import StepSize
from everlift.v1 import session_pb2
from worker.engine.engine import Engine
from worker.engine.limits import Limits, blocks_for
from worker.engine.outcome import Abort
from worker.engine.sequence import Sequence as EngineSequence

#: Number of steps that are measured of each prompt size and decoding batch; their median is used.
#: Each chunk of a long prompt is measured once.
_REPETITIONS = 5
#: Maximum number of steps in which all prompts of a decoding batch are prefilled.
_MOST_STEPS = 32
#: Output tokens of each sequence of a decoding batch: one per measured step, and enough for the
#: first sequences to decode while the last prompts are computed.
_OUTPUTS = _REPETITIONS + 2 * _MOST_STEPS
_PROMPTS = (1, 8, 32, 128, 512, 2048, 8192)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (32, 256, 1024, 4096)


class Measurement:
    """Measurement of an engine's steps: prompts, chunks of a long prompt, and decoding batches."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._limits: Limits = engine.limits
        self._clock = clock
        self._epochs = count(1)
        self._rng = Random(0)

    def __len__(self) -> int:
        """Return the number of steps that ``steps`` yields."""
        chunks = self._chunked // self._budget - 1 if self._chunked else 0
        return len(self._prompts()) + chunks + len(self._batches())

    def steps(self) -> Iterator[Step]:
        """Run the steps on the engine, and yield the size and the duration of each measured one.

        The first run of each prompt size and the first chunk are warm-up and are not yielded.
        """
        for tokens in self._prompts():
            yield _median([self._prompt(tokens)[-1] for _ in range(_REPETITIONS + 1)][1:])
        if self._chunked:
            yield from self._prompt(self._chunked)[1:]
        for rows, context in self._batches():
            yield self._decoding(rows, context)

    @property
    def _budget(self) -> int:
        return self._limits.max_num_batched_tokens

    @property
    def _longest(self) -> int:
        return self._limits.max_model_len - _OUTPUTS

    @property
    def _chunked(self) -> int:
        budget, longest = self._budget, self._longest
        return min(longest, 8 * budget) // budget * budget if longest >= 2 * budget else 0

    def _prompts(self) -> list[int]:
        return [*_up_to(min(self._budget, self._longest), _PROMPTS)]

    def _batches(self) -> list[tuple[int, int]]:
        return [
            (rows, context)
            for context in _up_to(self._longest, _CONTEXTS)
            for rows in _up_to(self._most_rows(context), _ROWS)
        ]

    def _most_rows(self, context: int) -> int:
        """Return the number of sequences of ``context`` prompt tokens that can decode at once.

        The KV cache must have room for all prompts and outputs. The token budget must suffice to
        prefill all prompts within ``_MOST_STEPS`` steps, in which earlier sequences already decode.
        """
        blocks = self._limits.num_blocks - self._limits.watermark_blocks
        in_cache = blocks // blocks_for(context + _OUTPUTS)
        in_budget = _MOST_STEPS * self._limits.max_num_batched_tokens // (context + _MOST_STEPS)
        return min(self._limits.max_num_seqs, in_cache, in_budget)

    def _prompt(self, tokens: int) -> list[Step]:
        epoch = self._add(tokens, max_tokens=1)
        budget, steps = self._limits.max_num_batched_tokens, []
        for start in range(0, tokens, budget):
            chunk = min(budget, tokens - start)
            pairs = chunk * start + chunk * (chunk + 1) / 2
            steps.append(Step(StepSize(1, chunk, start + chunk, pairs), self._step_s()))
        self._engine.abort(Abort(epoch))
        return steps

    def _decoding(self, rows: int, context: int) -> Step:
        epochs = [self._add(context, max_tokens=_OUTPUTS) for _ in range(rows)]
        while any(not sequence.num_output for sequence in self._engine.sequences()):
            self._engine.step()
        known = sum(sequence.num_known for sequence in self._engine.sequences())
        seconds = [self._step_s() for _ in range(_REPETITIONS)]
        for epoch in epochs:
            self._engine.abort(Abort(epoch))
        middle = known + rows * (_REPETITIONS // 2)
        return Step(StepSize(rows, rows, middle, middle), median(seconds))

    def _add(self, prompt_tokens: int, max_tokens: int) -> int:
        epoch = next(self._epochs)
        start = session_pb2.Start(
            epoch=epoch,
            prompt_ids=self._rng.choices(range(self._limits.vocab_size), k=prompt_tokens),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0).to_proto(),
        )
        self._engine.add(EngineSequence.from_start(start, self._limits))
        return epoch

    def _step_s(self) -> float:
        began = self._clock()
        self._engine.step()
        return self._clock() - began


def _median(steps: Sequence[Step]) -> Step:
    return Step(steps[0].size, median(step.seconds for step in steps))


def _up_to(most: int, numbers: Sequence[int]) -> Iterator[int]:
    yield from (number for number in numbers if number < most)
    if 0 < most <= numbers[-1]:
        yield most
