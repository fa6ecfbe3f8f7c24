"""Settings of a worker, with every default of this layer. Pure."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.dataclasses import dataclass

from everlift.address import bare
from everlift.engine_policy import EnginePolicy
from everlift.hub import name_for_clients
from everlift.settings import CHECKED, Amount, Count, NotNegative, Part, Port, Positive
from everlift.tls import InternalTls
from worker.device.device_kind import DeviceKind

#: The model name that stands for the fake runner.
FAKE = "fake"
_AtLeast2 = Annotated[int, Field(ge=2)]
_WILDCARDS = frozenset({"0.0.0.0", "::", "[::]", ""})


@dataclass(frozen=True, slots=True, config=CHECKED)
class FakeModel:
    """Behaviour of the fake runner."""

    vocab_size: _AtLeast2 = 1024
    #: most tokens of one sequence, prompt and output
    max_model_len: _AtLeast2 = 4096
    #: seconds that every step takes
    step_time: NotNegative = 0.0
    #: and for each token that it computes
    token_time: NotNegative = 0.0
    #: the token that ends a sequence; never made while eos_one_in is 0
    eos_token_id: int = 0
    #: one token of so many is the end, 0 for none; which one is decided by the tokens before it
    eos_one_in: Amount = 0
    #: all tokens but one of so many are the same one, 0 for none: a text that drafts can guess
    surprise_one_in: Amount = 0
    #: what a block takes of kv_cache_mib
    block_kib: Count = 512
    #: its steps are launched before the ones before them are committed, as those of a GPU
    runs_ahead: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise ValueError(f"eos_token_id must be a token below {self.vocab_size}")


@dataclass(frozen=True, slots=True, config=CHECKED)
class Speculation:
    """Guesses at the next tokens, which one step then checks: what followed the last tokens where
    they occurred before, in prompt or output, is guessed to follow them again."""

    #: most tokens guessed for one sequence in a step; 0 guesses nothing
    num_draft_tokens: Amount = 0
    #: so many of the last tokens must have occurred before
    min_match: Count = 2
    #: the longest match counts, up to so many tokens
    max_match: int = 4

    def __post_init__(self) -> None:
        if self.max_match < self.min_match:
            raise ValueError(
                f"max_match ({self.max_match}) must be at least min_match ({self.min_match})"
            )


@dataclass(frozen=True, slots=True, config=CHECKED)
class Scheduling:
    """Scheduling policy of the engine."""

    #: continuous: whoever there is room for comes into the batch in any step. slai: decodes whose
    #: deadline is near go before prefills, the others behind them, and short prompts before long
    #: ones. static: a batch is closed, and nobody comes in until all of it are done. magnus: the
    #: same with batches of outputs that are predicted to be similarly long. everlift policy sets
    #: another one at run time
    policy: EnginePolicy = "continuous"
    #: slai: how long after the one before it a token is due
    tbt_target: Positive = 0.1
    #: slai: so many tokens shorter does a prompt count for each sequence that comes after it
    ageing_tokens: Count = 16
    #: magnus: part of a batch's slot steps that may be wasted, as outputs are predicted
    batch_waste: Annotated[float, Field(ge=0, lt=1)] = 0.25


@dataclass(frozen=True, slots=True, config=CHECKED)
class Grammars:
    """Limits of structured output.

    Each grammar has its own process, which ends when it exceeds them.
    """

    #: CPU seconds to compile a grammar
    compile_timeout: Positive = 30.0
    #: CPU seconds to find out which tokens a grammar allows next
    step_budget: Positive = 0.1
    #: memory that a grammar and its sequences may take
    process_mib: Count = 256
    #: memory of grammars that are kept for later requests
    cache_mib: Amount = 512
    #: grammars that are compiled at the same time
    max_compiling: Count = 4
    #: grammars that wait to be compiled; more are refused
    max_queued: Count = 256


#: Of a worker on CPUs: their memory is shared with all that runs there.
_CPU_KV_CACHE_MIB = 256


@dataclass(frozen=True, slots=True, config=CHECKED)
class WorkerConfig:
    """Settings of a worker, the same for all its ranks. Durations are in seconds."""

    #: Hugging Face directory of the model, hub id (org/name), or "fake"; a rank needs one
    model: str = ""
    #: of a hub id; ranks need a commit, so that all of them read the same
    model_revision: str = ""
    #: dummy: pseudo-random weights in place of the checkpoint's; config.json is all that is read
    load_format: Literal["auto", "dummy"] = "auto"
    #: threads of a rank that read its weights at the same time
    weight_readers: Count = 4
    #: where routers dial, so no wildcard; other ranks find rank 0 here too
    host: str = "127.0.0.1"
    #: 0 takes a free one
    port: Port = 0
    #: TLS there, as routers have it; what ranks say to each other has none
    internal_tls: InternalTls = field(default_factory=InternalTls)
    #: ranks that share the model
    tensor_parallel: Count = 1
    #: blocks of the KV cache; not set: what fits into kv_cache_mib
    num_blocks: Count | None = None
    #: memory of the KV cache, over all ranks; not set: on a GPU what the weights and the largest
    #: step leave of gpu_memory_utilization, on CPUs a little
    kv_cache_mib: Count | None = None
    #: part of a GPU's memory that may be in use, by whomever
    gpu_memory_utilization: Part = 0.9
    #: sequences in one batch
    max_num_seqs: Count = 256
    #: tokens computed in one step: one for each sequence that decodes, the rest for prefill; not
    #: set: what suits the device, and at least max_num_seqs
    max_num_batched_tokens: Count | None = None
    #: most tokens of one sequence, prompt and output; not set: what the model was made for
    max_model_len: _AtLeast2 | None = None
    #: part of the blocks that admission leaves free, so that what runs can grow
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    #: what becomes of the blocks of a preempted sequence when others need them: recompute drops
    #: them, swap keeps copies in the host's memory, if copying them is quicker than computing them
    preemption: Literal["recompute", "swap"] = "recompute"
    #: host memory for swap, over all ranks
    swap_mib: Amount = 1024
    #: whom a step is for
    scheduling: Scheduling = field(default_factory=Scheduling)
    #: drafts of several tokens a step
    speculation: Speculation = field(default_factory=Speculation)
    #: structured output
    grammar: Grammars = field(default_factory=Grammars)
    #: auto is a GPU where there is one
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: auto is bfloat16 where the device computes in it natively
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: int8 quantises the weights at load, one scale for each output channel, on CPUs only
    quantization: Literal["none", "int8"] = "none"
    #: CPU threads of one rank; not set: the process's share of cores
    num_threads: Count | None = None
    #: the only cluster whose routers are served; empty serves any
    cluster_id: str = ""
    #: a router hears from the worker at least so often
    heartbeat: Positive = 0.15
    #: how long the ranks wait for each other to start
    join_timeout: Positive = 120.0
    #: what has been handed back has so long to reach the routers when the worker stops
    drain_timeout: Positive = 1.0
    #: a step that takes so long, and ten times as long as the last ones lead to expect, will not
    #: end any more: the worker ends
    step_timeout: Positive = 5.0
    #: asked every two seconds; it answers 200 when the machine is about to be taken away, and the
    #: worker hands everything back. Not set: SIGUSR1 alone says so
    reclaim_url: str = ""
    #: directory in which each rank keeps a file named after its process id while it serves, for
    #: readiness probes; not set: none
    ready_dir: str = ""
    #: allow faults on purpose: everlift chaos
    chaos: bool = False
    #: used with the model "fake" only
    fake: FakeModel = field(default_factory=FakeModel)

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", bare(self.host))
        self._check_addresses()
        self._check_batch()

    def _check_addresses(self) -> None:
        if self.host in _WILDCARDS:
            raise ValueError(f"host must be an address that routers can dial, not {self.host!r}")
        if self.reclaim_url and urlsplit(self.reclaim_url).scheme not in ("http", "https"):
            raise ValueError(f"reclaim_url must be an http address, not {self.reclaim_url!r}")

    def _check_batch(self) -> None:
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each sequence decodes one token a step"
            )

    @property
    def cpu_kv_cache_mib(self) -> int:
        """Memory of the KV cache where it is the machine's, over all ranks."""
        return self.kv_cache_mib or _CPU_KV_CACHE_MIB

    def batched_tokens(self, kind: DeviceKind) -> int:
        """Tokens that a step may have on such a device."""
        return self.max_num_batched_tokens or max(kind.batched_tokens, self.max_num_seqs)

    @property
    def is_fake(self) -> bool:
        return self.model == FAKE

    @property
    def reads_weights(self) -> bool:
        return self.load_format == "auto"

    @property
    def name(self) -> str:
        """Name of the model for clients: its hub id, or the name of its directory."""
        return FAKE if self.is_fake else name_for_clients(self.model, self.model_revision)
