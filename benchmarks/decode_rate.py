"""Decode rate of an engine: ``python benchmarks/decode_rate.py MODEL THREADS``.

The program prints "ready" when the model is loaded and a batch of sequences decodes. Each line of
its input is a number of seconds; it decodes for that time and prints the tokens per second.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.sequence import Sequence
from worker.parallel.group import Group
from worker.runner.build import build_runner

_SEQUENCES = 8
_PROMPT_TOKENS = 8
_MAX_TOKENS = 1500


def main() -> None:
    engine = _engine(Path(sys.argv[1]), int(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        began, last = time.monotonic(), time.monotonic() + float(line)
        steps = 0
        while time.monotonic() < last:
            engine.step()
            steps += 1
        print(_SEQUENCES * steps / (time.monotonic() - began), flush=True)


def _engine(model: Path, threads: int) -> Engine:
    """Return an engine whose sequences have computed their prompts."""
    config = WorkerConfig(model=str(model), num_threads=threads, kv_cache_mib=1024)
    runner = build_runner(config, Group.single())
    limits = Limits.of(config, runner)
    engine = Engine(runner, limits)
    greedy = SamplingParams(temperature=0.0).to_proto()
    for epoch in range(1, 1 + _SEQUENCES):
        prompt = range(epoch, epoch + _PROMPT_TOKENS)
        start = session_pb2.Start(
            epoch=epoch, prompt_ids=prompt, max_tokens=_MAX_TOKENS, sampling=greedy
        )
        engine.add(Sequence.from_start(start, limits))
    engine.step()
    return engine


if __name__ == "__main__":
    main()
