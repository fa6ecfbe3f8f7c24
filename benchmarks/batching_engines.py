"""Engines of bench-batching: one with a model on this machine, and one in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.batching_player import Player, Request, RunResult
from benchmarks.batching_virtual import H200_8B, VirtualRunner
from worker.config import WorkerConfig
from worker.engine.limits import Limits
from worker.engine.plan import Runner
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.runner import TorchRunner


class Bench(Protocol):
    """Source of engine settings and runners, which runs requests on them."""

    def config(self, max_num_seqs: int, budget: int = 512) -> WorkerConfig: ...

    def runner(self, config: WorkerConfig) -> Runner: ...

    def play(
        self,
        runner: Any,
        config: WorkerConfig,
        requests: Sequence[Request],
        enough: int | None = None,
    ) -> RunResult:
        """Run the requests; ``runner`` comes from the method ``runner``.

        If ``enough`` is given, stop after this number of output tokens.
        """
        ...


class Live:
    """Bench with a model on this machine's CPU."""

    def __init__(self, model: Path, threads: int) -> None:
        self._config = WorkerConfig(
            model=str(model), device="cpu", num_threads=threads, kv_cache_mib=512
        )

    def config(self, max_num_seqs: int, budget: int = 512) -> WorkerConfig:
        return replace(self._config, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)

    def runner(self, config: WorkerConfig) -> TorchRunner:
        """Return a new runner that has served a batch as a warm-up."""
        runner = build_runner(config, Group.single())
        self.play(runner, config, [Request(32, 16)] * config.max_num_seqs)
        return runner

    def play(
        self,
        runner: TorchRunner,
        config: WorkerConfig,
        requests: Sequence[Request],
        enough: int | None = None,
    ) -> RunResult:
        return Player(runner, Limits.of(config, runner)).play(requests, enough)


class Virtual:
    """Bench without a model: steps take virtual time, as an 8B model would on an H200."""

    def config(self, max_num_seqs: int, budget: int = 512) -> WorkerConfig:
        return WorkerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)

    def runner(self, config: WorkerConfig) -> VirtualRunner:
        return VirtualRunner(20_000, H200_8B)

    def play(
        self,
        runner: VirtualRunner,
        config: WorkerConfig,
        requests: Sequence[Request],
        enough: int | None = None,
    ) -> RunResult:
        limits = Limits.of(config, runner)
        return Player(runner, limits, runner.clock, runner.sleep).play(requests, enough)
