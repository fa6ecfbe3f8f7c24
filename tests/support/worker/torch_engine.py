"""Engine on the torch runner, for tests that compare its tokens; needs no transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everlift.end_tokens import end_token_ids
from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from tests.support.worker.worker_support import Collected, run, start
from worker.config import WorkerConfig
from worker.engine.engine import COLLECTIVE_ERRORS, Engine
from worker.engine.limits import Limits
from worker.engine.load import Counters
from worker.engine.outcome import SequenceKey
from worker.engine.plan import LaunchedStep, Plan, RowResult
from worker.engine.sequence import Sequence as EngineSequence
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.runner import TorchRunner
from worker.runner.sampled_tokens import LastTokens


@dataclass(frozen=True)
class Job:
    """Sequence to generate; ``output`` is the part that another engine has already generated.

    ``sampling.seed`` identifies the job's rows, so jobs of one engine need different seeds.
    """

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    adapter: str = ""
    output: tuple[int, ...] = ()


def greedy_jobs(prompts: Sequence[list[int]], max_tokens: int) -> list[Job]:
    """Return jobs of slightly different lengths, so that they do not all end at once."""
    return [
        Job(prompt, max_tokens - i % 7, SamplingParams(temperature=0.0, seed=i))
        for i, prompt in enumerate(prompts)
    ]


def starts(jobs: Sequence[Job], stop_token_ids: Sequence[int]) -> list[session_pb2.Start]:
    """Return the start messages of ``jobs``, with epochs that count from 1."""
    return [
        start(
            epoch,
            j.prompt,
            j.max_tokens,
            j.output,
            sampling=j.sampling,
            stop_token_ids=stop_token_ids,
            salt=j.adapter.encode(),
            adapter=j.adapter,
        )
        for epoch, j in enumerate(jobs, 1)
    ]


def served_ahead(
    runner: TorchRunner, config: WorkerConfig, jobs: Sequence[Job], stop_token_ids: Sequence[int]
) -> list[list[int]]:
    """Return the outputs of ``jobs``, all added at the start, with steps launched ahead."""
    limits = Limits.of(config, runner)
    engine = Engine(runner, limits, launch=runner.launch)
    for message in starts(jobs, stop_token_ids):
        engine.add(EngineSequence.from_start(message, limits))
    return outputs(run(engine), jobs)


def outputs(collected: Collected, jobs: Sequence[Job]) -> list[list[int]]:
    return [collected.tokens[SequenceKey(epoch, 0)] for epoch in range(1, len(jobs) + 1)]


class RecordingRunner:
    """Runner that records its plans."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self.plans: list[Plan] = []
        self.num_blocks = runner.num_blocks
        self.num_host_blocks = runner.num_host_blocks
        self.host_load_s = runner.host_load_s
        self.vocab_size = runner.vocab_size
        self.max_model_len = runner.max_model_len
        self.device_kind = runner.device_kind
        self.adapters, self.adapter_slots = runner.adapters, runner.adapter_slots
        self.unready_slots = runner.unready_slots
        self.release = runner.release
        self.close = runner.close

    def execute(self, plan: Plan) -> list[RowResult]:
        self.plans.append(plan)
        return self._runner.execute(plan)

    def launch(self, plan: Plan) -> LaunchedStep:
        self.plans.append(plan)
        launch = self._runner.launch
        assert launch is not None
        return launch(plan)


class TorchEngine:
    """Engine over ``directory`` in fp32, under a token budget that cuts most prompts.

    ``device`` and ``settings`` are WorkerConfig's. With ``ahead``, steps are launched before the
    previous ones are committed, as on a GPU.
    """

    def __init__(
        self,
        directory: Path,
        num_blocks: int,
        group: Group | None = None,
        ahead: bool = False,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        config = WorkerConfig(
            model=str(directory),
            device=device,
            dtype="float32",
            num_threads=1,
            num_blocks=num_blocks,
            max_num_seqs=16,
            max_num_batched_tokens=48,
            **settings,
        )
        self._eos = end_token_ids(directory)
        runner = build_runner(config, group or Group.single())
        if ahead and runner._last_tokens is None:
            runner._last_tokens = LastTokens(config.max_num_seqs, runner.device)
        self._runner = RecordingRunner(runner)
        self._limits = Limits.of(config, self._runner)
        launch = self._runner.launch if ahead else None
        survivable = COLLECTIVE_ERRORS if group is not None and group.size > 1 else (Exception,)
        self._engine = Engine(self._runner, self._limits, survivable, launch=launch)

    def serve(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Return the output tokens of ``jobs``, all added at the start."""
        return outputs(self.collect(jobs), jobs)

    def collect(self, jobs: Sequence[Job]) -> Collected:
        """Return all outcomes of ``jobs``, whose epochs count from 1."""
        for message in starts(jobs, self._eos):
            self._engine.add(EngineSequence.from_start(message, self._limits))
        return run(self._engine)

    @property
    def preemptions(self) -> int:
        return self._engine.load().preemptions

    @property
    def steps(self) -> int:
        return len(self._runner.plans)

    @property
    def counters(self) -> Counters:
        return self._engine.load().counters

    @property
    def accepted_drafts(self) -> int:
        return self._engine.load().counters.accepted_tokens

    def first_position(self, job: Job) -> int:
        """Return the position of the first computed token of ``job``; earlier ones were cached."""
        for plan in self._runner.plans:
            for admission in plan.admissions:
                if admission.sampling.seed == job.sampling.seed:
                    return next(row.start for row in plan.rows if row.slot == admission.slot)
        raise AssertionError("it was never admitted")

    @property
    def mixed_steps(self) -> int:
        """Number of steps that computed a part of a prompt beside decoding sequences."""
        return sum(
            not plan.rows[-1].samples and plan.rows[0].start > 0 and plan.rows[0].samples
            for plan in self._runner.plans
        )

    @property
    def widest_step(self) -> int:
        """Largest number of rows of a step."""
        return max(len(plan.rows) for plan in self._runner.plans)
