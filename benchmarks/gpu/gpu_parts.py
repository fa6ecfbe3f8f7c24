"""The parts of bench-gpu, each in a process of its own: ``python -m benchmarks.gpu.gpu_parts PART
SHAPE`` writes lines of JSON, each with all that it has found so far: the last that is whole counts,
whatever becomes of the part."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.engine_system import Request
from benchmarks.gpu.gpu_kernels import kernels
from benchmarks.gpu.gpu_shapes import SHAPES, Shape
from benchmarks.gpu.gpu_timing import (
    BATCHES,
    CONTEXT,
    DEVICE,
    DTYPE,
    IS_SMALL,
    PREFILLS,
    ROUNDS,
    seconds,
)
from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits, blocks_for
from worker.engine.outcome import Abort, Outcome
from worker.engine.sequence import Sequence
from worker.kernels.trial import why_no_kernels
from worker.parallel.group import Group
from worker.runner.build import build_runner

_WATCHED, _WATCHED_DEVICE = (
    (ProfilerActivity.CPU, DeviceType.CPU) if IS_SMALL else (ProfilerActivity.CUDA, DeviceType.CUDA)
)
STEPS = 5 if IS_SMALL else 64
WARM_UP_STEPS, PROFILED_STEPS = 4, 16
#: Beyond its context, what a sequence decodes.
DECODED = 2 * (STEPS + PROFILED_STEPS)
BATCHED_TOKENS = 64 if IS_SMALL else 8192
NUM_REQUESTS = 6 if IS_SMALL else 192
STATIC_BATCH = 2 if IS_SMALL else 64
#: Means of a request's tokens, as ShareGPT has them, and the most that one has of either.
MEAN_PROMPT, MEAN_OUTPUT, MOST = (8, 6, 60) if IS_SMALL else (161, 338, 1024)
#: Of a request that does not count.
FEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0).to_proto()

#: What a part has found, each time that it has found more.
Found = Iterator[dict[str, Any]]


def ceilings(_: Shape) -> Found:
    """A large copy, and a large product of random numbers."""
    size = 256 if IS_SMALL else 8192
    source = torch.empty(size * size * 32, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    one, other = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    yield {
        "bandwidth": 2 * source.nbytes / seconds(lambda: target.copy_(source)),
        "flops": 2 * size**3 / seconds(lambda: one @ other),
    }


# the engine


def engine(shape: Shape) -> Found:
    """Decoding, prefill and the mix of requests."""
    with Bench(shape) as bench:
        decode_s: dict[str, float] = {}
        prefill_s: dict[str, float] = {}
        found: dict[str, Any] = {
            "context": CONTEXT,
            "attention": bench.attention,
            "decode_s": decode_s,
            "prefill_s": prefill_s,
        }
        for batch in BATCHES:
            decode_s[str(batch)] = bench.decode(batch)
            yield found
        for length in PREFILLS:
            prefill_s[str(length)] = bench.prefill(length)
            yield found
        yield found | {"mix_tok_s": bench.mix()}


def idle(shape: Shape) -> Found:
    """A part of its own: nothing is timed once the profiler was there."""
    with Bench(shape) as bench:
        found: dict[str, Any] = {}
        for batch in BATCHES:
            found[str(batch)] = bench.idle(batch)
            yield found


class Bench:
    """One engine with pseudo-random weights, as a worker builds it."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._rng = Random(7)
        self._epoch = 0
        self._num_tokens = 0
        self._directory = tempfile.TemporaryDirectory()
        config_json = Path(self._directory.name) / "config.json"
        config_json.write_text(json.dumps(shape.config))
        config = WorkerConfig(
            model=self._directory.name,
            load_format="dummy",
            device=DEVICE.type,
            dtype="bfloat16",
            num_blocks=BATCHES[-1] * blocks_for(CONTEXT + DECODED) + blocks_for(PREFILLS[-1]),
            max_num_seqs=BATCHES[-1],
            max_num_batched_tokens=BATCHED_TOKENS,
        )
        self._runner = build_runner(config, Group.single())
        if not IS_SMALL:
            # Else torch would be measured in their place.
            assert (cause := why_no_kernels(DEVICE)) == "", cause
            assert self._runner._graphs is not None, "decoding is not captured"
        self._limits = Limits.of(config, self._runner)
        self._engine = Engine(self._runner, self._limits, launch=self._runner.launch)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()
        self._directory.cleanup()

    @property
    def attention(self) -> str:
        """What attends, to prompts too."""
        return self._runner._attention.name

    def decode(self, batch: int) -> float:
        """Seconds of a step in which ``batch`` sequences decode."""
        epochs = self._decoding(batch)
        before = self._num_tokens
        step_s = self._timed_steps(STEPS)
        assert self._num_tokens - before == STEPS * batch, "not all have decoded"
        self._abort(epochs)
        return step_s

    def idle(self, batch: int) -> dict[str, float]:
        """``idle`` is the part of the time, from the first to the last that the GPU does in some
        steps, in which it does nothing; ``busy_s`` what it does in a step. To be watched takes the
        host time, so it idles a little more than it would."""
        epochs = self._decoding(batch)
        with torch.profiler.profile(activities=[_WATCHED], acc_events=True) as profile:
            self._timed_steps(PROFILED_STEPS)
        self._abort(epochs)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            # Beside what the GPU did, what the host asked of it is told, and how long it waited.
            if event.device_type == _WATCHED_DEVICE
        )
        assert spans, "the profiler saw nothing"
        busy, passed = covered(spans), max(end for _, end in spans) - spans[0][0]
        return {"idle": 1 - busy / passed, "busy_s": busy / 1e6 / PROFILED_STEPS}

    def _decoding(self, batch: int) -> list[int]:
        """The epochs of so many, whose prompts are computed."""
        epochs = [self._add(CONTEXT, DECODED) for _ in range(batch)]
        while self._engine.load().pending_prefill_tokens:
            self._take(self._engine.step())
        self._timed_steps(WARM_UP_STEPS)
        return epochs

    def _abort(self, epochs: Iterable[int]) -> None:
        for epoch in epochs:
            self._engine.abort(Abort(epoch))

    def _timed_steps(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self._take(self._engine.step())
        self._take(self._engine.commit_in_flight())
        return (time.perf_counter() - began) / steps

    def _take(self, outcomes: Iterable[Outcome]) -> None:
        """Who fails takes no time any more: nobody may."""
        for outcome in outcomes:
            assert outcome.error is None, outcome.error
            self._num_tokens += len(outcome.tokens)

    def prefill(self, length: int) -> float:
        """Seconds to a prompt's first token."""
        times = []
        for _ in range(ROUNDS):
            self._add(length, 1)
            began = time.perf_counter()
            self._run()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def mix(self) -> float:
        """Output tokens a second of requests that are all there at once."""
        requests = mix(self._shape)
        for each in requests:
            self._add(len(each.prompt), each.max_tokens)
        before, began = self._num_tokens, time.perf_counter()
        self._run()
        tok_s = (self._num_tokens - before) / (time.perf_counter() - began)
        assert self._num_tokens - before == sum(each.max_tokens for each in requests)
        return tok_s

    def _run(self) -> None:
        while self._engine.has_work:
            self._take(self._engine.step())

    def _add(self, length: int, max_tokens: int) -> int:
        self._epoch += 1
        prompt = [self._rng.randrange(3, self._shape.vocab) for _ in range(length)]
        start = session_pb2.Start(
            epoch=self._epoch, prompt_ids=prompt, max_tokens=max_tokens, sampling=GREEDY
        )
        self._engine.add(Sequence.from_start(start, self._limits))
        return self._epoch


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line ``spans``, by where they begin, cover."""
    length, reached = 0.0, float("-inf")
    for begin, end in spans:
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def mix(shape: Shape) -> list[Request]:
    rng = Random(161338)
    prompts, outputs = lengths(rng, MEAN_PROMPT), lengths(rng, MEAN_OUTPUT)
    return [
        Request([rng.randrange(3, shape.vocab) for _ in range(prompt)], output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def lengths(rng: Random, mean: float) -> list[int]:
    """Of NUM_REQUESTS, with a long tail: log-normal, a standard deviation of 0.9 in the logarithm.
    What is cut off behind MOST the others have more, so that the mean is right."""
    drawn, scale = [rng.lognormvariate(0.0, 0.9) for _ in range(NUM_REQUESTS)], mean
    for _ in range(20):
        cut = [min(MOST, max(1, round(scale * each))) for each in drawn]
        scale *= mean / statistics.mean(cut)
    return cut


# transformers


def transformers_continuous(shape: Shape) -> Found:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from benchmarks.engine_transformers import Continuous

    requests, longest = mix(shape), max(each.max_tokens for each in mix(shape))
    system = Continuous(random_transformer(shape), longest, ContinuousBatchingConfig())
    try:
        # What it chose, by what is installed.
        chosen = {"attention": system.attention, "graphs": system.graphs}
        yield {"tok_s": rate(system.generate, requests), **chosen}
    finally:
        # Its thread would keep the process, and what failed would not be told.
        system.close()


def transformers_static(shape: Shape) -> Found:
    """One batch: each takes as long as its longest request."""
    from benchmarks.engine_transformers import Static

    system = Static(random_transformer(shape), STATIC_BATCH, "arrival")
    yield {"tok_s": rate(system.generate, mix(shape)[:STATIC_BATCH])}


def random_transformer(shape: Shape) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape.config)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    # Nothing ends before its length.
    model.generation_config.eos_token_id = None
    return model


def rate(generate: Callable[[list[Request]], list[list[int]]], requests: list[Request]) -> float:
    """Output tokens a second, after a few short requests that do not count."""
    generate([Request(each.prompt, FEW_TOKENS) for each in requests[:2]])
    began = time.perf_counter()
    outputs = generate(requests)
    passed_s = time.perf_counter() - began
    assert [*map(len, outputs)] == [each.max_tokens for each in requests], "not all came"
    return sum(map(len, outputs)) / passed_s


PARTS: dict[str, Callable[[Shape], Found]] = {
    part.__name__: part
    for part in (ceilings, engine, idle, transformers_continuous, transformers_static, kernels)
}

if __name__ == "__main__":
    for found in PARTS[sys.argv[1]](SHAPES[sys.argv[2]]):
        print(json.dumps(found), flush=True)
