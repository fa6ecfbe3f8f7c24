"""Settings of a worker and their defaults. Pure."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.dataclasses import dataclass

from everlift.address import strip_brackets
from everlift.engine_policy import EnginePolicy
from everlift.hub import name_for_clients
from everlift.settings import CHECKED, Amount, Count, Fraction, NotNegative, Port, Positive
from everlift.tls import InternalTls
from worker.device.device_kind import DeviceKind

#: Model name that selects the fake runner.
FAKE = "fake"
_AtLeast2 = Annotated[int, Field(ge=2)]
_WILDCARDS = frozenset({"0.0.0.0", "::", "[::]", ""})


@dataclass(frozen=True, slots=True, config=CHECKED)
class FakeModel:
    """Settings of the fake runner, which generates tokens without a model."""

    vocab_size: _AtLeast2 = 1024
    #: longest sequence in tokens, prompt and output
    max_model_len: _AtLeast2 = 4096
    #: duration of a step in seconds, without token_time
    step_time: NotNegative = 0.0
    #: seconds that each computed token adds to its step
    token_time: NotNegative = 0.0
    #: token that ends a sequence; never produced while eos_one_in is 0
    eos_token_id: int = 0
    #: on average, one of this many tokens is eos_token_id; the previous tokens determine which. 0:
    #: no token is
    eos_one_in: Amount = 0
    #: on average, one of this many tokens is random; the others are all equal, so that drafts can
    #: predict them. 0: all tokens are random
    surprise_one_in: Amount = 0
    #: assumed size of a KV block in KiB, by which kv_cache_mib is divided
    block_kib: Count = 512
    #: launch steps before the previous one is committed, as on a GPU
    runs_ahead: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise ValueError(f"eos_token_id must be a token below {self.vocab_size}")


@dataclass(frozen=True, slots=True, config=CHECKED)
class Speculation:
    """Settings of speculative decoding.

    The draft tokens of a sequence are the tokens that followed an earlier occurrence of the last
    tokens of the sequence (n-gram lookup).
    """

    #: largest number of draft tokens of a sequence in a step; 0 disables speculation
    num_draft_tokens: Amount = 0
    #: smallest number of last tokens whose earlier occurrence yields draft tokens
    min_match: Count = 2
    #: largest number of last tokens for which an earlier occurrence is searched
    max_match: int = 4

    def __post_init__(self) -> None:
        if self.max_match < self.min_match:
            raise ValueError(
                f"max_match ({self.max_match}) must be at least min_match ({self.min_match})"
            )


@dataclass(frozen=True, slots=True, config=CHECKED)
class Scheduling:
    """Scheduling policy of the engine."""

    #: continuous: admit sequences whenever there is room. slai: decodes near their deadline before
    #: prefill, other decodes after it. static: closed batches. magnus: closed batches of similar
    #: predicted output length. everlift policy changes it at run time
    policy: EnginePolicy = "continuous"
    #: slai: target for the time between two tokens of a sequence, in seconds
    tbt_target: Positive = 0.1
    #: continuous, slai: short prompts come first, but a prompt counts as this many tokens shorter
    #: for each later arrival
    ageing_tokens: Count = 256
    #: magnus: largest share of a batch's decode steps in which a slot may be empty, if the
    #: predicted output lengths are right
    batch_waste: Annotated[float, Field(ge=0, lt=1)] = 0.25


@dataclass(frozen=True, slots=True, config=CHECKED)
class Grammars:
    """Limits of structured output.

    Each grammar has its own process. The kernel ends a process that exceeds its CPU time or memory.
    """

    #: CPU seconds to compile a grammar and to compute the first tokens that it allows
    compile_timeout: Positive = 30.0
    #: CPU seconds to compute which tokens a grammar allows next in a sequence
    step_budget: Positive = 0.1
    #: memory of a grammar's process in MiB, for the grammar and its sequences
    process_mib: Count = 256
    #: memory in MiB of compiled grammars that are kept for later requests
    cache_mib: Amount = 512
    #: largest number of grammars that are compiled at the same time
    max_compiling: Count = 4
    #: largest number of grammars that wait to be compiled; more are rejected
    max_queued: Count = 256


#: Default KV cache on CPUs, in MiB; small, because other processes use the same memory.
_CPU_KV_CACHE_MIB = 256
#: Values that some settings must have if the engine is vLLM.
_VLLM_ONLY = {
    "load_format": "auto",
    "quantization": "none",
    "kv_cache_dtype": "auto",
    "preemption": "recompute",
    "max_loaded_adapters": None,
}


@dataclass(frozen=True, slots=True, config=CHECKED)
class WorkerConfig:
    """Settings of a worker, the same for all its ranks. Durations are in seconds."""

    #: the model (required); same values as the cluster's setting model
    model: str = ""
    #: commit of the model's repository on the hub, so that all ranks read the same files
    model_revision: str = ""
    #: LoRA adapters of the model, written like the cluster's setting adapters
    adapters: tuple[str, ...] = ()
    #: largest number of adapters in a worker's memory, for Everlift's own engine; others are loaded
    #: when requests name them, in place of idle ones. Not set: the number of adapters
    max_loaded_adapters: Count | None = None
    #: largest rank of an adapter that is loaded at run time; GPUs reserve memory for it
    max_adapter_rank: Annotated[int, Field(ge=1, le=512)] = 64
    #: directory below which operators may load adapters at run time; empty: they may load adapters
    #: by hub id only
    adapter_dir: str = ""
    #: everlift: Everlift's own engine; vllm: vLLM, which must be installed where the worker runs
    engine: Literal["everlift", "vllm"] = "everlift"
    #: Python interpreter of the worker's processes; not set: that of everlift up. vLLM has an
    #: environment of its own
    python: str = ""
    #: dummy: pseudo-random weights; only config.json is read
    load_format: Literal["auto", "dummy"] = "auto"
    #: number of threads of a rank that read weights
    weight_readers: Count = 4
    #: address at which routers and other ranks connect; no wildcard
    host: str = "127.0.0.1"
    #: port for routers; 0: any free one
    port: Port = 0
    #: TLS of the port for routers, as in the router's setting; traffic between ranks is not
    #: encrypted
    internal_tls: InternalTls = field(default_factory=InternalTls)
    #: number of devices over which the model is split; Everlift's own engine has a rank for each
    tensor_parallel: Count = 1
    #: number of blocks of the KV cache; not set: as many as fit into kv_cache_mib
    num_blocks: Count | None = None
    #: memory of the KV cache in MiB, in total over all ranks; not set: 256 on CPUs, and on a GPU
    #: the part of gpu_memory_utilization that weights and the largest step do not need
    kv_cache_mib: Count | None = None
    #: share of a GPU's memory that may be in use, by all processes
    gpu_memory_utilization: Fraction = 0.9
    #: largest number of sequences in a batch
    max_num_seqs: Count = 256
    #: largest number of tokens computed in one step: one for each decoding sequence, the rest for
    #: prefill and drafts; not set: depends on the device, and at least max_num_seqs
    max_num_batched_tokens: Count | None = None
    #: longest sequence in tokens, prompt and output; not set: the model's own limit. Lowered to
    #: what the KV cache holds
    max_model_len: _AtLeast2 | None = None
    #: share of the blocks that admission leaves free for growing sequences
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    #: seconds after the last request of a session in which its cached blocks are retained: evicted
    #: only if no other block is free
    session_retention_s: NotNegative = 60.0
    #: largest share of the blocks that sessions retain; 0 disables retention
    session_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    #: handling of a preempted sequence's blocks when other sequences need them: recompute drops
    #: the blocks, swap copies them to host memory if that is faster than recomputing
    preemption: Literal["recompute", "swap"] = "recompute"
    #: host memory for swap in MiB, in total over all ranks
    swap_mib: Amount = 1024
    #: batching policy
    scheduling: Scheduling = field(default_factory=Scheduling)
    #: speculative decoding with draft tokens
    speculation: Speculation = field(default_factory=Speculation)
    #: structured output
    grammar: Grammars = field(default_factory=Grammars)
    #: auto: a GPU if there is one
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: auto: bfloat16 if the device computes in it natively and the weights are not quantised, else
    #: float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: int8: quantise the weights at load, one scale for each output channel, on CPUs only
    quantization: Literal["none", "int8"] = "none"
    #: fp8: keys and values in e4m3, which takes half the memory of bfloat16 and changes results
    #: slightly, on GPUs only. auto: in dtype
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    #: CPU threads of a rank; not set: the number of cores that the process may use
    num_threads: Count | None = None
    #: id of the cluster whose routers are accepted; empty: any
    cluster_id: str = ""
    #: largest interval between messages to a router, in seconds
    heartbeat: Positive = 0.15
    #: seconds that the ranks wait for each other at the start
    join_timeout: Positive = 120.0
    #: seconds that a stopping worker waits for its returned sequences to reach the routers
    drain_timeout: Positive = 1.0
    #: seconds without a heartbeat after which another rank is considered frozen; the worker then
    #: ends. Ranks send a heartbeat every 0.2 s
    rank_silence: Annotated[float, Field(ge=0.5)] = 1.0
    #: seconds after which a step is considered stuck, provided that it also takes ten times as long
    #: as recent steps predict; the worker then ends
    step_timeout: Positive = 5.0
    #: URL that answers 200 when the machine is about to be reclaimed, polled every two seconds; the
    #: worker then drains. Empty: only SIGUSR1 starts the drain
    reclaim_url: str = ""
    #: directory in which each rank keeps a file named after its process id while it serves, for
    #: readiness probes; not set: none
    ready_dir: str = ""
    #: allow fault injection (everlift chaos), and check the engine's invariants while it is idle
    chaos: bool = False
    #: settings of the model "fake"
    fake: FakeModel = field(default_factory=FakeModel)

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", strip_brackets(self.host))
        self._check_addresses()
        self._check_batch()
        self._check_engine()

    def _check_addresses(self) -> None:
        if self.host in _WILDCARDS:
            raise ValueError(f"host must be an address that routers can dial, not {self.host!r}")
        if self.reclaim_url and urlsplit(self.reclaim_url).scheme not in ("http", "https"):
            raise ValueError(f"reclaim_url must be an http or https URL, not {self.reclaim_url!r}")

    def _check_batch(self) -> None:
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each sequence decodes one token a step"
            )

    def _check_engine(self) -> None:
        if self.max_loaded_adapters and self.is_fake:
            raise ValueError(
                f"max_loaded_adapters needs a model; the model {FAKE!r} has no adapters"
            )
        if self.engine == "everlift":
            return
        if self.is_fake:
            raise ValueError("engine must be everlift for the model fake")
        for name, only in _VLLM_ONLY.items():
            if getattr(self, name) != only:
                must = "not be set" if only is None else f"be {only}"
                raise ValueError(f"{name} must {must} if engine is vllm")
        if self.speculation.num_draft_tokens:
            raise ValueError("speculation.num_draft_tokens must be 0 if engine is vllm")

    @property
    def num_ranks(self) -> int:
        """Number of the worker's ranks; 1 with vLLM, which starts its devices' processes itself."""
        return 1 if self.engine == "vllm" else self.tensor_parallel

    @property
    def num_adapter_slots(self) -> int:
        """Number of adapters that Everlift's own engine has in memory at once."""
        if self.engine == "vllm":
            return 0
        return self.max_loaded_adapters or len(self.adapters)

    @property
    def cpu_kv_cache_mib(self) -> int:
        """Memory of the KV cache on CPUs in MiB, in total over all ranks."""
        return self.kv_cache_mib or _CPU_KV_CACHE_MIB

    def batched_tokens(self, kind: DeviceKind) -> int:
        """Return the largest number of tokens in one step on a device of ``kind``."""
        return self.max_num_batched_tokens or max(kind.batched_tokens, self.max_num_seqs)

    @property
    def is_fake(self) -> bool:
        return self.model == FAKE

    @property
    def reads_weights(self) -> bool:
        return self.load_format == "auto"

    @property
    def name(self) -> str:
        """Name of the model for clients: its hub id, or the name of its directory or file."""
        return FAKE if self.is_fake else name_for_clients(self.model, self.model_revision)
