"""Journal for tests, with its request's output and its worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from everlift.v1 import session_pb2
from router.requests.timing import Journal


@dataclass
class StubWorker:
    last_message_at: float = 0.0
    decoding: session_pb2.TimeBreakdown = field(default_factory=session_pb2.TimeBreakdown)
    arithmetic: str | None = "fake"


class WatchedJournal(Journal):
    def __init__(self, called_at: float) -> None:
        super().__init__(called_at)
        self.worker = StubWorker()
        self.output: list[int] = []
        self.outputs = (self.output,)

    def dispatch(
        self, now: float, attempt: int = 1, queue_wait: session_pb2.QueueWait | None = None
    ) -> None:
        message = session_pb2.Dispatched(worker_id="w", attempt=attempt, queue_wait=queue_wait)
        self.dispatched(message, 10, (), self.worker, now)

    def says(
        self,
        now: float,
        num_new: int = 0,
        breakdown: session_pb2.TimeBreakdown | None = None,
        decoding: session_pb2.TimeBreakdown | None = None,
        **news: object,
    ) -> None:
        """Receive the worker's next frame, with ``num_new`` new tokens of the request."""
        self.worker.last_message_at = now
        if decoding is not None:
            self.worker.decoding = decoding
        if breakdown is not None:
            self.breakdown(breakdown)
        self.output += [0] * num_new
        if self.awaits_token or news:
            self.progress(session_pb2.Progress(epoch=1, **news))  # type: ignore[arg-type]
