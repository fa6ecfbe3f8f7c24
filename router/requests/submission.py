"""Submission of new requests: check, charge to quotas, store in the ledger, start or enqueue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from everlift import logs
from everlift.errors import (
    DeadlineUnmeetable,
    EverliftError,
    LedgerFull,
    LedgerUnavailable,
    Moved,
    QueueFull,
    RateLimited,
    RequestConflict,
    RouterStopping,
    UnknownRequest,
)
from everlift.messages import Request
from everlift.request_id import is_named, strip_tenant
from router.admission.load_shedding import EarlyRejection
from router.admission.wait_estimate import EstimatedWait
from router.event_loop import now
from router.leader.client import LeaderClient
from router.ledger.base import Opened
from router.ledger.entry import Dispatch
from router.prediction.predictor import Prediction
from router.requests.attempt_runner import AttemptRunner
from router.requests.ledger_client import LedgerClient, LedgerHealth
from router.requests.registry import RequestRegistry
from router.requests.request import LiveRequest
from router.requests.served_models import ServedModels
from router.requests.timeouts import Timeouts
from router.requests.timing import Journal

log = logs.get_logger(__name__)

#: Maximum size of the images of all unfinished requests of a router, which stay in its memory.
_MAX_IMAGE_BYTES = 1 << 30
#: Seconds after which a client may retry when a router had too many images.
_IMAGES_S = 1.0


class Submissions:
    """Opens new requests: checks, charges to quotas, stores in the ledger, and starts them.

    Both callbacks are called with a request id. ``attach`` is called if the ledger already has the
    id, and returns the existing request. ``take_over`` is called if the ledger may have stored the
    request although the ledger's answer is missing, with whether the request was charged to its
    tenant. The callback starts a takeover in the background, unless another living router owns the
    request. It cancels the request at once, or after the grace period, unless a client attaches or
    its on_disconnect is CONTINUE. It cancels the charge if the ledger lacks the request.
    """

    def __init__(
        self,
        registry: RequestRegistry,
        ledger: LedgerClient,
        health: LedgerHealth,
        models: ServedModels,
        leader_client: LeaderClient,
        attempts: AttemptRunner,
        timeouts: Timeouts,
        early_rejection: EarlyRejection,
        estimated_waits: Mapping[str, EstimatedWait],
        attach: Callable[[str], Awaitable[LiveRequest]],
        take_over: Callable[[str, bool], None],
    ) -> None:
        self._registry = registry
        self._ledger = ledger.ledger
        self._health = health
        self._models = models
        self._leader_client = leader_client
        self._attempts = attempts
        self._timeouts = timeouts
        self._early_rejection = early_rejection
        self._estimated_waits = estimated_waits
        self._attach = attach
        self._take_over = take_over
        self._quotas = registry.quotas

    async def open_request(
        self, request: Request, timeout_s: float | None, journal: Journal
    ) -> LiveRequest:
        """Open a request, or return the existing request of the same id.

        ``timeout_s`` is the time from the acceptance to the deadline in seconds, or None without a
        deadline. ``journal`` has the times since the request's call.

        Raises RequestConflict if the id exists with another body, and Elsewhere if another router
        owns the existing request. Raises QueueFull, DeadlineUnmeetable, RateLimited or LedgerFull
        if the request is rejected, and RouterStopping or LedgerUnavailable. Raises Moved if another
        router takes over or discards the existing request meanwhile. Raises UnknownModel if the
        existing request has ended and its model is no longer served.
        """
        async with self._registry.locks.hold(request.request_id):
            if (known := self._registry.known(request.request_id)) is not None:
                check_same_body(known.request, request.body_hash)
                return known
            prediction = await self._admit(request, timeout_s)
            live = await self._open_new(request, timeout_s, journal, prediction)
            if live is not None:
                return live
        try:
            return await self._attach(request.request_id)
        except UnknownRequest:
            raise discarded_error() from None

    async def _admit(self, request: Request, timeout_s: float | None) -> Prediction:
        """Check that a request can be accepted, and return the prediction of its output lengths.

        Raises RouterStopping, LedgerUnavailable, LedgerFull, RetriedTooSoon, QueueFull or
        DeadlineUnmeetable. The errors of a full ledger or queue and of the deadline do not apply to
        a request that the ledger already has, because it was accepted before.
        """
        request_id = request.request_id
        if self._registry.is_closing:
            raise RouterStopping("this router is stopping: send the request to another router")
        try:
            self._health.check_writable()
            self._check_images(request)
            self._early_rejection.admit(request_id, request.model, request.priority, now())
            prediction = self._predict(request)
            self._early_rejection.check_in_time(
                request_id,
                request.model,
                request.priority,
                request.ttft_target_s,
                timeout_s,
                prediction.least_tokens,
                now(),
            )
        except (QueueFull, DeadlineUnmeetable, LedgerFull):
            if not await self._is_known(request_id):
                raise
            self._early_rejection.withdraw_rejection(request_id)
            return self._predict(request)
        return prediction

    def _check_images(self, request: Request) -> None:
        size = request.num_image_bytes
        if size and self._registry.num_image_bytes + size > _MAX_IMAGE_BYTES:
            raise QueueFull(
                f"the images of this router's requests would exceed {_MAX_IMAGE_BYTES} bytes: "
                "retry later, or send smaller images",
                retry_after_s=_IMAGES_S,
            )

    def _predict(self, request: Request) -> Prediction:
        cached = self._leader_client.cached_tokens(
            request.model, request.chunks, len(request.prompt_ids)
        )
        arrived = now() + self._health.clock_offset_s
        return self._registry.predictors[request.model].predict(request, arrived, cached)

    async def _is_known(self, request_id: str) -> bool:
        """Return whether the ledger has the request. Raises LedgerUnavailable."""
        if not is_named(request_id):
            return False
        with suppress(UnknownRequest):
            await self._ledger.get(request_id)
            return True
        return False

    async def _open_new(
        self,
        request: Request,
        timeout_s: float | None,
        journal: Journal,
        prediction: Prediction,
    ) -> LiveRequest | None:
        """Open the request and return it; return None if the ledger already has its id."""
        is_charged = await self._charge(request)
        prediction = self._with_wait(request, prediction)
        reservation, has_started = None, False
        # A worker may have announced a shorter context after the request was resolved. The request
        # is then queued without a reservation, and the check at its dispatch rejects it.
        model = self._models.of(request)
        if model.fits(request):
            reservation = self._attempts.reserve(request, timeout_s, prediction)
        try:
            dispatch = None if reservation is None else reservation.dispatch
            opened = await self._write(request, timeout_s, is_charged, dispatch)
            if not opened.created:
                return None
            live = self._register(request, opened, timeout_s, journal, prediction)
            if reservation is not None:
                has_started = self._attempts.start_reserved(live, opened.entry, reservation)
        finally:
            if reservation is not None and not has_started:
                reservation.cancel()
        if not has_started:
            self._attempts.enqueue(live)
        self._timeouts.set_deadline(live, timeout_s)
        return live

    async def _charge(self, request: Request) -> bool:
        """Charge the request to its tenant's quota; return whether it was charged now.

        Return False if the tenant has no limit per minute or of concurrent requests, or if the
        request was charged before. Also return False if the limits are exceeded but the ledger
        already has the request. Raises RateLimited if a new request exceeds the limits. Also raises
        LedgerFull and LedgerUnavailable.
        """
        try:
            return await self._quotas.charge(request)
        except RateLimited:
            if await self._is_known(request.request_id):
                return False
            raise

    def _with_wait(self, request: Request, prediction: Prediction) -> Prediction:
        estimated = self._estimated_waits[request.model]
        wait_s = estimated.estimate(request.priority, prediction.work_tokens)
        key = prediction.queue_key._replace(estimated_wait_s=wait_s)
        return replace(prediction, queue_key=key)

    async def _write(
        self,
        request: Request,
        timeout_s: float | None,
        is_charged: bool,
        dispatch: Dispatch | None,
    ) -> Opened:
        try:
            opened = await self._ledger.open(request, self._registry.router_id, timeout_s, dispatch)
        except LedgerUnavailable:
            # The ledger may have opened and charged the request although its answer is missing.
            self._take_over(request.request_id, is_charged)
            raise
        except EverliftError:
            if is_charged:
                self._quotas.settle(request.request_id, None)
            raise
        if is_charged and opened.entry.state.is_final:
            # The request had already ended and its quota was settled, so the new charge is
            # cancelled.
            self._quotas.settle(request.request_id, None)
        return opened

    def _register(
        self,
        request: Request,
        opened: Opened,
        timeout_s: float | None,
        journal: Journal,
        prediction: Prediction,
    ) -> LiveRequest:
        if timeout_s is not None:
            request = replace(request, deadline=opened.entry.arrived + timeout_s)
        journal.accepted(now())
        tokenizer = self._models.of(request).tokenizer
        live = LiveRequest.opened(request, opened.entry, tokenizer, now(), journal)
        self._registry.add(live, prediction)
        observer = self._registry.observer.of_class(request.model, live.priority)
        observer.accepted(len(request.prompt_ids))
        log.info("accepted", **live.log_fields, prompt_tokens=len(request.prompt_ids))
        return live


def discarded_error() -> Moved:
    """Return the error for a submission whose request another router rejected or erased."""
    return Moved("another router discarded this request: send it again")


def check_same_body(request: Request, body_hash: bytes) -> None:
    """Raise RequestConflict if ``body_hash`` is not the hash of the body of ``request``."""
    if request.body_hash != body_hash:
        raise RequestConflict(
            f'request id "{strip_tenant(request.request_id)}" already exists with a different '
            "request body"
        )
