"""Gateway for tests, with a recorded worker and a recorded leader client around it."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from everlift.messages import Submission
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.request import Running, Waiting
from router.auth.limits import Limits
from router.auth.quotas import unlimited
from router.config import RouterConfig
from router.event_loop import now
from router.leader.adapter_catalogue import AdapterEntry
from router.leader.leader import Arriving, Reservation, dispatched
from router.ledger.entry import Dispatch, Entry, State
from router.ledger.memory.memory import MemoryLedger
from router.requests.manager import Requests
from router.requests.observer import NO_OBSERVER, Observer
from router.requests.request import LiveRequest, Phase
from router.requests.served_models import ServedModels
from router.requests.tokenizer import ServedModel

Ledgers = TypeVar("Ledgers", bound=MemoryLedger)
CONFIG = RouterConfig(model="fake", grace=0.05, max_losses=2, max_losses_total=5, max_queued=3)
TERM = 5


class RecordedWorkers:
    def __init__(self) -> None:
        self.started: list[session_pb2.Start] = []
        self.aborted: list[tuple[int, tuple[int, ...]]] = []
        self.confirmed: list[int] = []
        self.reachable = True
        self.has_worker = True
        self.decoding = session_pb2.TimeBreakdown()
        self.arithmetic = "fake"

    def is_any_up(self, model: str) -> bool:
        return self.has_worker

    def start(self, worker_id: str, starts: Sequence[session_pb2.Start]) -> bool:
        if self.reachable:
            self.started.extend(starts)
        return self.reachable

    def abort(self, worker_id: str, epoch: int, choices: Sequence[int] = ()) -> None:
        self.aborted.append((epoch, tuple(choices)))

    def confirm(self, worker_id: str, epoch: int) -> None:
        self.confirmed.append(epoch)

    def connection(self, worker_id: str) -> RecordedWorkers | None:
        return self if self.reachable else None

    @property
    def last_message_at(self) -> float:
        return now()


class RecordedReservation:
    """Reservation that records its outcome; ``confirm`` returns ``leader_knows``."""

    def __init__(self, dispatch: Dispatch, leader_knows: bool = True) -> None:
        self.dispatch = dispatch
        self.leader_knows = leader_knows
        self.came = ""

    def dispatched(self, entry: Entry) -> session_pb2.Dispatched:
        return dispatched(entry)

    def confirm(self) -> bool:
        self.came += "begun"
        return self.leader_knows

    def cancel(self) -> None:
        self.came += "given back"


class RecordedLine:
    """Recorder in place of the leader's client; ``reservation`` is that of the next request."""

    reservation: RecordedReservation | None = None
    is_quiet = True

    def __init__(self) -> None:
        self.arriving: list[session_pb2.Waiting] = []
        self.enqueued: list[session_pb2.Waiting] = []
        self.withdrawn: list[str] = []
        self.residences: list[session_pb2.Running] = []
        #: output tokens, by request id and class
        self.outputs: Counter[tuple[str, int]] = Counter()
        self.tpot_ratios: list[float] = []
        #: session and output tokens of each request that ended
        self.session_outputs: list[tuple[int, int]] = []
        self.generations: list[str] = []
        #: prompt tokens that some worker has cached
        self.cached = 0

    def cached_tokens(self, model: str, chunks: Sequence[int], num_tokens: int) -> int:
        return self.cached

    def reserve(self, request: Arriving) -> Reservation | None:
        self.arriving.append(request(1000.0).to_proto())
        return self.reservation

    def enqueue(self, waiting: Waiting) -> None:
        self.enqueued.append(waiting.to_proto())

    def withdraw(self, request_id: str) -> None:
        self.withdrawn.append(request_id)

    def report_running(self, running: Running) -> None:
        self.residences.append(running.to_proto())

    def report_served(self, request_id: str, model: str, priority: int, tokens: int) -> None:
        self.outputs[request_id, priority] += tokens

    def report_finished(self, model: str, tpot_ratio: float) -> None:
        self.tpot_ratios.append(tpot_ratio)

    def report_session_output(self, model: str, session: int, tokens: int) -> None:
        self.session_outputs.append((session, tokens))

    def report_generation(self, generation: str) -> None:
        self.generations.append(generation)


class Gateway:
    """Gateway with access to all its collaborators."""

    def __init__(
        self,
        ledger: MemoryLedger,
        name: str = "gateway",
        config: RouterConfig = CONFIG,
        limits_of: Callable[[str], Limits] = unlimited,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self.ledger = ledger
        self.name = name
        self.workers = RecordedWorkers()
        self.line = RecordedLine()
        self.model = ServedModel.load("fake")
        self.models = ServedModels([self.model])
        self.requests = Requests(
            config,
            name,
            ledger,
            self.models,
            self.workers,
            self.line,
            observer=observer,
            limits_of=limits_of,
        )
        self.epochs = iter(range(100, 1000))

    def serve(self, fingerprint: str, adapter_digest: str) -> None:
        """Serve this version of the model, and the adapter "sql" that operators have loaded."""
        worker = session_pb2.WorkerInfo(
            worker_id="w",
            model="fake",
            fingerprint=fingerprint,
            max_model_len=4096,
            num_blocks=1000,
            adapter_slots=4,
        )
        self.models.update_limits([worker])
        entry = AdapterEntry("fake", f"sql=/adapters/{adapter_digest}", adapter_digest)
        self.models.set_catalogue({"sql": entry})

    async def submit(self, timeout_s: float | None = None, **fields: object) -> LiveRequest:
        message = pb.GenerateRequest(**{"text": "hi", "request_id": "r", "max_tokens": 8} | fields)
        digests = self.model.adapter_digests
        submission = Submission.from_proto(message, message.request_id, seed=1, adapters=digests)
        return await self.requests.submit(self.model.resolve(submission), timeout_s)

    async def dispatch(
        self,
        request_id: str = "r",
        worker_id: str = "w",
        bypassed: int = 0,
        predicted_tpot_s: float | None = None,
    ) -> int:
        epoch = next(self.epochs)
        entry = await self.ledger.dispatch(request_id, worker_id, epoch, TERM)
        self.requests.dispatched(
            session_pb2.Dispatched(
                request_id=request_id,
                worker_id=worker_id,
                epoch=epoch,
                attempt=entry.attempts,
                moves=entry.moves,
                bypassed=bypassed,
                predicted_tpot_s=predicted_tpot_s,
            )
        )
        return epoch

    def make(
        self,
        epoch: int,
        offset: int,
        text: str,
        stop: session_pb2.StopCause = session_pb2.STOP_CAUSE_UNSPECIFIED,
        **fields: object,
    ) -> None:
        self.requests.attempts.progress(
            "w",
            session_pb2.Progress(
                epoch=epoch,
                offset=offset,
                token_ids=text.encode(),
                stop=stop,
                **fields,  # type: ignore[arg-type]
            ),
        )

    def begin_step(self, epoch: int, offset: int = 0) -> None:
        """Report the first step of a sequence whose output has ``offset`` tokens."""
        self.make(epoch, offset, "", waited_s=0.0)

    async def lose(self, live: LiveRequest, *, in_step: bool, offset: int = 0) -> None:
        """Dispatch the request to a worker, and lose it, ``in_step`` or before the first step."""
        epoch = await self.dispatch(live.request_id)
        if in_step:
            self.begin_step(epoch, offset)
        self.requests.attempts.worker_lost("w")
        await until(lambda: live.phase is not Phase.RUNNING)

    async def stored(self, request_id: str = "r") -> tuple[State, bytes]:
        stored = await self.ledger.read(request_id)
        return stored.entry.state, bytes(stored.choices[0].tokens)

    async def read(self, live: LiveRequest, *offsets: int) -> list[pb.GenerateResponse]:
        async with aclosing(self.requests.stream(live, offsets)) as pieces:
            return [piece async for piece in pieces]


async def gateway_ledger(ledger: Ledgers) -> Ledgers:
    """Return the ledger with a leader and a live gateway in it."""
    await ledger.lead("leader", "", TERM, 1000.0)
    await ledger.heartbeat("gateway", "here:1", 1000.0)
    return ledger


_REQUESTS = ("_records", "_owned", "_ended", "_forgotten", "_forgotten_ids")


def saved(ledger: MemoryLedger) -> dict[str, object]:
    """Return a copy of the ledger's requests, for a later roll-back."""
    return {name: copy.deepcopy(getattr(ledger, name)) for name in _REQUESTS}


def roll_back(ledger: MemoryLedger, saved: dict[str, object]) -> None:
    for name, value in saved.items():
        setattr(ledger, name, copy.deepcopy(value))


@asynccontextmanager
async def started_gateway(
    ledger: MemoryLedger | None = None, config: RouterConfig = CONFIG
) -> AsyncIterator[Gateway]:
    """Run a gateway that writes tokens to its ledger."""
    gateway = Gateway(ledger or await gateway_ledger(MemoryLedger(time.monotonic)), config=config)
    run = asyncio.create_task(gateway.requests.attempts.run())
    try:
        yield gateway
    finally:
        await gateway.requests.stop(0.0)
        run.cancel()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def texts(pieces: list[pb.GenerateResponse]) -> str:
    return "".join(piece.text for piece in pieces)
