"""Settings of a router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from ipaddress import ip_address
from itertools import combinations, product
from typing import Annotated, Literal, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass

from everlift.address import strip_brackets
from everlift.hub import name_for_clients
from everlift.images import MAX_IMAGES
from everlift.settings import CHECKED, Amount, Count, NotNegative, Port, Positive
from everlift.tls import InternalTls, Tls, check_pair, make_absolute

#: Settings that must name a host, because an empty one would mean every address of the machine.
_HOSTS = ("host", "internal_host")
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})
_LOOPBACK = {"localhost": "127.0.0.1"}

#: Names of the admission queue's orders.
Order: TypeAlias = Literal["fifo", "deadline", "shortest", "ranked", "hrrn", "attained"]
#: Fields of a body of the OpenAI API that may name the request's session.
SessionField: TypeAlias = Literal["prompt_cache_key", "user"]


@dataclass(frozen=True, slots=True)
class Listener:
    """Address on which a router listens; ``setting`` is the name of its setting.

    Port 0 is any free port. With an empty host the router does not listen.
    """

    setting: str
    host: str
    port: Port

    def overlaps(self, other: Listener) -> bool:
        """Return whether the two addresses, assumed to be on the same machine, need the same port.

        Port 0 and an empty host overlap with nothing.
        """
        hosts = {_LOOPBACK.get(host, host) for host in (self.host, other.host)}
        is_same_host = len(hosts) == 1 or bool(hosts & _EVERY_ADDRESS)
        return 0 != self.port == other.port and "" not in hosts and is_same_host


def overlapping(one: RouterConfig, other: RouterConfig) -> tuple[Listener, Listener] | None:
    """Return the first two listeners, one of each router, that need the same port; else None.

    The routers are assumed to be on the same machine.
    """
    pairs = product(one.listeners, other.listeners)
    return next((pair for pair in pairs if pair[0].overlaps(pair[1])), None)


#: Name of a model that clients may send.
ModelName: TypeAlias = Annotated[str, Field(min_length=1)]
#: Source of the defaults of sampling parameters.
SamplingDefaults: TypeAlias = Literal["model", "none"]
#: Format of tool calls in a model's text.
ToolFormat: TypeAlias = Literal[
    "auto",
    "hermes",
    "llama3",
    "pythonic",
    "mistral",
    "qwen3_coder",
    "deepseek",
    "gpt_oss",
]
#: Format of the reasoning in a model's text.
ReasoningFormat: TypeAlias = Literal["auto", "none", "think", "mistral_think", "gpt_oss"]


@dataclass(frozen=True, slots=True, config=CHECKED)
class ModelConfig:
    """Settings of a router for one model; RouterConfig itself contains those of the first model."""

    model: str = ""
    model_revision: str = ""
    adapters: tuple[str, ...] = ()
    served_model_names: tuple[ModelName, ...] = ()
    predictor: str = ""
    sampling_defaults: SamplingDefaults = "model"
    tool_format: ToolFormat = "auto"
    reasoning_format: ReasoningFormat = "auto"

    def __post_init__(self) -> None:
        make_absolute(self, "predictor")

    @property
    def name(self) -> str:
        """Name of the model for clients."""
        return name_for_clients(self.model, self.model_revision)


@dataclass(frozen=True, slots=True, config=CHECKED)
class RouterConfig:
    """Settings of a router. Durations are in seconds; port 0 takes a free port."""

    #: model whose tokenizer the router uses, written like the cluster's setting model
    model: str = ""
    #: branch, tag or commit of a hub id; not set: its main branch
    model_revision: str = ""
    #: LoRA adapters of the model, written like the cluster's setting adapters
    adapters: tuple[str, ...] = ()
    #: further names of the model, which clients may send as model
    served_model_names: tuple[ModelName, ...] = ()
    #: further models of the cluster, from the cluster's setting models
    more_models: tuple[ModelConfig, ...] = ()
    #: address of the clients' gRPC port
    host: str = "127.0.0.1"
    port: Port = 50051
    #: PEM files with the certificate and the key of the clients' ports; not set: no TLS
    tls_cert: str = ""
    tls_key: str = ""
    #: PEM file with the authority that signs clients' certificates, which are then required; not
    #: set: none is required
    tls_client_ca: str = ""
    #: largest message of a client's call, uncompressed; a larger one is refused with
    #: RESOURCE_EXHAUSTED. A prompt of a million tokens has about 5 MB
    max_message_bytes: Annotated[int, Field(ge=1 << 10, lt=1 << 31)] = 8 << 20
    #: address of the OpenAI API (HTTP); empty: disabled
    http_host: str = "127.0.0.1"
    http_port: Port = 8000
    #: serve the console, a page that shows the cluster, at /console
    console: bool = True
    #: origins of web pages that may use the OpenAI API, such as https://chat.example.com; "*": all
    cors_origins: tuple[str, ...] = ()
    #: fields of the OpenAI API whose value names the session of a request without x-session-id; the
    #: first one that is set applies. A value must name one conversation, and not an application
    session_from: tuple[SessionField, ...] = ()
    #: largest body of an HTTP request; a larger one is refused with 413
    max_body_bytes: Annotated[int, Field(ge=1 << 10)] = 8 << 20
    #: largest number of images of a request; more are refused (out_of_range)
    max_images: Annotated[int, Field(ge=0, le=MAX_IMAGES)] = 8
    #: largest size of all images of a request together, in bytes. The ledger stores each image
    #: once, as long as it has a request with that image
    max_image_bytes: Annotated[int, Field(ge=1 << 10, le=16 << 20)] = 4 << 20
    #: interval, in seconds, in which a stream of server-sent events sends at least something: at
    #: first its headers, later an SSE comment line; 0 disables both
    keep_alive: NotNegative = 15.0
    #: streams that get comment lines: those of requests with Accept: text/event-stream (accept), or
    #: all (always)
    keep_alive_comments: Literal["accept", "always"] = "accept"
    #: address of the port for workers and other routers
    internal_host: str = "127.0.0.1"
    internal_port: Port = 0
    #: TLS of the port for workers and other routers; the same settings as those of the workers
    internal_tls: InternalTls = field(default_factory=InternalTls)
    #: address of Prometheus metrics (GET /metrics) and probes (GET /ready, GET /live), without TLS;
    #: empty: disabled
    metrics_host: str = "127.0.0.1"
    metrics_port: Port = 0
    #: source of API keys: off (clients need none), file or ledger
    access: Literal["off", "file", "ledger"] = "off"
    #: file that `everlift key` writes, with hashes of keys and limits of tenants; to be set if
    #: access is file, and only then
    access_file: str = ""
    #: also export metrics under vLLM's names
    vllm_metrics: bool = False
    #: OTLP collector (gRPC) for traces of requests, as http://127.0.0.1:4317; empty: no traces
    trace_endpoint: str = ""
    #: share of the requests to trace; a request that arrives with a trace context follows the
    #: sampled flag of that context
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    #: lower a request's max_tokens if it exceeds the context length together with the prompt;
    #: false: refuse such a request (context_length_exceeded)
    clamp_max_tokens: bool = False
    #: largest number of queued requests; more are refused with RESOURCE_EXHAUSTED. everlift policy
    #: sets this, queue_ttl, refuse_late, order, undated_due, ageing_factor, starvation,
    #: class_floor, fair_share and tpot_target at run time
    max_queued: Annotated[int, Field(ge=1, lt=1 << 32)] = 10_000
    #: reject requests that are still queued after this many seconds (queue_timeout); 0 disables
    queue_ttl: NotNegative = 0.0
    #: reject requests that cannot meet their TTFT target or deadline, by the estimated wait: on
    #: arrival (deadline_unmeetable) or while queued (queue_timeout)
    refuse_late: bool = False
    #: premature retries that a tenant may make per second (retry_rate) and at once (retry_burst);
    #: further ones are refused (retried_too_soon)
    retry_rate: NotNegative = 1.0
    retry_burst: Amount = 10
    #: order of the queue within a class: earliest arrival (fifo), earliest deadline or
    #: ttft_target_ms (deadline), fewest predicted tokens (shortest), shortest predicted output by
    #: rank (ranked), or longest wait relative to its tokens (hrrn). Order attained: fewest tokens
    #: computed so far for the request's session
    order: Order = "fifo"
    #: order deadline: due time of a request without a deadline, in seconds after its arrival
    undated_due: Positive = 60.0
    #: orders shortest, ranked and attained: how long a request yields to others, in multiples of
    #: its estimated wait; a short request (attained: session) yields for a shorter time
    ageing_factor: NotNegative = 1.5
    #: file of `everlift train-predictor` that predicts output lengths; a new version is loaded
    #: within two seconds. Empty: the prediction is the mean of recent output lengths
    predictor: str = ""
    #: minimum of Kendall's tau between predicted and actual output lengths; below it, predictions
    #: are not used, and the orders shortest, ranked and hrrn act as fifo
    predictor_min_tau: Annotated[float, Field(ge=-1, le=1)] = 0.1
    #: a request that has waited for this many seconds leaves its class first, whatever the order; 0
    #: disables
    starvation: NotNegative = 0.0
    #: minimum share of lower classes: tokens of work that a class with queued requests may send per
    #: token of work of higher classes. The lowest class, that of batches, has no share
    class_floor: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    #: if clients need API keys: share each class fairly between tenants, by the tokens that each
    #: was served; the order applies within a tenant
    fair_share: bool = True
    #: weight of an uncached prompt token and of an output token in fair_share and attained service
    prompt_token_weight: Positive = 1.0
    output_token_weight: Positive = 2.0
    #: number of requests that may be dispatched to a worker beyond its free slots
    local_depth: Amount = 2
    #: dispatch requests to workers that have their prefix cached. If such a worker is busy, a
    #: request waits for it for at most the time that the cached prefix saves, for this request
    #: and for others
    locality: bool = True
    #: largest total of uncached tokens of the prompts that wait for prefill at a worker. It applies
    #: to prompts that fit in one step; one longer prompt may wait in addition
    max_pending_prefill: Count = 4096
    #: target time per output token in seconds, which limits the batch of a worker by its predicted
    #: step time; 0 disables
    tpot_target: NotNegative = 0.0
    #: a dispatch that its worker has not acknowledged after this many seconds no longer counts as
    #: load
    dispatch_ack: Positive = 1.0
    #: a request fails after it lost this many workers in a row, each while it was in a step, and
    #: received no new token meanwhile
    max_losses: Count = 3
    #: a request fails after it lost this many workers in a row, in a step or not, and received no
    #: new token meanwhile
    max_losses_total: Count = 20
    #: largest number of moves of a preempted request to other workers; evictions for a higher class
    #: do not count
    max_moves: Amount = 3
    #: share of a worker's blocks that must stay free when a preempted request is moved there
    move_reserve: NotNegative = 0.05
    #: a worker whose steps take this many times as long as those of other workers gets no requests
    #: while the others have capacity
    slow_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 5.0
    #: allow fault injection: everlift chaos
    chaos: bool = False
    #: seconds for which a request continues without a client, if its on_disconnect is grace
    grace: NotNegative = 30.0
    #: a worker that sends no message for this many seconds is lost; the loss is declared after 85
    #: to 90 % of this time. The longest pause between two messages of a worker is worker.heartbeat
    worker_silence: Positive = 1.0
    #: the leader removes a worker from the ledger's table if it is unreachable for this many
    #: seconds
    worker_forget: Positive = 10.0
    #: a router that has not renewed its lease for this many seconds is lost; a new leader takes
    #: over within 2 s
    lease: Positive = 1.2
    #: longest wait of a request, in seconds, while there is no worker; then it ends with
    #: UNAVAILABLE (no_worker). Allow for the time to start a machine, pull the image and load the
    #: model
    worker_wait: NotNegative = 1800.0
    #: interval, in seconds, at which a router renews its lease
    heartbeat: Positive = 0.25
    #: before_delivery: a client receives a token after the ledger stored it; behind: at once,
    #: marked unledgered, and the ledger stores it some ten milliseconds later
    durability: Literal["before_delivery", "behind"] = "before_delivery"
    #: while the ledger is away: streams continue, marked unledgered (available), or pause (strict)
    on_ledger_loss: Literal["available", "strict"] = "available"
    #: on_ledger_loss available: streams continue for this many seconds, then pause
    unledgered: NotNegative = 10.0
    #: requests that ended within this many seconds are sent to the ledger again if its server
    #: restarts or fails over, because it may have lost its last second of writes
    reassert: NotNegative = 5.0
    #: source of the defaults for sampling parameters that a request does not set: the model's
    #: generation_config.json (model), or Everlift's own defaults (none)
    sampling_defaults: SamplingDefaults = "model"
    #: format of the model's tool calls; auto: detected from its chat template
    tool_format: ToolFormat = "auto"
    #: format of the model's reasoning, which answers separate from the content; auto: detected from
    #: its chat template
    reasoning_format: ReasoningFormat = "auto"
    #: accept the chat_template of a request, which renders only this request's chat, in the same
    #: processes and within the same limits as the model's template
    allow_chat_template: bool = False
    #: limit of the CPU time, in seconds, for rendering one chat with the model's chat template; a
    #: process that exceeds it is killed
    template_timeout: Positive = 2.0
    #: number of processes that render chats; each renders one chat at a time
    template_processes: Count = 1
    #: total size in MiB of the files that a tenant may have, before compression; the ledger holds
    #: them. 0 disables files and batches
    files_mib: Annotated[int, Field(ge=0)] = 256
    #: seconds for which files and batches are kept; a file's expires_after replaces it
    file_retention: Positive = 604800.0
    #: seconds that a stopping router gives its requests to finish before other routers take them
    #: over
    drain: NotNegative = 5.0

    def __post_init__(self) -> None:
        self._check_tls()
        self._check_places()
        if self.heartbeat * 2 > self.lease:
            raise ValueError(f"lease ({self.lease:g}) must be at least twice heartbeat")
        if (self.access == "file") != bool(self.access_file):
            raise ValueError("access_file must be set if access is file, and only then")
        make_absolute(self, "access_file", "predictor")

    def _check_places(self) -> None:
        for name in (*_HOSTS, "http_host", "metrics_host"):
            object.__setattr__(self, name, strip_brackets(getattr(self, name)))
        for name in _HOSTS:
            if not getattr(self, name):
                raise ValueError(f"{name} must be set: an empty host would mean every address")
        for one, other in combinations(self.listeners, 2):
            if one.overlaps(other):
                raise ValueError(f"{one.setting} and {other.setting} are both {one.port}")

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """Settings of all models; the first one is for requests that name no model."""
        first = ModelConfig(**{each.name: getattr(self, each.name) for each in fields(ModelConfig)})
        return first, *self.more_models

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """Addresses that the router listens on."""
        return (
            Listener("port", self.host, self.port),
            Listener("http_port", self.http_host, self.http_port),
            Listener("internal_port", self.internal_host, self.internal_port),
            Listener("metrics_port", self.metrics_host, self.metrics_port),
        )

    def _check_tls(self) -> None:
        check_pair(self.tls_cert, self.tls_key, "tls_")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca must be set together with tls_cert")
        make_absolute(self, "tls_cert", "tls_key", "tls_client_ca")

    @property
    def tls(self) -> Tls | None:
        """Certificate files of the clients' ports; None without TLS."""
        return Tls(self.tls_client_ca, self.tls_cert, self.tls_key) if self.tls_cert else None


def exposures(config: RouterConfig, *, has_keys: bool) -> Iterator[str]:
    """Yield a warning for each kind of port that other machines can reach without full protection.

    The clients' ports need TLS and API keys, and the port for workers and routers needs TLS.
    ``has_keys`` tells whether clients need API keys. The lack of protection may be intended in a
    closed network.
    """
    ways = (("TLS", config.tls is not None), ("API keys", has_keys))
    missing = [name for name, is_there in ways if not is_there]
    hosts = filter(None, (config.host, config.http_host))
    if missing and not all(map(_is_loopback, hosts)):
        yield f"other machines can reach the clients' ports without {' or '.join(missing)}"
    if not config.internal_tls.is_on and not _is_loopback(config.internal_host):
        yield "other machines can reach the port of workers and routers: set internal_tls"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
