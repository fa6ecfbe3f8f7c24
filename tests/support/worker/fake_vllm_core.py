"""Core that schedules like vLLM and computes the tokens of the fake runner.

A sequence with an adapter has the output of a prompt that begins with the adapter's name. A
sequence with images has that of a prompt with the images' tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everlift.errors import InvalidRequest
from everlift.hashes import BLOCK_SIZE
from everlift.images import Image
from everlift.sampling import TokenLogprobs
from worker.engine.blocks import NO_CHANGES, ChunkChanges
from worker.engine.images import ImageProcessor, ProcessedImages
from worker.engine.limits import Limits, blocks_for
from worker.engine.outcome import SequenceKey, Stop
from worker.engine.sequence import Sequence as EngineSequence
from worker.runner.fake_runner import expected_tokens
from worker.vllm_engine.core import SampledTokens, ScheduledRow, ScheduledStep


@dataclass
class _Held:
    """Sequence in the core, with a copy of its tokens that includes those of its images."""

    sequence: EngineSequence
    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    blocks: int = 0
    is_scored: bool = False


#: Placeholder of an image for ``process_images``, and tokens that the image takes.
PLACEHOLDER_ID, IMAGE_TOKENS = 512, 5


def process_images(prompt: Sequence[int], images: Sequence[Image], salt: bytes) -> ProcessedImages:
    """Replace each placeholder by tokens that follow from the image."""
    if prompt.count(PLACEHOLDER_ID) != len(images):
        raise InvalidRequest("an image has no placeholder", field="images")
    ids, rest = list[int](), iter(images)
    for token in prompt:
        ids += next(rest).digest[:IMAGE_TOKENS] if token == PLACEHOLDER_ID else [token]
    return ProcessedImages(ids, None)


@dataclass
class FakeCore:
    """First-come, first-served core; it preempts the latest sequence if it lacks blocks.

    ``add`` refuses the request ids ``refused``; the next step raises ``failure``.
    """

    limits: Limits
    refused: set[str] = field(default_factory=set)
    failure: Exception | None = None
    image_processor: ImageProcessor | None = None
    waiting: list[_Held] = field(default_factory=list)
    running: list[_Held] = field(default_factory=list)
    cached: set[bytes] = field(default_factory=set)
    is_closed: bool = False

    @property
    def num_free_blocks(self) -> int:
        return self.limits.num_blocks - sum(held.blocks for held in self.running)

    def add(self, sequence: EngineSequence) -> None:
        if sequence.request_id in self.refused:
            raise InvalidRequest("refused")
        output = sequence.tokens[sequence.num_prompt :]
        prompt = sequence.tokens[: sequence.num_prompt]
        if sequence.processed_images is not None:
            prompt = sequence.processed_images.prompt_ids
        self.waiting.append(_Held(sequence, [*prompt, *output], len(prompt)))

    def remove(self, keys: Sequence[SequenceKey]) -> None:
        for held in (self.waiting, self.running):
            held[:] = [it for it in held if it.sequence.key not in keys]

    def step(self, on_scheduled: Callable[[ScheduledStep], None]) -> list[SampledTokens]:
        if self.failure is not None:
            raise self.failure
        budget = self.limits.max_num_batched_tokens
        rows: list[tuple[_Held, int]] = []
        preempted: list[SequenceKey] = []
        for held in [*self.running]:
            count = min(len(held.tokens) - held.num_computed, budget)
            if held in self.running and count and self._grow(held, count, preempted):
                rows.append((held, count))
                budget -= count
        rows = [(held, count) for held, count in rows if held in self.running]
        admitted = []
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            held = self.waiting[0]
            held.num_computed = self._num_cached(held)
            count = min(len(held.tokens) - held.num_computed, budget)
            if preempted or blocks_for(held.num_computed + count) > self.num_free_blocks:
                break
            held.blocks = blocks_for(held.num_computed + count)
            self.running.append(self.waiting.pop(0))
            admitted.append(held.sequence.key)
            rows.append((held, count))
            budget -= count
        if not rows:
            return []
        described = [ScheduledRow(it.sequence.key, it.num_computed, n) for it, n in rows]
        on_scheduled(ScheduledStep(admitted, preempted, described))
        return [sampled for held, n in rows if (sampled := self._compute(held, n)) is not None]

    def _grow(self, held: _Held, count: int, preempted: list[SequenceKey]) -> bool:
        needed = blocks_for(held.num_computed + count) - held.blocks
        while needed > self.num_free_blocks:
            victim = self.running.pop()
            preempted.append(victim.sequence.key)
            victim.blocks = victim.num_computed = 0
            self.waiting.insert(0, victim)
            if victim is held:
                return False
        held.blocks += needed
        return True

    def _num_cached(self, held: _Held) -> int:
        if held.sequence.sampling.prompt_logprobs is not None or held.sequence.images:
            return 0
        number = 0
        while (number + 1) * BLOCK_SIZE < len(held.tokens):
            if held.sequence.block_hash(number) not in self.cached:
                break
            number += 1
        return number * BLOCK_SIZE

    def _compute(self, held: _Held, count: int) -> SampledTokens | None:
        sequence, sampling = held.sequence, held.sequence.sampling
        held.num_computed += count
        for number in range(held.num_computed // BLOCK_SIZE):
            if not sequence.images and (number + 1) * BLOCK_SIZE <= len(sequence.tokens):
                self.cached.add(sequence.block_hash(number))
        if held.num_computed < len(held.tokens):
            return None
        prompt = [*sequence.adapter.encode(), *held.tokens[: held.num_prompt]]
        position = len(held.tokens) - held.num_prompt
        choice = sequence.key.choice
        whole = expected_tokens(prompt, position + 1, sampling=sampling, choice=choice)
        held.tokens.append(token := whole[position])
        stop = None
        if token in sequence.stop_token_ids and position + 1 > sampling.min_tokens:
            stop = Stop.EOS
        elif position + 1 >= sequence.max_tokens:
            stop = Stop.LENGTH
        if stop is not None:
            self.running.remove(held)
        scores = ()
        if sampling.prompt_logprobs is not None and not held.is_scored:
            held.is_scored = True
            scores = (_logprobs(sampling.prompt_logprobs),) * (sequence.num_prompt - 1)
        logprobs = () if sampling.logprobs is None else (_logprobs(sampling.logprobs),)
        return SampledTokens(sequence.key, (token,), stop, None, logprobs, scores)

    def take_chunk_changes(self) -> ChunkChanges:
        return NO_CHANGES

    def close(self) -> None:
        self.is_closed = True


def _logprobs(num_top: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, 1, tuple((token, -0.5 - token) for token in range(num_top)))


#: Duration of a step of SlowCore, in seconds.
STEP_S = 0.002


class SlowCore(FakeCore):
    """Fake core whose steps take ``STEP_S``, so that a test can act before a sequence ends."""

    def step(self, on_scheduled: Callable[[ScheduledStep], None]) -> list[SampledTokens]:
        time.sleep(STEP_S)
        return super().step(on_scheduled)
