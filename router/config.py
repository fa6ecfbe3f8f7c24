"""Settings of a router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from ipaddress import ip_address
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass

from everlift.address import bare
from everlift.settings import CHECKED, Amount, Count, NotNegative, Port, Positive
from everlift.tls import InternalTls, Tls, check_pair, make_absolute

#: Where nobody could connect, or everybody could, if it were empty.
_HOSTS = ("host", "internal_host")
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})
_LOOPBACK = {"localhost": "127.0.0.1"}

#: Names of the admission queue's orders.
Order: TypeAlias = Literal["fifo", "deadline", "shortest", "ranked", "hrrn"]


@dataclass(frozen=True, slots=True)
class Listener:
    """An address that a router listens on. Port 0 is any free port; no host is no listener."""

    setting: str
    host: str
    port: Port

    def overlaps(self, other: Listener) -> bool:
        """Return whether only one of two listeners on the same machine can have its port."""
        hosts = {_LOOPBACK.get(host, host) for host in (self.host, other.host)}
        is_same_host = len(hosts) == 1 or bool(hosts & _EVERY_ADDRESS)
        return 0 != self.port == other.port and "" not in hosts and is_same_host


def overlapping(one: RouterConfig, other: RouterConfig) -> tuple[Listener, Listener] | None:
    """Return the first listeners of two routers that cannot be on the same machine."""
    pairs = product(one.listeners, other.listeners)
    return next((pair for pair in pairs if pair[0].overlaps(pair[1])), None)


@dataclass(frozen=True, slots=True, config=CHECKED)
class RouterConfig:
    """Durations are seconds. Port 0 takes a free one."""

    #: Hugging Face directory or hub id (org/name) of the model, for its tokenizer; "fake" for the
    #: fake runner's bytes
    model: str = ""
    #: of a hub id: a branch, a tag or a commit; not set: its main branch
    model_revision: str = ""
    #: where clients connect
    host: str = "127.0.0.1"
    port: Port = 50051
    #: PEM files with the certificate that clients are shown, and its key; not set: no TLS
    tls_cert: str = ""
    tls_key: str = ""
    #: PEM file with who signed the certificates of clients, which then have to show one; not set:
    #: they need none
    tls_client_ca: str = ""
    #: of a client's call, uncompressed; a larger one is refused with RESOURCE_EXHAUSTED. A prompt
    #: of a million tokens has about 5 MB
    max_message_bytes: Annotated[int, Field(ge=1 << 10, lt=1 << 31)] = 8 << 20
    #: where clients of OpenAI's API connect (HTTP); an empty host: nowhere
    http_host: str = "127.0.0.1"
    http_port: Port = 8000
    #: the console, a page that shows the cluster, at /console there
    console: bool = True
    #: web pages that may ask there, as https://chat.example.com; "*": all
    cors_origins: tuple[str, ...] = ()
    #: of an HTTP request; a larger one is refused with 413
    max_body_bytes: Annotated[int, Field(ge=1 << 10)] = 8 << 20
    #: a stream of server-sent events without an event for this many seconds sends its headers, then
    #: an SSE comment line each time; 0 disables both
    keep_alive: NotNegative = 15.0
    #: which streams get comment lines: those of requests with Accept: text/event-stream (accept),
    #: or all (always)
    keep_alive_comments: Literal["accept", "always"] = "accept"
    #: where workers and other routers connect
    internal_host: str = "127.0.0.1"
    internal_port: Port = 0
    #: TLS there, as workers have it
    internal_tls: InternalTls = field(default_factory=InternalTls)
    #: where Prometheus reads metrics (GET /metrics) and probes ask (GET /ready, GET /live), without
    #: TLS; an empty host: nowhere
    metrics_host: str = "127.0.0.1"
    metrics_port: Port = 0
    #: who may come in: off, everybody; file or ledger, who has one of the keys there
    access: Literal["off", "file", "ledger"] = "off"
    #: with access: file: the file that `everlift key` makes, with hashes of keys and limits of
    #: tenants
    access_file: str = ""
    #: under vLLM's names too, for dashboards that know these
    vllm_metrics: bool = False
    #: OTLP collector (gRPC) that gets traces of requests, as http://127.0.0.1:4317; empty: nobody
    trace_endpoint: str = ""
    #: part of the requests that is traced; those that come in a trace follow its sampled flag
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    #: lower max_tokens to what the context leaves; off: refuse the request
    #: (context_length_exceeded)
    clamp_max_tokens: bool = False
    #: requests that may wait; one more is refused with RESOURCE_EXHAUSTED. everlift policy sets at
    #: run time this, queue_ttl, refuse_late, order, undated_due, ageing_factor, starvation,
    #: class_floor,
    #: fair_share and tpot_target
    max_queued: Count = 10_000
    #: a request that no worker had by then is refused with RESOURCE_EXHAUSTED (queue_timeout); 0:
    #: it waits on
    queue_ttl: NotNegative = 0.0
    #: a request whose first token will come after its deadline or its ttft_target_ms, or whose
    #: output will end after its deadline, as far as one can tell, is refused with
    #: RESOURCE_EXHAUSTED (deadline_unmeetable) when it comes, or (queue_timeout) when it has waited
    #: for too long. Off: it comes later rather than never, as the contract has it
    refuse_late: bool = False
    #: who was refused and comes again before the time that it was told: of a tenant so many a
    #: second are looked at, and so many at once; the others are refused (retried_too_soon)
    retry_rate: NotNegative = 1.0
    retry_burst: Amount = 10
    #: which request leaves the queue first, within a class: the one that came first (fifo), whose
    #: deadline or ttft_target_ms comes first (deadline), that probably takes the fewest tokens
    #: (shortest), whose outputs are predicted to be shorter than others' (ranked), or that has
    #: waited longest for what it takes (hrrn)
    order: Order = "fifo"
    #: deadline: a request without one is due so long after it came
    undated_due: Positive = 60.0
    #: shortest, ranked: how long a request yields to shorter ones on average, in multiples of the
    #: wait that was estimated when it came; short requests yield for less of it, long ones for more
    ageing_factor: NotNegative = 1.5
    #: file that everlift train-predictor makes, by which outputs' lengths are predicted; a new one
    #: is taken at once. Empty: each is expected to be as long as those before it
    predictor: str = ""
    #: predictions whose order is less like that of what came (Kendall's tau) are not used: while it
    #: is, shortest, ranked and hrrn are fifo
    predictor_min_tau: Annotated[float, Field(ge=-1, le=1)] = 0.1
    #: who has waited for so long leaves before all others of its class, whatever the order; 0:
    #: nobody
    starvation: NotNegative = 0.0
    #: of the work that higher classes get while a class waits, the part that it gets as well
    class_floor: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    #: where tenants are told apart (access), those of a class take turns by the tokens that they
    #: were served, whatever the order; within a tenant's turn the order holds
    fair_share: bool = True
    #: what a token of a prompt and one of an output count there
    prompt_token_weight: Positive = 1.0
    output_token_weight: Positive = 2.0
    #: dispatched to a worker beyond what it can run at once
    local_depth: Amount = 2
    #: prompt tokens that a worker may have waiting to be computed
    max_pending_prefill: Count = 4096
    #: time per output token that is wanted: a worker runs as many sequences at once as its steps,
    #: by what was learned of them, take no longer than this; 0: as many as it can
    tpot_target: NotNegative = 0.0
    #: a dispatch that its worker has not acknowledged by then no longer counts as load
    dispatch_ack: Positive = 1.0
    #: a request fails after it lost this many workers in a row without a new token, each while it
    #: was in a step
    max_losses: Count = 3
    #: a request fails after it lost this many workers in a row without a new token, in a step or
    #: not
    max_losses_total: Count = 20
    #: times that a preempted request may be moved to another worker; then it waits where it is. To
    #: make room for a higher class is something else, and not counted here
    max_moves: Amount = 3
    #: part of a worker's blocks that must stay free when a preempted request is moved there
    move_reserve: NotNegative = 0.05
    #: a worker whose steps take so many times as long as the others' gets nothing while they have
    #: room
    slow_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 5.0
    #: allow faults on purpose: everlift chaos
    chaos: bool = False
    #: how long a request without a client goes on under on_disconnect: grace
    grace: NotNegative = 30.0
    #: a worker that says nothing for so long is lost: it is taken for lost between 0.85 and 0.9 of
    #: it, so that everybody has heard by then (it says something five times a second)
    worker_silence: Positive = 1.0
    #: the leader forgets a worker that it could not reach for so long
    worker_forget: Positive = 10.0
    #: a gateway or leader that did not renew for so long is gone; of the 2 s in which another one
    #: has to lead, the rest is for a busy machine
    lease: Positive = 1.2
    #: how long a request waits while there is no worker; then it ends with UNAVAILABLE (no_worker).
    #: A worker may need a machine, an image and a model first
    worker_wait: NotNegative = 1800.0
    #: between renewals
    heartbeat: Positive = 0.25
    #: before_delivery: a client sees a token when the ledger has it; behind: at once, marked
    #: unledgered, and the ledger gets it within some ten milliseconds
    durability: Literal["before_delivery", "behind"] = "before_delivery"
    #: while the ledger is away streams go on, marked unledgered, or pause (strict)
    on_ledger_loss: Literal["available", "strict"] = "available"
    #: available: they go on for so long, then pause too
    unledgered: NotNegative = 10.0
    #: what ended so short a while ago is told to the ledger again if its server lost its last
    #: second
    reassert: NotNegative = 5.0
    #: source of the defaults for sampling parameters that a request does not set: the model's
    #: generation_config.json (model), or Everlift's own defaults (none)
    sampling_defaults: Literal["model", "none"] = "model"
    #: how the model writes a tool call; auto: as its chat template shows
    tool_format: Literal["auto", "hermes", "llama3"] = "auto"
    #: CPU time that the model's chat template may take over one chat; then its process is killed
    template_timeout: Positive = 2.0
    #: processes that render chats, each one at a time
    template_processes: Count = 1
    #: a stopping router lets its streams finish for so long, then sends them elsewhere
    drain: NotNegative = 5.0

    def __post_init__(self) -> None:
        self._check_tls()
        self._check_places()
        if self.heartbeat * 2 > self.lease:
            raise ValueError(f"lease ({self.lease:g}) must be twice heartbeat or more")
        if (self.access == "file") != bool(self.access_file):
            raise ValueError("access_file must be set with access: file, and then only")
        for name in ("access_file", "predictor"):
            if path := getattr(self, name):
                # A relative path is taken from the working directory, once.
                object.__setattr__(self, name, str(Path(path).expanduser().absolute()))

    def _check_places(self) -> None:
        for name in (*_HOSTS, "http_host", "metrics_host"):
            object.__setattr__(self, name, bare(getattr(self, name)))
        for name in _HOSTS:
            if not getattr(self, name):
                raise ValueError(f"{name} must be set: an empty one would be every address")
        for one, other in combinations(self.listeners, 2):
            if one.overlaps(other):
                raise ValueError(f"{one.setting} and {other.setting} are both {one.port}")

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """Return the addresses that the router listens on."""
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
        """Certificates that clients see."""
        return Tls(self.tls_client_ca, self.tls_cert, self.tls_key) if self.tls_cert else None


def exposures(config: RouterConfig, *, has_keys: bool) -> Iterator[str]:
    """A line each. A closed network may be reason enough to leave it so."""
    ways = (("TLS", config.tls is not None), ("API keys", has_keys))
    missing = [name for name, is_there in ways if not is_there]
    hosts = filter(None, (config.host, config.http_host))
    if missing and not all(map(_is_loopback, hosts)):
        yield f"other machines reach the clients' ports without {' or '.join(missing)}"
    if not config.internal_tls.is_on and not _is_loopback(config.internal_host):
        yield "other machines reach the port of workers and routers: set internal_tls"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
