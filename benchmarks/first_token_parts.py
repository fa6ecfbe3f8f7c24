"""Start of a rank up to its first token, one part after the other, for bench-first-token.

    python benchmarks/first_token_parts.py MODEL THREADS

The program prints the seconds by part as JSON. In a worker some parts run at the same time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from worker.serving.startup import Startup, process_age_s


def main() -> None:
    directory, threads = Path(sys.argv[1]), int(sys.argv[2])
    startup = Startup()
    startup.seconds["interpreter"] = process_age_s()
    with startup.part("modules without torch"):
        import worker.serving.rank  # noqa: F401
        from everlift import heap
        from everlift.sampling import SamplingParams
        from everlift.v1 import session_pb2
        from router.requests.tokenizer import ServedModel
        from worker.config import WorkerConfig
        from worker.engine.engine import Engine
        from worker.engine.limits import Limits
        from worker.engine.sequence import Sequence
    with startup.part("tokenizer"):
        ServedModel.load(str(directory))
    with startup.part("torch"), heap.pause_gc():
        import torch  # noqa: F401
    with startup.part("modules on torch"), heap.pause_gc():
        from worker.parallel.group import Group
        from worker.runner.build import build_runner
    config = WorkerConfig(model=str(directory), num_threads=threads)
    with startup.part("weights and KV cache"):
        runner = build_runner(config, Group.single())
    limits, greedy = Limits.of(config, runner), SamplingParams(temperature=0.0).to_proto()
    engine = Engine(runner, limits)

    def step(epoch: int) -> None:
        """Run a sequence of one output token, which needs one step."""
        start = session_pb2.Start(epoch=epoch, prompt_ids=range(8), max_tokens=1, sampling=greedy)
        engine.add(Sequence.from_start(start, limits))
        engine.step()

    with startup.part("first step"):
        step(1)
    with startup.part("second step"):
        step(2)
    json.dump(startup.seconds, sys.stdout)


if __name__ == "__main__":
    main()
