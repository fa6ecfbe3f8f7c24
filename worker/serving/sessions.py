"""Sessions of routers: pass their requests to the engine, and its results back to them.

A frame is one message between router and worker. Routers' frames start and abort sequences; the
worker's frames carry outcomes: new tokens of sequences, and their ends. The code runs in the event
loop's thread and uses neither sockets nor a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

from everlift import logs
from everlift.engine_policy import DEFAULT, EnginePolicy, policy_named
from everlift.errors import EngineFailed, EverliftError, InvalidRequest, UnsupportedContent
from everlift.hashes import CHUNK_SIZE, chunk_id
from everlift.images import Image
from everlift.sampling import Grammar
from everlift.v1 import chaos_pb2, session_pb2
from worker.engine.adapter_slots import AdapterLoad, AdapterLoaded, first_digests
from worker.engine.blocks import ChunkChanges
from worker.engine.chunk import NO_PREFIX, Prefix
from worker.engine.images import ProcessedImages
from worker.engine.limits import Limits
from worker.engine.load import Load
from worker.engine.outcome import Abort, Outcome, SequenceKey, Stop
from worker.engine.sequence import Sequence, num_omitted
from worker.engine.step_times import NO_TIME
from worker.engine.time_breakdown import NO_BREAKDOWN
from worker.serving.adapter_table import AdapterTable, AdapterVersion
from worker.serving.chunk_store import ChunkStore
from worker.serving.loop import FirstSteps, Report
from worker.serving.outbox import Outbox
from worker.serving.pending import Pending

log = logs.get_logger(__name__)


class Engine(Protocol):
    """Interface of the engine for the sessions; no method blocks."""

    def start(self, sequence: Sequence) -> None: ...

    def abort(self, abort: Abort) -> None: ...

    def load_adapter(self, load: AdapterLoad) -> None: ...

    def inject(self, fault: chaos_pb2.Fault) -> None: ...

    def set_policy(self, policy: EnginePolicy) -> None: ...

    def drain(self) -> None: ...


class Compiled(Protocol):
    """Compiled grammar, as the runner needs it to sample (``Admission.grammar``)."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an output of the model."""
        ...


class Grammars(Protocol):
    def compile(self, grammar: Grammar, done: Callable[[Compiled | EverliftError], None]) -> None:
        """Compile a grammar; call ``done`` once, now or later, in this thread.

        ``done`` receives the compiled grammar, or the error that prevented compilation.
        """
        ...


class Images(Protocol):
    def process(
        self,
        sequence: Sequence,
        is_wanted: Callable[[], bool],
        done: Callable[[ProcessedImages | EverliftError], None],
    ) -> None:
        """Process the images of a sequence; call ``done`` once, now or later, in this thread.

        ``done`` receives the processed images, or the error that prevented that. It is not called
        if ``is_wanted``, which may be called in any thread, returns False.
        """
        ...


class Session:
    """Session with one router, over one stream; ``notify`` wakes the stream's writer.

    If ``is_closed``, the writer sends the remaining messages and ends. ``missed_confirmation``
    means that the router did not confirm in time that a sequence may take its first step here
    (``Sessions.announce``); no step waits for this router again until a confirmation arrives.
    """

    def __init__(self, router_id: str, notify: Callable[[], None]) -> None:
        self.router_id = router_id
        self.outbox = Outbox(notify)
        self.is_closed = False
        self.missed_confirmation = False

    def close(self) -> None:
        self.is_closed = True
        self.outbox.notify()


class Attempt:
    """Attempt at a request, started by the router of ``session``.

    ``choices`` are the indices of its unfinished choices. Each time a router sends a request to a
    worker, it makes a new attempt, which is numbered by its epoch.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.choices: set[int] = set()
        #: whether routers were notified that the attempt's prompt is computed
        self.is_prefilled = False
        #: names of the chunks that the chunk store holds for the attempt
        self.chunks: Collection[bytes] = ()
        #: images of the request, by digest
        self.images: Mapping[bytes, Image] = {}


class Sessions:
    """Sessions of all routers that are connected to this worker.

    ``load`` is the engine's load at the start; reports replace it. ``engine`` receives the routers'
    orders, ``grammars`` compiles the grammars of their requests, and ``images`` processes their
    images, unless the limits allow none.
    """

    def __init__(
        self,
        limits: Limits,
        load: Load,
        engine: Engine,
        grammars: Grammars,
        images: Images | None = None,
    ) -> None:
        self._limits = limits
        self._load = load
        self._busy_s = 0.0
        self._step_times = NO_TIME
        self._decoding = NO_BREAKDOWN
        #: utilisation of rank 0's GPU, from 0 to 1; None if unknown
        self.gpu_utilization: float | None = None
        self._engine = engine
        #: the engine's policy, and the version of the operators' policy from which it was set
        self._policy, self._policy_version = limits.scheduling.policy, 0
        self._grammars = grammars
        self._images = images
        self._sessions: dict[str, Session] = {}
        self._attempts: dict[int, Attempt] = {}
        self._pending = Pending()
        loaded = {digest: name for name, digest in limits.adapters.items()}
        first = first_digests(limits.adapters, limits.num_adapter_slots)
        self._adapters = AdapterTable(
            limits.num_adapter_slots, [AdapterVersion(loaded[digest], digest) for digest in first]
        )
        self._chunks = ChunkStore()
        #: pending sequences whose omitted prefix or images are missing, with their number of output
        #: tokens so far; the router will send their starts again, as a whole
        self._incomplete: dict[SequenceKey, int] = {}
        #: pending sequences that the engine does not have yet: their adapter is being loaded, their
        #: grammar compiled or their images processed
        self._preparing: dict[SequenceKey, Sequence] = {}
        #: sessions that must confirm a first step, by epoch; and the function that is called when
        #: all have done so
        self._unconfirmed: dict[int, Session] = {}
        self._on_confirmed: Callable[[], None] = _do_nothing
        self._frames = 0
        self.is_draining = False
        #: models that this worker can serve instead; and the function that is called with the one
        #: that a router orders
        self.other_models: Collection[str] = ()
        self.on_next_model: Callable[[str], None] = _ignore_model
        #: model to which the worker is changing; and why its last change failed
        self.next_model = self.change_error = ""

    @property
    def is_idle(self) -> bool:
        """True if this worker has no unfinished request of any router."""
        return not self._attempts

    # connections of routers

    def open_session(self, router_id: str, notify: Callable[[], None]) -> Session:
        """Open and return a session for a router's stream; end an older one of the same router.

        ``notify`` is called when a frame is to be sent at once. Every epoch that runs here is
        acknowledged to this router, whichever router started it, because this router may be the
        leader (the one that assigns requests to workers), which waits for the acknowledgement.
        """
        if (older := self._sessions.get(router_id)) is not None:
            self.end_session(older)
        session = self._sessions[router_id] = Session(router_id, notify)
        for epoch in self._attempts:
            session.outbox.accept(epoch)
        session.outbox.add_chunks(
            dict.fromkeys(map(chunk_id, self._chunks.on_device), True),
            dict.fromkeys(map(chunk_id, self._chunks.on_host), True),
        )
        if self._limits.num_adapter_slots:
            session.outbox.set_adapters(self._adapters.to_proto())
        log.info("session opened", router_id=router_id)
        return session

    def end_session(self, session: Session) -> None:
        """End a session, and abort the sequences that its router started.

        Their full KV blocks stay in the prefix cache. Does nothing if the session has ended before.
        """
        if self._sessions.get(session.router_id) is not session:
            return
        del self._sessions[session.router_id]
        epochs = [epoch for epoch, attempt in self._attempts.items() if attempt.session is session]
        for epoch in epochs:
            self._abort(session, Abort(epoch))
        session.close()
        log.info("session closed", router_id=session.router_id, aborted=len(epochs))

    def end_all(self) -> None:
        """Make every session end once its remaining messages are sent; return without waiting."""
        for session in self._sessions.values():
            session.close()

    # incoming frames

    def receive(self, session: Session, frame: session_pb2.RouterFrame, now: float) -> None:
        """Handle a frame of the session's router.

        ``now`` is the time on the engine's clock, in seconds. If a start is refused, nothing is
        raised; the refusal is put into the outbox.
        """
        if frame.HasField("engine_policy"):
            self._set_policy(frame.engine_policy)
        for start in frame.starts:
            self._start(session, start, now)
        for abort in frame.aborts:
            self._abort(session, Abort.from_proto(abort))
        if frame.preload_adapters or frame.unload_adapters:
            self._change_adapters(frame)
        for epoch in frame.confirmed_epochs:
            session.missed_confirmation = False
            self._confirm(epoch)
        if frame.drain:
            log.info("drain ordered", router_id=session.router_id)
            self.drain()
        if frame.next_model:
            self._change_model(frame.next_model, session.router_id)

    def _change_model(self, model: str, router_id: str) -> None:
        if self.is_draining or self.next_model or model not in self.other_models:
            log.warning("change of the model ignored", model=model, router_id=router_id)
            return
        log.info("change of the model ordered", model=model, router_id=router_id)
        self.next_model, self.change_error = model, ""
        self.on_next_model(model)

    def _set_policy(self, message: session_pb2.EnginePolicy) -> None:
        if message.version <= self._policy_version:
            return
        self._policy_version = message.version
        configured = self._limits.scheduling.policy
        policy = configured if message.name == DEFAULT else policy_named(message.name)
        if policy is None:
            log.warning("unknown engine policy", name=message.name)
        elif policy != self._policy:
            log.info("engine policy", policy=policy, before=self._policy)
            self._policy = policy
            self._engine.set_policy(policy)

    def inject(self, fault: chaos_pb2.Fault) -> None:
        """Order the engine to inject a fault, into this rank or another one (``fault.rank``)."""
        self._engine.inject(fault)

    def drain(self) -> None:
        """Order the engine to return all sequences to their routers, and start no more."""
        if not self.is_draining:
            self.is_draining = True
            for sequence in tuple(self._preparing.values()):
                # The end of one that waits for an adapter slot may start others that wait.
                if self._is_preparing(sequence):
                    self._end_unstarted(sequence, Stop.RETURNED)
            for key, offset in self._incomplete.items():
                self._pending.discard(key)
                self._forward(Outcome(key, offset, (), Stop.RETURNED))
            self._incomplete.clear()
            # Last, so that the engine also returns sequences that were started above.
            self._engine.drain()
            for session in self._sessions.values():
                session.outbox.notify()

    def _start(self, session: Session, start: session_pb2.Start, now: float) -> None:
        key = SequenceKey(start.epoch, start.choice)
        attempt = self._attempts.get(key.epoch)
        if attempt is not None and attempt.session is session and key.choice in attempt.choices:
            if key not in self._incomplete:
                log.warning("repeated start", request_id=start.request_id)
                return
            attempt = self._forget_incomplete(key, attempt)
        self._acknowledge(key.epoch)
        end = self._end_at_start(start, attempt, session, now)
        if end is not None:
            if attempt is None:
                self._report_prefilled(key.epoch)
            session.outbox.push(end)

    def _end_at_start(
        self, start: session_pb2.Start, attempt: Attempt | None, session: Session, now: float
    ) -> Outcome | None:
        key, offset = SequenceKey(start.epoch, start.choice), len(start.output_ids)
        try:
            num_chunks = num_omitted(start, self._limits) // CHUNK_SIZE
            offset += start.omitted_prefix.num_output
            if self.is_draining:
                return Outcome(key, offset, (), Stop.RETURNED)
            if cause := self._adapter_problem(start):
                # Another worker may serve the adapter.
                log.warning("start refused", request_id=start.request_id, cause=cause)
                return Outcome(key, offset, (), Stop.FAILED, EngineFailed(cause))
            if attempt is not None and attempt.session is not session:
                raise InvalidRequest(f"epoch {key.epoch} belongs to another router")
            self._check_images(start)
            sequence = self._sequence(start, num_chunks, attempt)
        except InvalidRequest as error:
            log.warning("start refused", request_id=start.request_id, error=error.slug)
            return Outcome(key, offset, (), Stop.REFUSED, error)
        if sequence is None:
            self._add_incomplete(session, start, offset)
            return None
        if (stop := sequence.stop(self._limits)) is not None:
            return Outcome(key, offset, (), stop)
        sequence.arrived_at = now
        attempt = self._attempts.setdefault(key.epoch, Attempt(session))
        attempt.choices.add(key.choice)
        # Later starts of the attempt may leave out the common prompt.
        attempt.chunks = attempt.chunks or self._chunks.hold(sequence)
        attempt.images = attempt.images or {image.digest: image for image in sequence.images}
        self._pending.add(key, sequence.num_known, sequence.num_uncached)
        if self._has_adapter(sequence):
            self._prepare(sequence)
        else:
            self._preparing[key] = sequence
        return None

    def _prepare(self, sequence: Sequence) -> None:
        """Start a sequence, whose adapter is loaded, as soon as grammar and images are ready."""
        if (grammar := sequence.sampling.grammar) is not None:
            self._preparing[sequence.key] = sequence
            self._grammars.compile(grammar, partial(self._compiled, sequence))
        elif sequence.images:
            self._preparing[sequence.key] = sequence
            self._process_images(sequence)
        else:
            self._preparing.pop(sequence.key, None)
            self._engine.start(sequence)

    # adapters

    def _adapter_problem(self, start: session_pb2.Start) -> str:
        """Return why this worker cannot serve the adapter that a start requests.

        The text is empty if the worker can serve the adapter, or if the start requests none.
        """
        adapters = self._limits.adapters
        if not start.adapter:
            return ""
        digest, configured = start.adapter_digest, adapters.get(start.adapter, "")
        if self._limits.num_adapter_slots and start.adapter_source and (digest or configured):
            return ""
        if not configured:
            return f"this worker does not serve the adapter {start.adapter!r}"
        if digest not in ("", configured):
            return f"the files of the adapter {start.adapter!r} differ at this worker"
        if self._limits.num_adapter_slots and not self._adapters.has(configured):
            return f"the start has no source of the adapter {start.adapter!r}"
        return ""

    def _has_adapter(self, sequence: Sequence) -> bool:
        """Count a new sequence as a user of its adapter; return whether that is loaded."""
        if not (sequence.adapter and self._limits.num_adapter_slots):
            return True
        version = AdapterVersion(sequence.adapter, sequence.adapter_digest, sequence.adapter_source)
        has_adapter = self._adapters.use(sequence.key, version)
        self._order_loads()
        return has_adapter

    def _release_adapter(self, key: SequenceKey) -> None:
        if self._limits.num_adapter_slots:
            self._adapters.release(key)
            self._order_loads()

    def _change_adapters(self, frame: session_pb2.RouterFrame) -> None:
        if not self._limits.num_adapter_slots or self.is_draining:
            return
        for digest in frame.unload_adapters:
            self._adapters.unload(digest)
        for message in frame.preload_adapters:
            name = message.source.partition("=")[0]
            self._adapters.preload(AdapterVersion(name, message.digest, message.source))
        self._order_loads()

    def _on_adapter_loaded(self, loaded: AdapterLoaded) -> None:
        source, seconds = loaded.load.source, round(loaded.ended - loaded.began, 3)
        if loaded.error is None:
            log.info("adapter loaded", source=source, slot=loaded.load.slot, seconds=seconds)
        else:
            log.warning("adapter not loaded", source=source, cause=str(loaded.error))
        for key in self._adapters.finish(loaded):
            if (sequence := self._preparing.get(key)) is not None:
                # Another worker may have the adapter, or be able to read it.
                self._end_unstarted(sequence, Stop.FAILED, loaded.error)
        for key in self._adapters.ready:
            if (sequence := self._preparing.get(key)) is not None:
                sequence.adapter_s = max(0.0, loaded.ended - sequence.arrived_at)
        self._order_loads()

    def _order_loads(self) -> None:
        """Pass the adapter table's orders to the engine, and the table's state to all routers.

        Sequences whose adapter has been loaded are prepared.
        """
        table = self._adapters
        ready, table.ready = table.ready, []
        orders, table.orders = table.orders, []
        for order in orders:
            self._engine.load_adapter(order)
        for key in ready:
            if (sequence := self._preparing.get(key)) is not None:
                self._prepare(sequence)
        adapters = table.to_proto()
        for session in self._sessions.values():
            session.outbox.set_adapters(adapters)

    def _check_images(self, start: session_pb2.Start) -> None:
        if len(start.images) > self._limits.max_images:
            raise UnsupportedContent(
                f"the request has {len(start.images)} images; this worker takes "
                f"{self._limits.max_images}",
                field="images",
            )

    def _sequence(
        self, start: session_pb2.Start, num_chunks: int, attempt: Attempt | None
    ) -> Sequence | None:
        """Return the sequence of a start that omits its first ``num_chunks`` chunks of tokens.

        ``attempt`` is the attempt to which the start belongs; None if this worker does not know it.
        The start may omit the data of images that the attempt has. Returns None if an omitted chunk
        or image is missing at this worker. Raises InvalidRequest if the start is invalid or exceeds
        the limits.
        """
        prefix: Prefix | None = NO_PREFIX
        if num_chunks:
            prefix = self._chunks.find(start.omitted_prefix.hash, num_chunks, start.salt)
        known = attempt.images if attempt is not None else {}
        images = [
            Image(image.digest, image.data) if image.data else known.get(image.digest)
            for image in start.images
        ]
        found = tuple(image for image in images if image is not None)
        if prefix is None or len(found) < len(images):
            return None
        return Sequence.from_start(start, self._limits, prefix, found)

    def _add_incomplete(self, session: Session, start: session_pb2.Start, offset: int) -> None:
        """Count an incomplete start as pending until it is sent again, and report it to its router.

        A start is incomplete if it omits tokens or images that this worker lacks. ``offset`` is the
        number of output tokens that the sequence has so far.
        """
        key, omitted = SequenceKey(start.epoch, start.choice), start.omitted_prefix
        num_known = omitted.num_prompt + len(start.prompt_ids) + offset
        self._attempts.setdefault(key.epoch, Attempt(session)).choices.add(key.choice)
        self._pending.add(key, num_known, num_known)
        self._incomplete[key] = offset
        session.outbox.add_incomplete(key)

    def _forget_incomplete(self, key: SequenceKey, attempt: Attempt) -> Attempt | None:
        """Remove an incomplete start, and return its attempt.

        An attempt without other unfinished choices is removed too, and None is returned.
        """
        del self._incomplete[key]
        self._pending.discard(key)
        attempt.choices.discard(key.choice)
        if attempt.choices:
            return attempt
        self._remove(key.epoch, attempt)
        return None

    def _compiled(self, sequence: Sequence, result: Compiled | EverliftError) -> None:
        if not self._is_preparing(sequence):
            return
        if isinstance(result, EverliftError):
            log.warning("grammar not compiled", request_id=sequence.request_id, error=result.slug)
            # A failure that the request did not cause may not occur on another worker.
            refused = isinstance(result, InvalidRequest)
            self._end_unstarted(sequence, Stop.REFUSED if refused else Stop.FAILED, result)
            return
        sequence.grammar = result
        # Without a stop token, no token could be sampled once the grammar is complete.
        sequence.stop_token_ids = sequence.stop_token_ids or frozenset(result.eos_token_ids)
        if sequence.images:
            self._process_images(sequence)
        else:
            self._start_prepared(sequence)

    def _process_images(self, sequence: Sequence) -> None:
        assert self._images is not None, "the limits allow no images"
        is_wanted = partial(self._is_preparing, sequence)
        self._images.process(sequence, is_wanted, partial(self._processed, sequence))

    def _is_preparing(self, sequence: Sequence) -> bool:
        """Return whether a sequence is in preparation: neither started nor ended nor aborted."""
        return self._preparing.get(sequence.key) is sequence

    def _processed(self, sequence: Sequence, result: ProcessedImages | EverliftError) -> None:
        if not self._is_preparing(sequence):
            return
        try:
            if isinstance(result, EverliftError):
                raise result
            sequence.set_processed_images(result, self._limits)
        except EverliftError as error:
            log.warning("images refused", request_id=sequence.request_id, error=error.slug)
            refused = isinstance(error, InvalidRequest)
            self._end_unstarted(sequence, Stop.REFUSED if refused else Stop.FAILED, error)
            return
        self._start_prepared(sequence)

    def _start_prepared(self, sequence: Sequence) -> None:
        if (stop := sequence.stop(self._limits)) is not None:
            self._end_unstarted(sequence, stop)
            return
        del self._preparing[sequence.key]
        self._engine.start(sequence)

    def _end_unstarted(
        self, sequence: Sequence, stop: Stop, error: EverliftError | None = None
    ) -> None:
        del self._preparing[sequence.key]
        self._pending.discard(sequence.key)
        self._forward(sequence.outcome(stop, error))

    def _acknowledge(self, epoch: int) -> None:
        for session in self._sessions.values():
            session.outbox.accept(epoch)

    def _abort(self, session: Session, abort: Abort) -> None:
        attempt = self._attempts.get(abort.epoch)
        if attempt is None or attempt.session is not session:
            return
        removed = [
            SequenceKey(abort.epoch, choice) for choice in abort.choices or (*attempt.choices,)
        ]
        for key in removed:
            choice = key.choice
            session.outbox.drop(key)
            attempt.choices.discard(choice)
            unstarted = self._incomplete if key in self._incomplete else self._preparing
            if unstarted.pop(key, None) is not None:
                self._pending.discard(key)
        if not attempt.choices:
            self._mark_prefilled(abort.epoch, attempt)
            self._remove(abort.epoch, attempt)
            self._confirm(abort.epoch)
        self._engine.abort(abort)
        for key in removed:
            self._release_adapter(key)

    # outgoing results

    def deliver(self, report: Report) -> None:
        """Put the results of one iteration of the engine's loop into the outboxes of the routers.

        Results of sequences that were aborted meanwhile are discarded.
        """
        self._load, self._busy_s = report.load, report.busy_s
        self._step_times, self._decoding = report.step_times, report.decoding
        for key in report.started:
            self._pending.discard(key)
        for loaded in report.adapters:
            self._on_adapter_loaded(loaded)
        self._report_chunks(report.chunks)
        # Outboxes are looked up first, because forwarding outcomes removes sequences that end.
        breakdowns = [(self._outbox_of(entry.key), entry) for entry in report.breakdowns]
        ended = [self._forward(outcome) for outcome in report.outcomes]
        for outbox, breakdown in breakdowns:
            if outbox is not None:
                outbox.add_breakdown(breakdown)
        for outcome in report.prefilling:
            if (outbox := self._outbox_of(outcome.key)) is not None:
                outbox.add(outcome)
        for session in self._sessions.values():
            if report.occupants is not None:
                session.outbox.set_occupants(report.occupants)
            # The leader must be notified of freed capacity, and any router may be the leader.
            if any(ended):
                session.outbox.notify()

    def _report_chunks(self, changes: ChunkChanges) -> None:
        if not changes.device and not changes.host:
            return
        self._chunks.update(changes)
        device, host = _by_id(changes.device), _by_id(changes.host)
        for session in self._sessions.values():
            session.outbox.add_chunks(device, host)

    def _mark_prefilled(self, epoch: int, attempt: Attempt) -> None:
        if not attempt.is_prefilled:
            attempt.is_prefilled = True
            self._report_prefilled(epoch)

    def _report_prefilled(self, epoch: int) -> None:
        """Report to all routers that an attempt's prompt is computed, or will not be."""
        for session in self._sessions.values():
            session.outbox.add_prefilled(epoch)

    def announce(self, first: FirstSteps, confirmed: Callable[[], None]) -> None:
        """Notify the routers of their sequences that are about to take their first step here.

        Each outcome of ``first`` is put into the outbox of the sequence's router. An outcome that
        must be confirmed is sent at once, others with the next frame. ``confirmed`` is called when
        all have been confirmed, or at once if none must be. Aborted sequences, and routers that did
        not confirm in time before, do not delay the call of ``confirmed``.
        """
        for session in self._unconfirmed.values():
            session.missed_confirmation = True
        self._unconfirmed = {}
        for outcome in first.outcomes:
            if (outbox := self._outbox_of(outcome.key)) is None:
                continue
            outbox.add(outcome)
            if outcome.key in first.to_confirm:
                outbox.notify()
                session = self._attempts[outcome.key.epoch].session
                if not session.missed_confirmation:
                    self._unconfirmed[outcome.key.epoch] = session
        self._on_confirmed = confirmed
        if not self._unconfirmed:
            confirmed()

    def _confirm(self, epoch: int) -> None:
        if epoch in self._unconfirmed:
            del self._unconfirmed[epoch]
            if not self._unconfirmed:
                self._on_confirmed()

    def _outbox_of(self, key: SequenceKey) -> Outbox | None:
        attempt = self._attempts.get(key.epoch)
        return (
            attempt.session.outbox
            if attempt is not None and key.choice in attempt.choices
            else None
        )

    def _forward(self, outcome: Outcome) -> bool:
        epoch, choice = outcome.key
        attempt = self._attempts.get(epoch)
        if attempt is None or choice not in attempt.choices:
            return False
        if outcome.tokens or outcome.stop is not None:
            self._mark_prefilled(epoch, attempt)
        attempt.session.outbox.push(outcome)
        if outcome.stop is None:
            return False
        self._release_adapter(outcome.key)
        attempt.choices.remove(choice)
        if not attempt.choices:
            self._remove(epoch, attempt)
        return True

    def _remove(self, epoch: int, attempt: Attempt) -> None:
        del self._attempts[epoch]
        self._chunks.release(attempt.chunks)

    def take_frame(self, session: Session) -> session_pb2.WorkerFrame:
        """Return the session's next frame, with the worker's current state; empty its outbox."""
        return session.outbox.take_frame(self._state())

    def _state(self) -> session_pb2.WorkerState:
        load, pending = self._load, self._pending
        self._frames += 1
        return session_pb2.WorkerState(
            sequence_number=self._frames,
            num_running=load.num_running,
            num_waiting=load.num_waiting + len(pending),
            blocks_used=load.blocks_used,
            blocks_total=load.blocks_total,
            pending_prefill_tokens=load.pending_prefill_tokens + pending.num_uncached,
            long_prefill_tokens=load.long_prefill_tokens,
            committed_tokens=load.committed_tokens + pending.num_tokens,
            waiting_cached_tokens=load.waiting_cached_tokens
            + pending.num_tokens
            - pending.num_uncached,
            step=load.step,
            output_tokens=load.output_tokens,
            preemptions=load.preemptions,
            draining=self.is_draining,
            counters=load.counters.to_proto(),
            computed_tokens=load.computed_tokens,
            kv_tokens=load.kv_tokens,
            num_pairs=load.num_pairs,
            released_blocks=load.released_blocks,
            busy_s=self._busy_s,
            blocks_cached=load.blocks_cached,
            blocks_retained=load.blocks_retained,
            step_times=self._step_times.to_proto(),
            gpu_utilization=self.gpu_utilization,
            engine_policy=self._policy,
            next_model=self.next_model,
            change_error=self.change_error,
            decoding=self._decoding.to_proto(),
        )


def _by_id(changes: Mapping[bytes, bool]) -> dict[int, bool]:
    """Return changes of the prefix cache by the ids of the chunks instead of their names."""
    return {chunk_id(name): is_cached for name, is_cached in changes.items()}


def _do_nothing() -> None:
    pass


def _ignore_model(model: str) -> None:
    pass
