"""Support of worker tests without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from everlift.hashes import CHUNK_SIZE, chunk_hashes
from everlift.sampling import SamplingParams, TokenLogprobs
from everlift.v1 import session_pb2
from worker.config import FakeModel, Scheduling, Speculation, WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Outcome, Residence, SequenceKey, Stop
from worker.engine.sequence import Sequence as EngineSequence
from worker.runner.fake_runner import FakeRunner

#: One scheduling for each policy. Deadlines of slai are a few steps away if a step takes a second.
POLICIES = {
    "continuous": Scheduling(),
    "static": Scheduling("static"),
    "magnus": Scheduling("magnus"),
    "slai": Scheduling("slai", tbt_target=4.0, ageing_tokens=8),
}
under_each_policy = pytest.mark.parametrize("scheduling", POLICIES.values(), ids=POLICIES)

#: Ageing that outweighs all prompt lengths, so that prompts are served by arrival.
BY_ARRIVAL = Scheduling(ageing_tokens=1 << 20)

GREEDY = SamplingParams(temperature=0.0)


def limits(
    num_blocks: int = 16,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 4096,
    watermark_blocks: int = 1,
    num_host_blocks: int = 0,
    speculation: Speculation | None = None,
    model: FakeModel | None = None,
    scheduling: Scheduling | None = None,
    session_retention_s: float = 0.0,
    max_retained_blocks: int = 0,
) -> Limits:
    return Limits(
        num_blocks=num_blocks,
        vocab_size=(model or FakeModel()).vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        watermark_blocks=watermark_blocks,
        num_host_blocks=num_host_blocks,
        speculation=speculation or Speculation(),
        scheduling=scheduling or Scheduling(),
        session_retention_s=session_retention_s,
        max_retained_blocks=max_retained_blocks,
    )


def engine(bounds: Limits | None = None, model: FakeModel | None = None) -> Engine:
    bounds = bounds or limits(model=model)
    return Engine(runner(bounds, model), bounds)


def runner(bounds: Limits, model: FakeModel | None = None) -> FakeRunner:
    return FakeRunner(bounds.num_blocks, model or FakeModel(), bounds.num_host_blocks)


def start(
    epoch: int,
    prompt: Iterable[int],
    max_tokens: int = 8,
    output: Iterable[int] = (),
    choice: int = 0,
    sampling: SamplingParams = GREEDY,
    stop_token_ids: Iterable[int] = (),
    salt: bytes = b"",
    num_computed: int = 0,
    priority: int = 0,
    predicted_tokens: int = 0,
    session: int = 0,
    expected_cached_tokens: int = 0,
    adapter: str = "",
) -> session_pb2.Start:
    return session_pb2.Start(
        epoch=epoch,
        adapter=adapter,
        choice=choice,
        request_id=f"request-{epoch}",
        prompt_ids=prompt,
        output_ids=output,
        max_tokens=max_tokens,
        sampling=sampling.to_proto(),
        stop_token_ids=stop_token_ids,
        salt=salt,
        num_computed=num_computed,
        priority=priority,
        predicted_tokens=predicted_tokens,
        session=session,
        expected_cached_tokens=expected_cached_tokens,
    )


def shortened(message: session_pb2.Start, num_chunks: int) -> session_pb2.Start:
    """Replace the first ``num_chunks`` chunks of a start by an omitted prefix."""
    prompt, output = list(message.prompt_ids), list(message.output_ids)
    count = num_chunks * CHUNK_SIZE
    num_prompt = min(count, len(prompt))
    short = session_pb2.Start()
    short.CopyFrom(message)
    del short.prompt_ids[:num_prompt], short.output_ids[: count - num_prompt]
    short.omitted_prefix.hash = chunk_hashes(prompt + output, message.salt)[num_chunks - 1]
    short.omitted_prefix.num_prompt = num_prompt
    short.omitted_prefix.num_output = count - num_prompt
    return short


def sequence(bounds: Limits, epoch: int, prompt: Iterable[int], **fields: Any) -> EngineSequence:
    return EngineSequence.from_start(start(epoch, prompt, **fields), bounds)


def prompt(length: int, first: int = 1) -> list[int]:
    """Return ``length`` tokens that count up from ``first``."""
    return [(first + i) % 1000 for i in range(length)]


class Collected:
    """Outcomes of an engine, by sequence.

    It checks that offsets are contiguous, including those of the prompt's log probabilities, and
    that the number of computed tokens never decreases. Only a preempted sequence may resume, and
    nothing may follow a stop.
    """

    def __init__(self) -> None:
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.stops: dict[SequenceKey, Stop] = {}
        self.errors: dict[SequenceKey, str] = {}
        self.logprobs: dict[SequenceKey, list[TokenLogprobs]] = {}
        #: from the prompt's second token on
        self.prompt_logprobs: dict[SequenceKey, list[TokenLogprobs]] = {}
        self.preemptions: Counter[SequenceKey] = Counter()
        self.recomputed_tokens: Counter[SequenceKey] = Counter()
        self._offsets: dict[SequenceKey, int] = {}
        self._num_computed: Counter[SequenceKey] = Counter()
        self._waiting: set[SequenceKey] = set()

    def take(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            key = outcome.key
            assert key not in self.stops, "an outcome after the end"
            assert outcome.offset == self._offsets.get(key, outcome.offset), "a gap or a repetition"
            self._offsets[key] = outcome.offset + len(outcome.tokens)
            self.tokens.setdefault(key, []).extend(outcome.tokens)
            self.logprobs.setdefault(key, []).extend(outcome.logprobs)
            if outcome.prompt_logprobs:
                scores = self.prompt_logprobs.setdefault(key, [])
                assert outcome.prompt_offset == 1 + len(scores), "a gap or a repetition"
                scores.extend(outcome.prompt_logprobs)
            self._take_news(outcome)
            if outcome.stop is not None:
                self.stops[key] = outcome.stop
                self.errors[key] = str(outcome.error or "")

    def _take_news(self, outcome: Outcome) -> None:
        key, update = outcome.key, outcome.update
        assert outcome.num_computed >= self._num_computed[key], "less is computed than was"
        self._num_computed[key] = outcome.num_computed
        self.preemptions[key] += update.preemptions
        self.recomputed_tokens[key] += update.recomputed_tokens
        assert update.preemptions or update.residence is not Residence.PREEMPTED
        if update.residence is Residence.RESUMED:
            assert key in self._waiting or update.preemptions, "it never stopped"
            self._waiting.discard(key)
        if update.residence is Residence.PREEMPTED:
            self._waiting.add(key)
        assert key not in self._waiting or not outcome.tokens, "tokens without blocks"


def run(engine: Engine, collected: Collected | None = None, max_steps: int = 10_000) -> Collected:
    """Run steps of one second until no work is left; check integrity after each."""
    collected = collected or Collected()
    for _ in range(max_steps):
        if not engine.has_work:
            return collected
        collected.take(engine.step(now=float(engine.load().step)))
        engine.check_integrity()
    raise AssertionError(f"still at work after {max_steps} steps: {engine.load()}")


def tensor_parallel(ranks: int, num_blocks: int = 8, ahead: bool = False) -> WorkerConfig:
    """Return the settings of a small worker of several ranks with the fake runner.

    With ``ahead``, steps are launched ahead. The timeouts allow for a rank that lacks a core for
    seconds on a busy machine.
    """
    return WorkerConfig(
        model="fake",
        fake=FakeModel(runs_ahead=ahead),
        tensor_parallel=ranks,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        join_timeout=60.0,
        drain_timeout=30.0,
        rank_silence=20.0,
    )
