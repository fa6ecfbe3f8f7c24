"""Parts of bench-gpu, each of which runs in a process of its own.

``python -m benchmarks.gpu.gpu_parts PART SHAPE`` writes lines of JSON. Each line has all figures
that the part has measured so far, so the last complete line counts, even if the part fails later.
"""

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

_ACTIVITY, _ACTIVITY_DEVICE = (
    (ProfilerActivity.CPU, DeviceType.CPU) if IS_SMALL else (ProfilerActivity.CUDA, DeviceType.CUDA)
)
STEPS = 5 if IS_SMALL else 64
WARM_UP_STEPS, PROFILED_STEPS = 4, 16
#: Output tokens of a decoding sequence: more than all steps that it takes part in.
DECODED = 2 * (STEPS + PROFILED_STEPS)
BATCHED_TOKENS = 64 if IS_SMALL else 8192
NUM_REQUESTS = 6 if IS_SMALL else 192
STATIC_BATCH = 2 if IS_SMALL else 64
#: Mean prompt and output tokens of a request, as in ShareGPT, and the largest number of either.
MEAN_PROMPT, MEAN_OUTPUT, MOST = (8, 6, 60) if IS_SMALL else (161, 338, 1024)
#: Output tokens of a request of the warm-up.
WARM_UP_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0).to_proto()

#: All figures of a part so far, yielded after each new one.
Results = Iterator[dict[str, Any]]


def ceilings(_: Shape) -> Results:
    """Measure the bandwidth (bytes/s) of a large copy, and the FLOP/s of a large matrix product."""
    size = 256 if IS_SMALL else 8192
    source = torch.empty(size * size * 32, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    one, other = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    yield {
        "bandwidth": 2 * source.nbytes / seconds(lambda: target.copy_(source)),
        "flops": 2 * size**3 / seconds(lambda: one @ other),
    }


# the engine


def engine(shape: Shape) -> Results:
    """Measure decoding steps, prefill and the mix of requests."""
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


def idle(shape: Shape) -> Results:
    """Measure the idle share of decoding steps, by batch size.

    This is a part of its own, because the profiler may slow down later measurements in a process.
    """
    with Bench(shape) as bench:
        found: dict[str, Any] = {}
        for batch in BATCHES:
            found[str(batch)] = bench.idle(batch)
            yield found


class Bench:
    """Engine with pseudo-random weights, built as a worker builds it.

    On a GPU, raises AssertionError without compiled kernels or CUDA graphs.
    """

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
            # Otherwise torch would be measured instead of the kernels.
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
        """Name of the attention backend, with the one for prompts."""
        return self._runner._attention.name

    def decode(self, batch: int) -> float:
        """Return the mean seconds of a step in which ``batch`` sequences decode."""
        epochs = self._start_decoding(batch)
        before = self._num_tokens
        step_s = self._timed_steps(STEPS)
        assert self._num_tokens - before == STEPS * batch, "not all have decoded"
        self._abort(epochs)
        return step_s

    def idle(self, batch: int) -> dict[str, float]:
        """Profile some decoding steps of ``batch`` sequences.

        Return ``idle``, the share of the time from the first to the last GPU activity in which the
        GPU is idle, and ``busy_s``, the busy seconds per step. The profiler takes time on the host,
        so the idle share is a little larger than without it.
        """
        epochs = self._start_decoding(batch)
        with torch.profiler.profile(activities=[_ACTIVITY], acc_events=True) as profile:
            self._timed_steps(PROFILED_STEPS)
        self._abort(epochs)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            # The profile also has events of the host: launches and waits.
            if event.device_type == _ACTIVITY_DEVICE
        )
        assert spans, "the profiler saw nothing"
        busy, passed = covered_length(spans), max(end for _, end in spans) - spans[0][0]
        return {"idle": 1 - busy / passed, "busy_s": busy / 1e6 / PROFILED_STEPS}

    def _start_decoding(self, batch: int) -> list[int]:
        """Start ``batch`` sequences and compute their prompts; return their epochs."""
        epochs = [self._add(CONTEXT, DECODED) for _ in range(batch)]
        while self._engine.load().pending_prefill_tokens:
            self._record(self._engine.step())
        self._timed_steps(WARM_UP_STEPS)
        return epochs

    def _abort(self, epochs: Iterable[int]) -> None:
        for epoch in epochs:
            self._engine.abort(Abort(epoch))

    def _timed_steps(self, steps: int) -> float:
        """Return the mean seconds of a step."""
        began = time.perf_counter()
        for _ in range(steps):
            self._record(self._engine.step())
        self._record(self._engine.commit_in_flight())
        return (time.perf_counter() - began) / steps

    def _record(self, outcomes: Iterable[Outcome]) -> None:
        """Count the output tokens. Raises AssertionError if a sequence failed."""
        for outcome in outcomes:
            assert outcome.error is None, outcome.error
            self._num_tokens += len(outcome.tokens)

    def prefill(self, length: int) -> float:
        """Return the median seconds from a prompt of ``length`` tokens to its first token."""
        times = []
        for _ in range(ROUNDS):
            self._add(length, 1)
            began = time.perf_counter()
            self._run()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def mix(self) -> float:
        """Return the output tokens per second of the mix, whose requests all come at once."""
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
            self._record(self._engine.step())

    def _add(self, length: int, max_tokens: int) -> int:
        self._epoch += 1
        prompt = [self._rng.randrange(3, self._shape.vocab) for _ in range(length)]
        start = session_pb2.Start(
            epoch=self._epoch, prompt_ids=prompt, max_tokens=max_tokens, sampling=GREEDY
        )
        self._engine.add(Sequence.from_start(start, self._limits))
        return self._epoch


def covered_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``spans``, which are sorted by their begin."""
    length, reached = 0.0, float("-inf")
    for begin, end in spans:
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def mix(shape: Shape) -> list[Request]:
    """Return NUM_REQUESTS requests with random prompts, the same in each call."""
    rng = Random(161338)
    prompts, outputs = lengths(rng, MEAN_PROMPT), lengths(rng, MEAN_OUTPUT)
    return [
        Request([rng.randrange(3, shape.vocab) for _ in range(prompt)], output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def lengths(rng: Random, mean: float) -> list[int]:
    """Return NUM_REQUESTS log-normal lengths between 1 and MOST, with mean ``mean``.

    The logarithm has a standard deviation of 0.9. Lengths are scaled until the mean is right after
    the cut at MOST.
    """
    drawn, scale = [rng.lognormvariate(0.0, 0.9) for _ in range(NUM_REQUESTS)], mean
    for _ in range(20):
        cut = [min(MOST, max(1, round(scale * each))) for each in drawn]
        scale *= mean / statistics.mean(cut)
    return cut


# transformers


def transformers_continuous(shape: Shape) -> Results:
    """Measure the mix by transformers' continuous batching."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from benchmarks.engine_transformers import Continuous

    requests, longest = mix(shape), max(each.max_tokens for each in mix(shape))
    system = Continuous(random_transformer(shape), longest, ContinuousBatchingConfig())
    try:
        # transformers chooses these by what is installed.
        chosen = {"attention": system.attention, "graphs": system.graphs}
        yield {"tok_s": rate(system.generate, requests), **chosen}
    finally:
        # Its thread would keep the process alive, and an error would look like a timeout.
        system.close()


def transformers_static(shape: Shape) -> Results:
    """Measure STATIC_BATCH requests of the mix as one static batch."""
    from benchmarks.engine_transformers import Static

    system = Static(random_transformer(shape), STATIC_BATCH, "arrival")
    yield {"tok_s": rate(system.generate, mix(shape)[:STATIC_BATCH])}


def random_transformer(shape: Shape) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape.config)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    # No request ends before its length.
    model.generation_config.eos_token_id = None
    return model


def rate(generate: Callable[[list[Request]], list[list[int]]], requests: list[Request]) -> float:
    """Return the output tokens per second of ``generate``, after a warm-up."""
    generate([Request(each.prompt, WARM_UP_TOKENS) for each in requests[:2]])
    began = time.perf_counter()
    outputs = generate(requests)
    passed_s = time.perf_counter() - began
    assert [*map(len, outputs)] == [each.max_tokens for each in requests], "not all came"
    return sum(map(len, outputs)) / passed_s


PARTS: dict[str, Callable[[Shape], Results]] = {
    part.__name__: part
    for part in (ceilings, engine, idle, transformers_continuous, transformers_static, kernels)
}

if __name__ == "__main__":
    for found in PARTS[sys.argv[1]](SHAPES[sys.argv[2]]):
        print(json.dumps(found), flush=True)
