"""Operations that a router offers to clients, independent of the protocol.

Callers are already authenticated. Errors are raised as EverliftErrors. The ledger is the shared
store of all requests. The router that owns a request has workers run it, and receives its output;
other routers relay the output.
"""

from __future__ import annotations

import binascii
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from weakref import WeakSet

from everlift.errors import (
    EverliftError,
    ForgottenRequest,
    InvalidRequest,
    OffsetOutOfRange,
    OutOfRange,
    RouterStopping,
    UnknownRequest,
)
from everlift.messages import MAX_LABEL_BYTES, MAX_N, Submission, check_field
from everlift.request_id import check_qualified, is_request_id, strip_tenant
from everlift.trace_context import TraceContext
from everlift.transport import Transport
from everlift.v1 import inference_pb2 as pb
from router.api import generate_many
from router.api.opened import Opened
from router.auth.caller import Caller
from router.event_loop import now
from router.ledger.base import MAX_PAGE_SIZE, Position
from router.ledger.entry import Entry, Event, State
from router.requests import sampling_defaults, tokenizer
from router.requests.delivered import Delivered
from router.requests.manager import Requests, new_request_id
from router.requests.request import Elsewhere, LiveRequest
from router.requests.request_stream import RequestStream, lost_output_error
from router.requests.served_models import ServedModels
from router.requests.stream import LiveSource, Relay, RelayedSource, Source
from router.requests.submission import check_same_body
from router.requests.timing import Journal
from router.requests.tracer import NO_TRACES, Tracer

#: Exclusive upper bound of an arrival time in a page token, in microseconds.
_MOST_US = 1 << 53


def page_token(position: Position) -> str:
    text = f"{round(position.arrived * 1e6)} {position.request_id}"
    return urlsafe_b64encode(text.encode()).decode()


def parse_page_token(token: str) -> Position:
    """Parse a page token, and return the position of the previous page's last request.

    The next page of the listing begins after this position. Raises InvalidRequest if the token is
    malformed.
    """
    try:
        arrived, _, request_id = urlsafe_b64decode(token.encode()).decode("ascii").partition(" ")
        microseconds = int(arrived)
        if not 0 <= microseconds < _MOST_US:
            raise ValueError
        return Position(microseconds / 1e6, check_qualified(request_id))
    except (ValueError, binascii.Error, InvalidRequest):
        raise InvalidRequest("page_token is not the next_page_token of a page") from None


IDEMPOTENCY_KEY = "idempotency-key"
X_REQUEST_ID = "x-request-id"
_TTFT_TARGET = "x-slo-ttft-ms"
SESSION_ID = "x-session-id"
_FAIRNESS_ID = "x-gateway-inference-fairness-id"
_APPLICATION = "x-application"
_EXPLAIN = "x-explain"
_PRINTABLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_LABEL_BYTES}}}")


def apply_headers(
    message: pb.GenerateRequest, headers: Mapping[str, str], index: int | None = None
) -> None:
    """Set the fields that ``message`` lacks from ``headers``, whose names are in lower case.

    ``index`` is the index of the request in a call with several requests; it is appended to the
    request id from the headers. None means that the call has a single request. Raises
    InvalidRequest or OutOfRange if a header is invalid; the error names the header.
    """
    message.request_id = message.request_id or idempotency_key(headers, index)
    message.session_id = message.session_id or _label(headers, SESSION_ID)
    message.fairness_id = message.fairness_id or _label(headers, _FAIRNESS_ID)
    message.application = message.application or _label(headers, _APPLICATION)
    message.explain = message.explain or headers.get(_EXPLAIN, "").lower() in ("1", "true")
    if _TTFT_TARGET in headers and not message.HasField("ttft_target_ms"):
        message.ttft_target_ms = _milliseconds(headers, _TTFT_TARGET)


def header_request_id(headers: Mapping[str, str]) -> str:
    """Return the value of x-request-id; empty if it is missing or invalid.

    A valid value has 1 to MAX_LABEL_BYTES printable ASCII characters, none of which is a space.
    """
    value = headers.get(X_REQUEST_ID, "")
    return value if _PRINTABLE.fullmatch(value) else ""


def idempotency_key(headers: Mapping[str, str], index: int | None = None) -> str:
    """Return the idempotency key of a call, as a request id; empty if the call has none.

    ``index`` is appended to the key, unless ``index`` is None. Raises InvalidRequest if the result
    is not a valid request id.
    """
    if IDEMPOTENCY_KEY not in headers:
        return ""
    # The IETF draft of idempotency-key has quotation marks around the key; most clients omit them.
    request_id = headers[IDEMPOTENCY_KEY].strip('"') + ("" if index is None else f":{index}")
    if not is_request_id(request_id):
        raise InvalidRequest(
            f"{IDEMPOTENCY_KEY} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -",
            field=IDEMPOTENCY_KEY,
        )
    return request_id


def _label(headers: Mapping[str, str], name: str) -> str:
    label = headers.get(name, "")
    if len(label.encode()) > MAX_LABEL_BYTES:
        raise OutOfRange(f"{name} is longer than {MAX_LABEL_BYTES} bytes", field=name)
    return label


def _milliseconds(headers: Mapping[str, str], name: str) -> int:
    try:
        value = float(headers[name])
    except ValueError:
        raise InvalidRequest(f"{name} must be a number of milliseconds", field=name) from None
    check_field("timeout_ms", value, name)
    return round(value)


_WIRE_STATE = {state: pb.RequestState.Value(f"REQUEST_STATE_{state.name}") for state in State}
_STATES = {number: state for state, number in _WIRE_STATE.items()}
#: Default number of requests on a page of a listing.
_PAGE_SIZE = 100


class Inference:
    def __init__(
        self,
        requests: Requests,
        models: ServedModels,
        transport: Transport,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self._requests = requests
        self._models = models
        self._relay = Relay(transport)
        self._tracer = tracer
        #: streams that are open, or have ended and were not garbage-collected yet
        self._streams = WeakSet[RequestStream]()

    async def generate(
        self,
        caller: Caller,
        message: pb.GenerateRequest,
        headers: Mapping[str, str],
        journal: Journal,
        timeout_s: float | None = None,
    ) -> Opened:
        """Submit a request, and open its output.

        If a request with the same id exists, it is opened instead. ``headers`` provide values for
        fields that ``message`` lacks. ``journal`` records the request's times, including those
        before the submission. The shorter of ``timeout_s`` and the timeout in ``message`` applies;
        if ``timeout_s`` is None, only the timeout in ``message`` does.

        If ``message`` has no id and the headers are valid, ``message.request_id`` is set to the id
        from the headers, or else to a new one, even if the request is then rejected. Raises
        InvalidRequest, UnknownModel, RequestConflict if the existing request has another body,
        QueueFull, DeadlineUnmeetable, RateLimited, LedgerFull, RouterStopping, LedgerUnavailable,
        and Moved if another router takes over or discards the request meanwhile.
        """
        try:
            apply_headers(message, headers)
        except EverliftError as error:
            self.count_rejected(error)
            raise
        return await self._generate(caller, message, headers, journal, timeout_s)

    def generate_many(
        self,
        caller: Caller,
        message: pb.GenerateManyRequest,
        headers: Mapping[str, str],
        arrived_at: float,
        timeout_s: float | None = None,
    ) -> generate_many.MergedStream:
        """Submit several requests, each as with ``generate``, and return their merged output.

        A request without an id gets the id from ``headers`` with its index appended.
        ``arrived_at`` is the time at which the call arrived (``event_loop.now()``), ``timeout_s``
        the time limit of the whole call. An error of one request is reported in the stream for
        that request only. The caller must close the returned stream.

        Raises TooManyRequests or OutOfRange if the number of requests is invalid, InvalidRequest or
        OutOfRange if a header is invalid, and InvalidRequest if two requests have the same id.
        """
        until = None if timeout_s is None else now() + timeout_s
        try:
            generate_many.check_count(len(message.requests))
            for index, request in enumerate(message.requests):
                apply_headers(request, headers, index)
            generate_many.check_names(message.requests)
        except EverliftError as error:
            self.count_rejected(error)
            raise

        async def opened(request: pb.GenerateRequest) -> Opened:
            left_s = None if until is None else max(until - now(), 0.001)
            return await self._generate(caller, request, headers, Journal(arrived_at), left_s)

        return generate_many.MergedStream(message.requests, opened)

    async def _generate(
        self,
        caller: Caller,
        message: pb.GenerateRequest,
        headers: Mapping[str, str],
        journal: Journal,
        timeout_s: float | None,
    ) -> Opened:
        trace = self._tracer.start_span(headers.items())
        x_request_id = header_request_id(headers)
        message.request_id = message.request_id or new_request_id(message.session_id)
        with self._recording_rejections(message, trace, journal.called_at, x_request_id):
            request_id = caller.qualify(message.request_id)
            model = self._models.requested(message.model)
            prompt = message.text or message.tokens.ids
            size = len(prompt) + sum(map(len, message.images))
            if message.text or not message.HasField("truncate_prompt_tokens"):
                model.check_fits(prompt)
            submission = await tokenizer.with_text(
                size,
                lambda: caller.limits.fitted(
                    Submission.from_proto(
                        message,
                        request_id,
                        secrets.randbits(63),
                        trace,
                        x_request_id,
                        model.sampling_defaults,
                        model.adapter_digests,
                    )
                ),
            )
            turns = await self._requests.session_turns.find(submission)
            request = await tokenizer.with_text(
                len(prompt), lambda: model.resolve(submission, turns)
            )
            journal.received(now())
            try:
                live = await self._requests.submit(
                    request, _earlier(submission.timeout_s, timeout_s), journal
                )
            except Elsewhere as elsewhere:
                attach = pb.AttachRequest(request_id=request_id, explain=message.explain)
                source = RelayedSource(self._relay.attach(elsewhere.address, attach))
                stream = self._followed(attach, source, Delivered(), was_submitted=True)
                return Opened(strip_tenant(request_id), None, stream)
        attach = pb.AttachRequest(request_id=request_id, explain=message.explain)
        stream = self._followed(attach, self._stream(live, attach), was_submitted=True)
        is_new = live.journal is journal
        return Opened(strip_tenant(request_id), live.request.trace, stream, is_new)

    async def attach(
        self,
        caller: Caller,
        message: pb.AttachRequest,
        *,
        is_relayed: bool = False,
        body_hash: bytes = b"",
        had_output: bool = False,
    ) -> Opened:
        """Open the output of an existing request, from the offsets in ``message``.

        ``is_relayed``: the caller is another router, which relays the output to its own client.
        That router opens a new stream itself after a takeover of the request, so this router does
        not. ``body_hash`` is the hash of the request's body if the client sent the body again;
        empty otherwise. ``had_output``: the client has output of the request, even if ``message``
        has no offsets.

        If there is no such request, raises DataLoss if the client has output of it, and
        UnknownRequest otherwise. Raises ForgottenRequest if the request was erased, RequestConflict
        if it has another body, Moved if another router takes it over meanwhile, OffsetOutOfRange,
        UnknownModel, InvalidRequest, RouterStopping, and LedgerUnavailable.
        """
        message.request_id = caller.qualify(message.request_id)
        if max(len(message.from_offsets), len(message.digests)) > MAX_N:
            raise OffsetOutOfRange(f"there are offsets of more than {MAX_N} choices")
        had_output = had_output or any(message.from_offsets)
        try:
            trace, source = await self._source(message, is_relayed, body_hash)
        except ForgottenRequest:
            raise
        except UnknownRequest as error:
            raise lost_output_error(error) if had_output else error from None
        request_id = strip_tenant(message.request_id)
        if is_relayed:
            # After a takeover, the router that relays the output opens a new stream itself.
            return Opened(request_id, trace, source)
        is_relayed_from_start = isinstance(source, RelayedSource) and not any(message.from_offsets)
        delivered = Delivered() if is_relayed_from_start else None
        stream = self._followed(message, source, delivered, had_output=had_output)
        return Opened(request_id, trace, stream)

    async def _source(
        self, message: pb.AttachRequest, is_relayed: bool = False, body_hash: bytes = b""
    ) -> tuple[TraceContext | None, Source]:
        """Return the trace context of an existing request, and the stream of its output.

        If another router owns the request, the stream is relayed from there, and the trace is None.
        """
        try:
            live = await self._requests.attach(message.request_id)
        except Elsewhere as elsewhere:
            if body_hash:
                stored, _ = await self._requests.get(message.request_id)
                check_same_body(stored.request, body_hash)
            return None, RelayedSource(self._relay.attach(elsewhere.address, message))
        if body_hash:
            check_same_body(live.request, body_hash)
        return live.request.trace, self._stream(live, message, is_relayed=is_relayed)

    def _stream(
        self, live: LiveRequest, message: pb.AttachRequest, *, is_relayed: bool = False
    ) -> LiveSource:
        return self._requests.stream(
            live,
            message.from_offsets,
            message.digests,
            is_relayed=is_relayed,
            explains=message.explain,
        )

    def _followed(
        self,
        message: pb.AttachRequest,
        source: Source,
        delivered: Delivered | None = None,
        *,
        was_submitted: bool = False,
        had_output: bool = False,
    ) -> RequestStream:
        """Return a stream of the output in ``source`` that survives a takeover of the request.

        After a takeover the stream continues from the new owner. ``delivered`` records how much
        output the client has received; if it is None, ``source`` provides this record when it is
        needed. ``was_submitted`` and ``had_output`` select the error that the stream raises if the
        request has become unknown. ``was_submitted``: the client can submit the request again.
        ``had_output``: the client has output from an earlier stream.
        """
        stream = RequestStream(
            message.request_id,
            source,
            partial(self._reopened, message.explain),
            delivered,
            was_submitted=was_submitted,
            had_output=had_output,
        )
        self._streams.add(stream)
        return stream

    async def _reopened(self, explains: bool, message: pb.AttachRequest) -> Source:
        message.explain = explains
        _, source = await self._source(message)
        return source

    async def cancel(self, caller: Caller, message: pb.CancelRequest) -> pb.CancelResponse:
        """Cancel a request unless it has ended, and return its state.

        Raises UnknownRequest, LedgerUnavailable.
        """
        message.request_id = caller.qualify(message.request_id)
        try:
            entry = await self._requests.cancel(message.request_id)
        except Elsewhere as elsewhere:
            return await self._relay.call(elsewhere.address, lambda stub: stub.Cancel, message)
        return pb.CancelResponse(state=_WIRE_STATE[entry.state])

    async def forget(self, caller: Caller, message: pb.ForgetRequest) -> pb.ForgetResponse:
        """Erase a request, after cancelling it if it is unfinished.

        Raises UnknownRequest, LedgerUnavailable, and Moved if another router takes over the
        request.
        """
        message.request_id = caller.qualify(message.request_id)
        try:
            await self._requests.forget(message.request_id)
        except Elsewhere as elsewhere:
            return await self._relay.call(elsewhere.address, lambda stub: stub.Forget, message)
        return pb.ForgetResponse()

    async def get_request(
        self, caller: Caller, message: pb.GetRequestRequest
    ) -> pb.GetRequestResponse:
        """Return a request's state and events. Raises UnknownRequest and LedgerUnavailable."""
        stored, events = await self._requests.get(caller.qualify(message.request_id))
        response = _described(stored.entry)
        response.request_id = caller.name(stored.entry.request_id)
        response.model = stored.request.served_model
        response.prompt_tokens = len(stored.request.prompt_ids)
        response.priority = stored.request.priority
        if stored.request.trace is not None:
            response.trace_id = stored.request.trace.trace_id
        response.events.extend(map(_event, events))
        return response

    async def read(self, caller: Caller, request_id: str) -> LiveRequest:
        """Return a request with the output that the ledger has of it.

        Raises UnknownRequest and LedgerUnavailable.
        """
        return await self._requests.read(caller.qualify(request_id))

    async def prompt_ids(self, caller: Caller, request_id: str) -> tuple[int, ...]:
        """Return the token ids of a request's prompt.

        Raises UnknownRequest and LedgerUnavailable.
        """
        return await self._requests.prompt_ids(caller.qualify(request_id))

    async def explain(self, caller: Caller, message: pb.ExplainRequest) -> pb.Explanation:
        """Return how much time a request spent in which phase.

        Raises UnknownRequest and LedgerUnavailable.
        """
        return _named(caller, await self._explained(caller.qualify(message.request_id)))

    async def _explained(self, request_id: str) -> pb.Explanation:
        try:
            return await self._requests.explain(request_id)
        except Elsewhere as elsewhere:
            message = pb.ExplainRequest(request_id=request_id)
            return await self._relay.call(elsewhere.address, lambda stub: stub.Explain, message)

    async def tokenize(self, caller: Caller, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Return the token ids of a text, and the model's maximum sequence length.

        Raises UnknownModel, RouterStopping while one model replaces another, and PromptTooLong.
        """
        model = self._models.requested(message.model)
        ids = await tokenizer.with_text(len(message.text), lambda: model.encode(message.text))
        return pb.TokenizeResponse(token_ids=ids, max_model_len=model.max_model_len or 0)

    async def detokenize(
        self, caller: Caller, message: pb.DetokenizeRequest
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids.

        Raises UnknownModel, RouterStopping while one model replaces another, and OutOfRange if an
        id is not in the vocabulary.
        """
        model = self._models.requested(message.model)
        ids = message.token_ids
        text = await tokenizer.with_text(len(ids), lambda: model.decode(ids))
        return pb.DetokenizeResponse(text=text)

    def list_models(self) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    name=name,
                    max_model_len=model.max_model_len or 0,
                    vocab_size=model.vocab_size,
                    sampling_defaults=sampling_defaults.as_proto(model.sampling_defaults),
                    parent=model.parent_of(name) or "",
                    root=model.root_of(name),
                )
                for model in self._models
                for name in model.names
            ]
        )

    async def list_requests(
        self, caller: Caller, message: pb.ListRequestsRequest
    ) -> pb.ListRequestsResponse:
        """Return a page of requests that the caller may list, newest first.

        Raises InvalidRequest for an invalid state or page token, OutOfRange for too many states or
        a page size that is too large, Forbidden, LedgerUnavailable.
        """
        tenant = caller.tenant_of_listing(message.tenant if message.HasField("tenant") else None)
        if message.page_size > MAX_PAGE_SIZE:
            raise OutOfRange(f"page_size must be at most {MAX_PAGE_SIZE}")
        if len(message.states) > len(State):
            raise OutOfRange(f"states has {len(message.states)} states; there are {len(State)}")
        page = await self._requests.list_requests(
            tenant,
            [_state(number) for number in message.states],
            message.page_size or _PAGE_SIZE,
            parse_page_token(message.page_token) if message.page_token else None,
            message.session_id,
        )
        return pb.ListRequestsResponse(
            requests=[_summary(caller, entry) for entry in page.entries],
            next_page_token=page_token(page.last) if page.last is not None else "",
        )

    def stop(self) -> None:
        """End the open streams with RouterStopping, so that clients resume at another router."""
        for stream in list(self._streams):
            stream.fail(RouterStopping("this router is stopping: attach through another router"))

    def count_rejected(self, error: EverliftError) -> None:
        """Count, in the metrics, a submission whose message or headers are invalid."""
        self._requests.count_rejected(error)

    @contextmanager
    def _recording_rejections(
        self,
        message: pb.GenerateRequest,
        trace: TraceContext | None,
        arrived_at: float,
        x_request_id: str,
    ) -> Iterator[None]:
        """Context manager that records an exception as a rejected submission and raises it again.

        The rejection is counted in the metrics and added to the trace. ``arrived_at`` is the time
        at which the call arrived (``event_loop.now()``).
        """
        try:
            yield
        except Exception as error:
            known = error if isinstance(error, EverliftError) else EverliftError()
            self._requests.count_rejected(known, self._models.canonical_name(message.model))
            self._tracer.refused(trace, now() - arrived_at, known.slug, x_request_id)
            raise


def _described(entry: Entry) -> pb.GetRequestResponse:
    return pb.GetRequestResponse(
        state=_WIRE_STATE[entry.state],
        attempts=entry.attempts,
        worker_id=entry.worker,
        output_tokens=sum(entry.num_tokens),
        finish_reasons=[
            reason.value if reason else pb.FINISH_REASON_UNSPECIFIED
            for reason in entry.finish_reasons
        ],
        error_slug=entry.error_slug,
        error_message=entry.error_message,
        losses=entry.losses,
    )


def _named(caller: Caller, explanation: pb.Explanation) -> pb.Explanation:
    explanation.request_id = caller.name(explanation.request_id)
    for attempt in explanation.attempts:
        for names in (attempt.neighbours, attempt.newcomers, attempt.occupants):
            names[:] = map(caller.name, names)
        if attempt.HasField("queue"):
            attempt.queue.before[:] = map(caller.name, attempt.queue.before)
    return explanation


def _summary(caller: Caller, entry: Entry) -> pb.RequestSummary:
    return pb.RequestSummary(
        request_id=caller.name(entry.request_id),
        state=_WIRE_STATE[entry.state],
        arrived=entry.arrived,
        attempts=entry.attempts,
        output_tokens=sum(entry.num_tokens),
        error_slug=entry.error_slug,
    )


def _state(number: pb.RequestState.ValueType) -> State:
    if number not in _STATES:
        raise InvalidRequest(f"states: there is no state {number}")
    return _STATES[number]


def _event(event: Event) -> pb.RequestEvent:
    return pb.RequestEvent(time=event.time, move=event.move, detail=event.detail)


def _earlier(a: float | None, b: float | None) -> float | None:
    return min((t for t in (a, b) if t is not None), default=None)
