"""What an operator can set about a worker. Every default of this layer stands here. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from everlift.address import bare
from everlift.engine_policy import EnginePolicy
from everlift.model_name import name_for_clients
from everlift.tls import InternalTls
from worker.device.device_kind import DeviceKind

#: The model name that stands for the fake runner.
FAKE = "fake"
_WILDCARDS = frozenset({"0.0.0.0", "::", "[::]", ""})


@dataclass(frozen=True, slots=True)
class FakeModel:
    """What the fake runner pretends to be."""

    vocab_size: int = 1024
    #: most tokens of one sequence, prompt and output
    max_model_len: int = 4096
    #: seconds that every step takes
    step_time: float = 0.0
    #: and for each token that it computes
    token_time: float = 0.0
    #: the token that ends a sequence; never made while eos_one_in is 0
    eos_token_id: int = 0
    #: one token of so many is the end, 0 for none; which one is decided by the tokens before it
    eos_one_in: int = 0
    #: all tokens but one of so many are the same one, 0 for none: a text that drafts can guess
    surprise_one_in: int = 0
    #: what a block takes of kv_cache_mib
    block_kib: int = 512
    #: its steps are launched before the ones before them are committed, as those of a GPU
    runs_ahead: bool = False

    def __post_init__(self) -> None:
        _at_least("vocab_size", self.vocab_size, 2)
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("step_time", self.step_time, 0)
        _at_least("token_time", self.token_time, 0)
        _at_least("eos_one_in", self.eos_one_in, 0)
        _at_least("surprise_one_in", self.surprise_one_in, 0)
        _at_least("block_kib", self.block_kib, 1)
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise ValueError(f"eos_token_id must be a token below {self.vocab_size}")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Guesses at the next tokens, which one step then checks: what followed the last tokens where
    they occurred before, in prompt or output, is guessed to follow them again."""

    #: most tokens guessed for one sequence in a step; 0 guesses nothing
    num_draft_tokens: int = 0
    #: so many of the last tokens must have occurred before
    min_match: int = 2
    #: the longest match counts, up to so many tokens
    max_match: int = 4

    def __post_init__(self) -> None:
        _at_least("num_draft_tokens", self.num_draft_tokens, 0)
        _at_least("min_match", self.min_match, 1)
        if self.max_match < self.min_match:
            raise ValueError(
                f"max_match ({self.max_match}) must be at least min_match ({self.min_match})"
            )


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Whom a step is for."""

    #: continuous: whoever there is room for comes into the batch in any step. slai: decodes whose
    #: deadline is near go before prefills, the others behind them, and short prompts before long
    #: ones. static: a batch is closed, and nobody comes in until all of it are done. magnus: the
    #: same with batches of outputs that are predicted to be similarly long. everlift policy sets
    #: another one at run time
    policy: EnginePolicy = "continuous"
    #: slai: how long after the one before it a token is due
    tbt_target: float = 0.1
    #: slai: so many tokens shorter does a prompt count for each sequence that comes after it
    ageing_tokens: int = 16
    #: magnus: part of a batch's slot steps that may be wasted, as outputs are predicted
    batch_waste: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.batch_waste < 1.0:
            raise ValueError(f"batch_waste must be from 0 to below 1, not {self.batch_waste:g}")
        if not self.tbt_target > 0:
            raise ValueError(f"tbt_target must be above 0, not {self.tbt_target:g}")
        _at_least("ageing_tokens", self.ageing_tokens, 1)


@dataclass(frozen=True, slots=True)
class Grammars:
    """What structured output may cost. Each grammar has a process of its own, which ends when it
    takes more."""

    #: CPU seconds to compile a grammar
    compile_timeout: float = 30.0
    #: CPU seconds to find out which tokens a grammar allows next
    step_budget: float = 0.1
    #: memory that a grammar and its sequences may take
    process_mib: int = 256
    #: memory of grammars that are kept for later requests
    cache_mib: int = 512
    #: grammars that are compiled at the same time
    max_compiling: int = 4
    #: grammars that wait to be compiled; more are refused
    max_queued: int = 256

    def __post_init__(self) -> None:
        for name in ("process_mib", "max_compiling", "max_queued"):
            _at_least(name, getattr(self, name), 1)
        _at_least("cache_mib", self.cache_mib, 0)
        for name in ("compile_timeout", "step_budget"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name):g}")


_COUNTS = ("tensor_parallel", "weight_readers", "max_num_seqs")
#: At least 1 where they are set.
_OPTIONAL_COUNTS = ("num_blocks", "kv_cache_mib", "max_num_batched_tokens", "num_threads")
#: Of a worker on CPUs: their memory is shared with all that runs there.
_CPU_KV_CACHE_MIB = 256


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker: the same value goes to each of its ranks. Durations are seconds."""

    #: Hugging Face directory of the model, hub id (org/name), or "fake"; a rank needs one
    model: str = ""
    #: of a hub id; ranks need a commit, so that all of them read the same
    model_revision: str = ""
    #: dummy: pseudo-random weights in place of the checkpoint's; config.json is all that is read
    load_format: Literal["auto", "dummy"] = "auto"
    #: threads of a rank that read its weights at the same time
    weight_readers: int = 4
    #: where routers dial, so no wildcard; other ranks find rank 0 here too
    host: str = "127.0.0.1"
    #: 0 takes a free one
    port: int = 0
    #: TLS there, as routers have it; what ranks say to each other has none
    internal_tls: InternalTls = field(default_factory=InternalTls)
    #: ranks that share the model
    tensor_parallel: int = 1
    #: blocks of the KV cache; not set: what fits into kv_cache_mib
    num_blocks: int | None = None
    #: memory of the KV cache, over all ranks; not set: on a GPU what the weights and the largest
    #: step leave of gpu_memory_utilization, on CPUs a little
    kv_cache_mib: int | None = None
    #: part of a GPU's memory that may be in use, by whomever
    gpu_memory_utilization: float = 0.9
    #: sequences in one batch
    max_num_seqs: int = 256
    #: tokens computed in one step: one for each sequence that decodes, the rest for prefill; not
    #: set: what suits the device, and at least max_num_seqs
    max_num_batched_tokens: int | None = None
    #: most tokens of one sequence, prompt and output; not set: what the model was made for
    max_model_len: int | None = None
    #: part of the blocks that admission leaves free, so that what runs can grow
    watermark: float = 0.01
    #: what becomes of the blocks of a preempted sequence when others need them: recompute drops
    #: them, swap keeps copies in the host's memory, if copying them is quicker than computing them
    preemption: Literal["recompute", "swap"] = "recompute"
    #: host memory for swap, over all ranks
    swap_mib: int = 1024
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
    #: CPU threads of one rank; not set: the process's share of cores
    num_threads: int | None = None
    #: the only cluster whose routers are served; empty serves any
    cluster_id: str = ""
    #: a router hears from the worker at least so often
    beat: float = 0.15
    #: how long the ranks wait for each other to start
    join_timeout: float = 120.0
    #: what has been handed back has so long to reach the routers when the worker stops
    drain_timeout: float = 1.0
    #: a step that takes so long, and ten times as long as the last ones lead to expect, will not
    #: end any more: the worker ends
    step_timeout: float = 5.0
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
        self._check_counts()
        self._check_numbers()

    def _check_addresses(self) -> None:
        if self.host in _WILDCARDS:
            raise ValueError(f"host must be an address that routers can dial, not {self.host!r}")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        if self.reclaim_url and urlsplit(self.reclaim_url).scheme not in ("http", "https"):
            raise ValueError(f"reclaim_url must be an http address, not {self.reclaim_url!r}")

    def _check_counts(self) -> None:
        for name in _COUNTS:
            _at_least(name, getattr(self, name), 1)
        _at_least("swap_mib", self.swap_mib, 0)
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each sequence decodes one token a step"
            )

    def _check_numbers(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be from 0 to below 1, not {self.watermark:g}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            part = self.gpu_memory_utilization
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {part:g}")
        for name in ("beat", "join_timeout", "drain_timeout", "step_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name):g}")

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
        """What clients call the model: its hub id, or the name of its directory."""
        return FAKE if self.is_fake else name_for_clients(self.model, self.model_revision)


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} must be at least {least:g}, not {value:g}")
