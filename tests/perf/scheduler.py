"""What a step costs beside the model: its plan, its inputs, its tokens, the books, the news.

    python tests/perf/scheduler.py [--running N ...] [--waiting N ...] [--steps 300] [--out FILE]

One rank's engine over a model that computes nothing and has logits of 64 tokens. The batch is full
and decodes greedily; sequences of 64 + 512 tokens end one after the other, and the next ones in
line take their places. Medians over the steps, in ms, by where the time goes:

    schedule   Scheduler.schedule
    inputs     what the runner makes of the plan before the model runs, attention's tables included
    sample     what it makes of the logits
    commit     Scheduler.commit
    load       what routers are told of the load
    deliver    in the event loop's thread: the step's outcomes, merged into one frame of bytes

A plan is schedule and inputs. ``waiting_1e6_over_1e2`` is the plan at 256 running with 1,000,000
waiting, over that with 100.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from worker.attention.reference import ReferenceAttention
from worker.config import Speculation
from worker.engine import Engine
from worker.grammar.absent import NoGrammars
from worker.kv_cache import KVCache
from worker.limits import Limits, blocks_for
from worker.loop import Report
from worker.model.layers import Placement
from worker.orders import Inbox
from worker.parallel import Group
from worker.runner import TorchRunner
from worker.sessions import Sessions
from worker.step_times import Stopwatch

VOCAB = 64
PROMPT, OUTPUT = 64, 512
RUNNING = (64, 256, 1024)
WAITING = (100, 10_000, 1_000_000)
PARTS = ("schedule", "inputs", "sample", "commit", "load", "deliver")
_CPU = torch.device("cpu")
_GREEDY = SamplingParams(temperature=0.0).to_proto()


class NoModel:
    """A Model of no layers; every logit is 0 but one."""

    def __init__(self) -> None:
        self._logits = torch.zeros(1, VOCAB)
        self._logits[0, 7] = 1.0

    def forward(self, tokens: Tensor, positions: Tensor, attention: object) -> Tensor:
        return tokens.unsqueeze(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits.expand(len(hidden), VOCAB).clone()


class Bench:
    """An engine with ``running`` sequences that decode and ``waiting`` behind them, and the one
    router that started them all."""

    def __init__(self, running: int, waiting: int) -> None:
        num_blocks = running * blocks_for(PROMPT + OUTPUT + 1) + 64
        self._limits = Limits(num_blocks, VOCAB, 4096, running, 4096, 1, 0, Speculation())
        self._stopwatch = Stopwatch(time.perf_counter)
        self._engine = Engine(self._runner(num_blocks), self._limits, stopwatch=self._stopwatch)
        self._inbox = Inbox()
        self._sessions = Sessions(self._limits, self._engine.load(), self._inbox, NoGrammars())
        self._session = self._sessions.join("router", lambda: None)
        self._present = running + waiting
        self._arrived = 0
        self._start(running, waiting)

    def _runner(self, num_blocks: int) -> TorchRunner:
        cache = KVCache(num_blocks, 1, 1, 4, torch.float32, _CPU)
        place = Placement(Group.single(), torch.float32, _CPU)
        attention = ReferenceAttention(cache)
        return TorchRunner(
            VOCAB, 4096, NoModel(), cache, attention, place, stopwatch=self._stopwatch
        )

    def _start(self, running: int, waiting: int) -> None:
        lengths = [OUTPUT * (i + 1) // running + 20 for i in range(running)]
        self._take_in([*lengths, *[OUTPUT] * waiting])
        while self._engine.load().pending_prefill_tokens > waiting * PROMPT:
            self.step()

    def _take_in(self, lengths: Sequence[int]) -> None:
        for length in lengths:
            self._sessions.receive(self._session, _frame(self._arrived, length), now=0.0)
            self._arrived += 1
        for sequence in self._inbox.take(timeout_s=0).starts:
            self._engine.add(sequence)

    def step(self) -> dict[str, float]:
        """Seconds by part."""
        before = self._stopwatch.times
        outcomes = self._engine.step()
        after, began = self._stopwatch.times, time.perf_counter()
        load = self._engine.load()
        loaded = time.perf_counter()
        self._sessions.deliver(Report((), tuple(outcomes), load, None))
        self._sessions.cut(self._session).SerializeToString()
        delivered = time.perf_counter()
        self._take_in([OUTPUT] * (self._present - load.num_running - load.num_waiting))
        return {
            "schedule": after.schedule_s - before.schedule_s,
            "inputs": after.model_s - before.model_s,
            "sample": after.sample_s - before.sample_s,
            "commit": after.commit_s - before.commit_s,
            "load": loaded - began,
            "deliver": delivered - loaded,
        }


def _frame(epoch: int, length: int) -> session_pb2.RouterFrame:
    tokens = [(epoch * 31 + i * i) % VOCAB for i in range(PROMPT)]
    start = session_pb2.Start(
        epoch=epoch + 1,
        request_id=f"request-{epoch}",
        prompt_ids=tokens,
        max_tokens=length,
        sampling=_GREEDY,
        salt=epoch.to_bytes(8, "big"),
    )
    return session_pb2.RouterFrame(starts=[start])


def measure(running: int, waiting: int, steps: int) -> dict[str, float]:
    """Medians in ms by part, and of the plan."""
    bench = Bench(running, waiting)
    gc.collect()
    gc.freeze()
    times = [bench.step() for _ in range(20 + steps)][20:]
    gc.unfreeze()
    plans = [each["schedule"] + each["inputs"] for each in times]
    medians = {part: statistics.median(each[part] for each in times) for part in PARTS}
    return {"plan": 1e3 * statistics.median(plans)} | {k: 1e3 * v for k, v in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, nargs="*", default=RUNNING)
    parser.add_argument("--waiting", type=int, nargs="*", default=WAITING)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("build/bench/scheduler.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for running in options.running:
        for waiting in options.waiting:
            r = measure(running, waiting, options.steps)
            print(running, waiting, {k: round(v, 3) for k, v in r.items()}, flush=True)


if __name__ == "__main__":
    main()
