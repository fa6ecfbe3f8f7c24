"""Cost of an engine step without the model, by part.

    python benchmarks/scheduler.py [--running N ...] [--waiting N ...] [--steps 300] [--out FILE]

The engine of one rank runs a model that computes nothing and has logits of 64 tokens. The batch is
full and decodes greedily. Sequences of 64 + 512 tokens end one after the other, and queued ones
take their slots. Figures are medians over the steps, in ms:

    schedule   Scheduler.schedule
    inputs     the runner's inputs of the model, including attention's tables
    sample     sampling from the logits
    commit     Scheduler.commit
    account    time breakdowns of the sequences, except for their share of schedule
    load       the load report for routers
    deliver    in the event loop's thread: serialisation of the step's outcomes into one frame

``plan`` is the sum of schedule and inputs. ``waiting_1e6_over_1e2`` is the plan with 256 running
and 1,000,000 queued sequences, divided by that with 100 queued ones.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import report
from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from worker.attention.choice import choose_attention
from worker.config import Speculation
from worker.device.kv_cache import KVCache
from worker.engine.engine import Engine
from worker.engine.limits import Limits, blocks_for
from worker.engine.plan import Runner
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.step_times import Stopwatch
from worker.engine.time_breakdowns import SequenceBreakdown, TimeBreakdowns
from worker.grammar.absent import NoGrammars
from worker.model.layers import Placement
from worker.parallel.group import Group
from worker.runner.runner import TorchRunner
from worker.serving.inbox import Inbox
from worker.serving.loop import Report
from worker.serving.sessions import Sessions

VOCAB = 64
HEAD_DIM = 16
PROMPT, OUTPUT = 64, 512
RUNNING = (64, 256, 1024)
WAITING = (100, 10_000, 1_000_000)
PARTS = ("schedule", "inputs", "sample", "commit", "account", "load", "deliver")
_WARM = 20
_CPU = torch.device("cpu")
_PROMPT_IDS = [i % VOCAB for i in range(PROMPT)]
_GREEDY = SamplingParams(temperature=0.0).to_proto()


class NoModel:
    """Model without layers, whose logits are all 0 except one."""

    def __init__(self) -> None:
        self._logits = torch.zeros(1, VOCAB)
        self._logits[0, 7] = 1.0

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: object,
        sites: Tensor | None = None,
    ) -> Tensor:
        return tokens.unsqueeze(1) if sites is None else tokens[sites].unsqueeze(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits.expand(len(hidden), VOCAB).clone()


def no_model(num_blocks: int, stopwatch: Stopwatch) -> TorchRunner:
    cache = KVCache(num_blocks, 1, 1, HEAD_DIM, torch.float32, _CPU)
    place = Placement(Group.single(), torch.float32, _CPU)
    attention = choose_attention(cache)
    return TorchRunner(VOCAB, 4096, NoModel(), cache, attention, place, stopwatch=stopwatch)


class Bench:
    """Engine with ``running`` decoding and ``waiting`` queued sequences, all of one router.

    ``clock`` is the clock of the time breakdowns; None: there are no breakdowns. ``build_runner``
    makes the runner from the number of KV blocks and a stopwatch.
    """

    def __init__(
        self,
        running: int,
        waiting: int,
        output: int = OUTPUT,
        clock: Callable[[], float] | None = time.perf_counter,
        build_runner: Callable[[int, Stopwatch], Runner] = no_model,
    ) -> None:
        num_blocks = running * blocks_for(PROMPT + output + 1) + 64
        self._limits = Limits(num_blocks, VOCAB, 4096, running, 4096, 1, 0, Speculation())
        self._stopwatch = Stopwatch(time.perf_counter)
        runner = build_runner(num_blocks, self._stopwatch)
        self._engine = Engine(runner, self._limits, stopwatch=self._stopwatch)
        self._clock = clock or float
        self.breakdowns = self._engine.breakdowns = (
            TimeBreakdowns(running, clock) if clock else None
        )
        self._output = output
        self._inbox = Inbox()
        self._sessions = Sessions(self._limits, self._engine.load(), self._inbox, NoGrammars())
        self.session = self._sessions.open_session("router", lambda: None)
        self._present = running + waiting
        self._arrived = 0
        self._started: list[EngineSequence] = []
        self._start(running, waiting)

    def _start(self, running: int, waiting: int) -> None:
        lengths = [self._output * (i + 1) // running + 20 for i in range(running)]
        self._add_sequences([*lengths, *[self._output] * waiting])
        while self._engine.load().pending_prefill_tokens > waiting * PROMPT:
            self.step()

    def _add_sequences(self, lengths: Sequence[int]) -> None:
        starts = [_start(epoch, length) for epoch, length in enumerate(lengths, self._arrived)]
        self._arrived += len(starts)
        frame = session_pb2.RouterFrame(starts=starts)
        self._sessions.receive(self.session, frame, self._clock())
        self._started = self._inbox.wait(timeout_s=0).starts
        for sequence in self._started:
            self._engine.add(sequence)

    def _end_breakdown(self) -> list[SequenceBreakdown]:
        if self.breakdowns is None:
            return []
        self.breakdowns.end_step()
        return self.breakdowns.report()

    def step(self) -> dict[str, float]:
        """Run a step, replace the sequences that ended, and return the seconds by part."""
        before = self._stopwatch.times
        outcomes = self._engine.step(now=self._clock())
        after, over = self._stopwatch.times, time.perf_counter()
        breakdowns = self._end_breakdown()
        began = time.perf_counter()
        load = self._engine.load()
        loaded = time.perf_counter()
        started = tuple(sequence.key for sequence in self._started)
        self._started = []
        outcome_report = Report(started, tuple(outcomes), load, None, breakdowns=tuple(breakdowns))
        if self.breakdowns is not None:
            outcome_report = replace(outcome_report, decoding=self.breakdowns.decoding)
        self._sessions.deliver(outcome_report)
        self._sessions.take_frame(self.session).SerializeToString()
        delivered = time.perf_counter()
        self._add_sequences([self._output] * (self._present - load.num_running - load.num_waiting))
        return {
            "schedule": after.schedule_s - before.schedule_s,
            "inputs": after.model_s - before.model_s,
            "sample": after.sample_s - before.sample_s,
            "commit": after.commit_s - before.commit_s,
            "account": began - over,
            "load": loaded - began,
            "deliver": delivered - loaded,
        }


def _start(epoch: int, length: int) -> session_pb2.Start:
    """Return the message that starts a sequence; its own salt prevents prefix-cache hits."""
    return session_pb2.Start(
        epoch=epoch + 1,
        request_id=f"request-{epoch}",
        prompt_ids=_PROMPT_IDS,
        max_tokens=length,
        sampling=_GREEDY,
        salt=epoch.to_bytes(8, "big"),
    )


def measure(running: int, waiting: int, steps: int) -> dict[str, float]:
    """Return the median ms of each part and of the plan."""
    gc.disable()  # otherwise it would scan all queued sequences repeatedly while they are added
    bench = Bench(running, waiting)
    gc.freeze()
    gc.enable()
    times = [bench.step() for _ in range(_WARM + steps)][_WARM:]
    gc.unfreeze()
    plans = [each["schedule"] + each["inputs"] for each in times]
    medians = {part: statistics.median(each[part] for each in times) for part in PARTS}
    seconds = {"plan": statistics.median(plans), **medians}
    return {f"{part}_ms": round(1e3 * value, 4) for part, value in seconds.items()}


def ratios(raw: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the ratios whose figures were measured, and the plan's ms with 100 queued."""
    plans = {name: figures["plan_ms"] for name, figures in raw.items()}
    few, many = name(256, 100), name(256, 1_000_000)
    known = {
        f"plan_ms_{running}_running": plans[name(running, 100)]
        for running in (256, 1024)
        if name(running, 100) in plans
    }
    if few in plans and many in plans:
        known["waiting_1e6_over_1e2"] = round(plans[many] / plans[few], 3)
    return known


def name(running: int, waiting: int) -> str:
    return f"{running}_running_{waiting}_waiting"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, nargs="*", default=RUNNING)
    parser.add_argument("--waiting", type=int, nargs="*", default=WAITING)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("build/bench/scheduler.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    raw = {}
    for running in options.running:
        for waiting in options.waiting:
            measured = raw[name(running, waiting)] = measure(running, waiting, options.steps)
            print(name(running, waiting), measured, flush=True)
    report.write(
        options.out,
        packages=["torch", "numpy", "protobuf"],
        settings={
            "steps": options.steps,
            "prompt_tokens": PROMPT,
            "output_tokens": OUTPUT,
            "threads": 1,
        },
        raw=raw,
        ratios=ratios(raw),
    )


if __name__ == "__main__":
    main()
