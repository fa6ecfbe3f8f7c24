"""Requests of simulated clients, and their expected outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everlift.messages import OnDisconnect
from everlift.options import GenerateOptions
from tests.simulated_cluster.client import Transcript
from tests.simulated_cluster.cluster import ROUTER, SimCluster
from worker.config import FakeModel, WorkerConfig
from worker.engine.limits import blocks_for

MODEL = FakeModel(vocab_size=256, eos_token_id=0, eos_one_in=40, step_time=0.02, token_time=1e-4)
WORKERS = WorkerConfig(
    model="fake",
    num_blocks=24,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    preemption="swap",
    swap_mib=3,
    fake=MODEL,
)
#: Faults alone must not exhaust a request's limits of losses.
ROUTERS = replace(ROUTER, max_losses=100, max_losses_total=100, grace=5.0)
#: Time limit, far above the duration of a request without faults, in seconds.
_TIMEOUT_S = 60.0


class Wrong(AssertionError):
    """Raised for a state that no history may have."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Request of a client; ``options`` are GenerateOptions."""

    prompt: str | tuple[int, ...]
    options: tuple[tuple[str, object], ...]

    @classmethod
    def of(cls, prompt: str | Sequence[int], **options: object) -> Asked:
        return cls(prompt if isinstance(prompt, str) else tuple(prompt), tuple(options.items()))

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks that one choice needs, if its prompt consists of tokens."""
        return blocks_for(len(self.prompt) + (self.arguments().get("max_tokens") or 0))

    def arguments(self) -> GenerateOptions:
        return dict(self.options)  # type: ignore[return-value]


def _prompt(length: int, first: int) -> list[int]:
    return [(first + i * 7) % 127 + 1 for i in range(length)]


#: One request for each kind of state that a continuation must keep; the longest prompts come last.
ASKED: tuple[Asked, ...] = (
    Asked.of(_prompt(5, 1), temperature=0, max_tokens=16),
    Asked.of(_prompt(40, 2), temperature=0, max_tokens=30, session_id="t"),
    Asked.of(_prompt(70, 3), temperature=1, seed=7, max_tokens=30),
    Asked.of(_prompt(9, 4), temperature=1, seed=8, n=3, max_tokens=12),
    Asked.of(_prompt(11, 5), temperature=0, presence_penalty=0.5, max_tokens=15),
    Asked.of(_prompt(12, 6), temperature=0, stop_token_ids=(0,), min_tokens=10, max_tokens=40),
    Asked.of(_prompt(34, 7), temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=10),
    Asked.of(
        _prompt(6, 8), temperature=0, choice=("größer", "日本語の文章", "groß"), max_tokens=40
    ),
    Asked.of(_prompt(20, 9), temperature=0, max_tokens=25, priority=3, cache_salt="a"),
    Asked.of(
        _prompt(20, 9),
        temperature=1,
        seed=3,
        max_tokens=20,
        on_disconnect=OnDisconnect.CONTINUE,
    ),
    # Prompts with one to three chunks. Those with the same first token share a prefix, except with
    # another tenant's salt. Workers retain the blocks of the sessions, also of the one that two
    # requests share. Requests of a lower priority are preempted first and admitted last, so that
    # their blocks are swapped out.
    Asked.of(_prompt(262, 10), temperature=0, max_tokens=12, session_id="s"),
    Asked.of(_prompt(290, 10), temperature=1, seed=4, max_tokens=8, session_id="s"),
    Asked.of(_prompt(262, 10), temperature=0, max_tokens=9, cache_salt="b"),
    Asked.of(_prompt(270, 13), temperature=0, max_tokens=30, priority=-1),
    Asked.of(_prompt(530, 10), temperature=0, max_tokens=14),
    Asked.of(_prompt(530, 13), temperature=0, max_tokens=14, priority=-1),
    Asked.of(_prompt(780, 10), temperature=0, max_tokens=8),
    Asked.of(_prompt(790, 13), temperature=0, max_tokens=8, priority=-1),
)


def undisturbed(asked: Asked) -> Transcript:
    """Return the request's output without faults, which is computed once."""
    if (calm := _CALM.get(repr(asked))) is None:
        calm = _CALM[repr(asked)] = _played_alone(asked)
    return calm


_CALM: dict[str, Transcript] = {}


def _played_alone(asked: Asked) -> Transcript:
    with SimCluster(ROUTERS, replace(WORKERS, num_blocks=64)) as cluster:
        cluster.start_router(0)
        cluster.start_worker(0)
        unhurried: GenerateOptions = {**asked.arguments(), "timeout_s": None}
        transcript = cluster.submit("calm", asked.prompt, unhurried)
        cluster.settle(_TIMEOUT_S)
    if not transcript.is_complete:
        raise Wrong(f"{asked} fails without a fault: {transcript.error!r}")
    return transcript
