"""Trace of a request: its state changes in the ledger, and its times in its router. Pure.

    <operation> <model>                    from the call to the last state change
      everlift.accept                      from the call until the ledger has the request
      everlift.queue                       one for each stay in the admission queue
      everlift.attempt                     one for each dispatch to a worker
        everlift.engine.wait               from the dispatch to the request's first step
        everlift.engine.prefill            from the first step to the first new token
        everlift.engine.decode             from the first new token to the last token
        everlift.engine.preempted          one for each time without KV blocks

Attempts are taken from the events in the ledger. They are therefore complete even if routers were
lost, unless the request has more events than the ledger keeps (MAX_EVENTS). The spans
everlift.engine are those that the last router recorded. If another router accepted the request, the
root span begins with the acceptance, and there is no span everlift.accept. A span contains no
prompt, no output, and no text of an error, which may quote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from everlift.explanation import continuation_name
from everlift.messages import Request
from everlift.trace_context import TraceContext
from router.ledger.entry import Entry, Event, State
from router.requests.continuation import continuation
from router.requests.timing import Attempt, Journal

Value = str | int | float | Sequence[str]

_OPERATION = "text_completion"
_PROVIDER = "everlift"


@dataclass(frozen=True, slots=True)
class Span:
    """Span of a trace; times are in seconds since 1970.

    ``error`` is the short name (slug) of an error, or empty without an error. ``events`` are pairs
    of a time and a name.
    """

    name: str
    context: TraceContext
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""
    events: tuple[tuple[float, str], ...] = ()
    #: whether the span covers the whole request, as its client sees it
    is_root: bool = False


def request_spans(
    request: Request,
    entry: Entry,
    events: Sequence[Event],
    journal: Journal,
    new_span_id: Callable[[], str],
) -> list[Span]:
    """Return the spans of a traced request that has ended, with the root span last.

    ``entry`` and ``events`` are those of the request in the ledger. ``journal`` has the times that
    its last router recorded.
    """
    assert request.trace is not None
    attempts = {attempt.number: attempt for attempt in journal}
    walk = _Walk(request, request.trace, entry, events, attempts, new_span_id)
    spans = list(walk)
    accepted, ended = entry.arrived, events[-1].time if events else entry.arrived
    began = accepted - (journal.accept_s or 0.0)
    if journal.accept_s is not None:
        spans.append(Span("everlift.accept", walk.child(), began, accepted))
    spans.append(
        Span(
            # The name follows OpenTelemetry's conventions for generative AI.
            f"{_OPERATION} {request.served_model}",
            request.trace,
            began,
            ended,
            _request_attributes(request) | _entry_attributes(request, entry),
            entry.error_slug,
            _root_events(entry, events, journal),
            is_root=True,
        )
    )
    return spans


def refusal_span(
    trace: TraceContext, start: float, end: float, slug: str, x_request_id: str
) -> Span:
    """Return the span of a rejected request, without any of the request's content.

    ``start`` and ``end`` are in seconds since 1970. ``slug`` is the short name of the error.
    """
    attributes = {**_x_request_id(x_request_id), **_OURS, "error.type": slug}
    return Span(_OPERATION, trace, start, end, attributes, slug, is_root=True)


class _Walk:
    """Iterator over a request's events that yields all spans except accept and the root span."""

    def __init__(
        self,
        request: Request,
        trace: TraceContext,
        entry: Entry,
        events: Sequence[Event],
        attempts: Mapping[int, Attempt],
        new_span_id: Callable[[], str],
    ) -> None:
        self._priority = request.priority
        self._trace = trace
        self._events = events
        self._attempts = attempts
        self._new_span_id = new_span_id
        dispatches = sum(event.move == "dispatch" for event in events)
        #: number of the running or last attempt. It begins above 0 if the ledger has dropped the
        #: oldest events.
        self._number = entry.attempts - dispatches
        self._queued: float | None = None
        self._dispatch: Event | None = None

    def child(self, parent: TraceContext | None = None) -> TraceContext:
        """Return a context for a new span below ``parent``; None means the root span."""
        return (parent or self._trace).child(self._new_span_id())

    def __iter__(self) -> Iterator[Span]:
        for event in self._events:
            match event.move:
                case "open":
                    self._queued = event.time
                case "dispatch":
                    yield from self._end_queue_span(event.time)
                    self._number += 1
                    self._dispatch = event
                case "release":
                    outcome = "lost" if event.detail else "returned"
                    yield from self._end_attempt(event.time, outcome, event.detail)
                    self._queued = event.time
                case "take_over":
                    yield from self._end_attempt(event.time, "gateway_lost")
                    self._queued = event.time if self._queued is None else self._queued
                case "finish":
                    yield from self._end_attempt(event.time, "finished")
                case "end":
                    yield from self._end_queue_span(event.time)
                    yield from self._end_attempt(event.time, event.detail)

    def _end_queue_span(self, now: float) -> Iterator[Span]:
        if self._queued is not None:
            attributes = {
                "everlift.attempt": self._number + 1,
                "everlift.priority": self._priority,
            }
            yield Span("everlift.queue", self.child(), self._queued, now, attributes)
        self._queued = None

    def _end_attempt(self, now: float, outcome: str, cause: str = "") -> Iterator[Span]:
        dispatch, self._dispatch = self._dispatch, None
        if dispatch is None:
            return
        attributes: dict[str, Value] = {
            "everlift.attempt": self._number,
            "everlift.worker_id": dispatch.detail,
            "everlift.outcome": outcome,
        }
        context, attempt = self.child(), self._attempts.get(self._number)
        if attempt is not None:
            attributes["everlift.new_tokens"] = attempt.new_tokens
            attributes["everlift.cached_tokens"] = attempt.cached_tokens
            if attempt.adapter_s:
                attributes["everlift.adapter_load_s"] = attempt.adapter_s
            yield from self._phases(context, attempt, dispatch.time, now)
        error = "lost" if cause else ""
        yield Span("everlift.attempt", context, dispatch.time, now, attributes, error)

    def _phases(
        self, parent: TraceContext, attempt: Attempt, start: float, end: float
    ) -> Iterator[Span]:
        def at(time: float) -> float:
            return min(max(start, start + time - attempt.dispatched), end)

        def phase(name: str, since: float, until: float) -> Span:
            return Span(f"everlift.engine.{name}", self.child(parent), since, until)

        if attempt.waited_s is not None:
            first_step = at(attempt.dispatched + attempt.waited_s)
            yield phase("wait", start, first_step)
            first_token = at(attempt.first_token) if attempt.first_token is not None else end
            yield phase("prefill", first_step, first_token)
        if attempt.first_token is not None and attempt.last_token is not None:
            yield phase("decode", at(attempt.first_token), at(attempt.last_token))
        for pause in attempt.pauses:
            until = end if pause.until is None else at(pause.until)
            yield phase("preempted", at(pause.since), until)


_OURS: Mapping[str, Value] = {
    "gen_ai.operation.name": _OPERATION,
    "gen_ai.provider.name": _PROVIDER,
}


def _request_attributes(request: Request) -> dict[str, Value]:
    sampling = request.sampling
    labels = {
        "session.id": request.session_id,
        "everlift.fairness_id": request.fairness_id,
        "everlift.application": request.application,
    }
    return {
        **{name: label for name, label in labels.items() if label},
        **_x_request_id(request.x_request_id),
        **_OURS,
        "gen_ai.request.model": request.served_model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "everlift.priority": request.priority,
    }


def _x_request_id(value: str) -> dict[str, Value]:
    return {"http.request.header.x-request-id": [value]} if value else {}


def _entry_attributes(request: Request, entry: Entry) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.response.id": entry.request_id,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
        "gen_ai.usage.output_tokens": sum(entry.num_tokens),
        "gen_ai.response.finish_reasons": [
            reason.name.lower() for reason in entry.finish_reasons if reason
        ],
        "everlift.state": entry.state.value,
        "everlift.attempts": entry.attempts,
        "everlift.losses": entry.losses,
        "everlift.preemptions": entry.tally.preemptions,
        "everlift.migrations": entry.tally.migrations,
        "everlift.recomputed_tokens": entry.tally.recomputed_tokens,
        "everlift.continued": continuation_name(continuation(entry.tally)),
    }
    if entry.state is not State.FINISHED:
        attributes["error.type"] = entry.error_slug
    return attributes


def _root_events(
    entry: Entry, events: Sequence[Event], journal: Journal
) -> tuple[tuple[float, str], ...]:
    found = [
        (event.time, event.move) for event in events if event.move in ("take_over", "reassert")
    ]
    if journal.readable_s is not None:
        found.append((entry.arrived + journal.readable_s, "first_token"))
    return tuple(sorted(found))
