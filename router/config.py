"""What an operator can set about a router."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Durations are seconds. Port 0 takes a free one."""

    #: Hugging Face directory or hub id (org/name) of the model, for its tokenizer; "fake" for the
    #: fake runner's bytes
    model: str = ""
    #: of a hub id: a branch, a tag or a commit; not set: its main branch
    model_revision: str = ""
    #: where clients connect
    host: str = "127.0.0.1"
    port: int = 50051
    #: where workers and other routers connect
    internal_host: str = "127.0.0.1"
    internal_port: int = 0
    #: requests that may wait; one more is refused with RESOURCE_EXHAUSTED
    max_queued: int = 10_000
    #: dispatched to a worker beyond what it can run at once
    local_depth: int = 2
    #: prompt tokens that a worker may have waiting to be computed
    max_pending_prefill: int = 4096
    #: a dispatch that its worker has not acknowledged by then no longer counts as load
    dispatch_ack: float = 1.0
    #: losses of a worker after which a request fails
    max_losses: int = 3
    #: how long a request without a client goes on under on_disconnect: grace
    grace: float = 30.0
    #: a worker that says nothing for so long is lost (it says something five times a second)
    worker_silence: float = 1.0
    #: the leader forgets a worker that it could not reach for so long
    worker_forget: float = 10.0
    #: a gateway or leader that did not renew for so long is gone
    lease: float = 1.5
    #: between renewals
    beat: float = 0.3
    #: tokens are delivered, marked, for so long while the ledger is away; then streams pause
    unledgered: float = 10.0
    #: a stopping router lets its streams finish for so long, then sends them elsewhere
    drain: float = 5.0

    def __post_init__(self) -> None:
        if self.beat * 2 > self.lease:
            raise ValueError(f"router.lease ({self.lease:g}) must be twice router.beat or more")
        if self.max_queued < 1 or self.max_losses < 1:
            raise ValueError("router.max_queued and router.max_losses must be at least 1")
