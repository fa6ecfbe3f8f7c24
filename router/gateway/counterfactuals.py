"""How long a request would have taken under other policies. Who simulates it is not known here: it
must not be done in this process, whose event loop has streams to serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from everlift import logs
from everlift.errors import InvalidRequest, OutOfRange, QueueFull, Unsupported
from everlift.explanation import state_name
from everlift.request_id import tenant_of
from everlift.settings import SettingsError
from everlift.v1 import admin_pb2
from everlift.v1 import inference_pb2 as pb
from router.config import RouterConfig
from router.gateway.what_if import Estimates, NoEstimate, Question
from router.rulebook import Rulebook

log = logs.get(__name__)

#: In one question.
MAX_POLICIES = 8
#: Questions in hand. One of them is simulated, the others wait for it.
_MAX_QUESTIONS = 4


class Simulator(Protocol):
    async def estimates(self, question: Question) -> Estimates:
        """Leaves no work behind when it is cancelled. Raises NoEstimate, UnknownRequest,
        LedgerUnavailable; EverliftError where it fails."""
        ...


class Counterfactuals:
    """``kinds`` answers those of the workers that there are now. A simulation may take
    ``timeout_s``; ``observe`` hears what came of it (WHAT_IF_ANSWERS in metrics/catalogue.py) and
    what it took, in seconds."""

    def __init__(
        self,
        simulator: Simulator,
        rulebook: Rulebook,
        kinds: Callable[[], Sequence[admin_pb2.WorkerKind]],
        timeout_s: float,
        observe: Callable[[str, float], None],
    ) -> None:
        self._simulator = simulator
        self._rulebook = rulebook
        self._kinds = kinds
        self._timeout_s = timeout_s
        self._observe = observe
        self._turn = asyncio.Lock()
        #: a tenant for each question in hand
        self._asking: list[str] = []

    def supposed(self, policies: Sequence[str]) -> Mapping[str, RouterConfig]:
        """What would hold under each. Raises InvalidRequest, OutOfRange."""
        if len(policies) > MAX_POLICIES:
            raise OutOfRange(f"what_if must have at most {MAX_POLICIES} policies", field="what_if")
        try:
            return {policy: self._rulebook.supposed(policy) for policy in policies}
        except SettingsError as error:
            raise InvalidRequest(f"what_if: {error}", field="what_if") from None

    async def of(
        self,
        request_id: str,
        explanation: pb.Explanation,
        policies: Mapping[str, RouterConfig],
    ) -> list[pb.Counterfactual]:
        """Of a request that its caller may see; nothing where nothing is asked. Raises QueueFull,
        UnknownRequest, LedgerUnavailable, EverliftError."""
        if not policies:
            return []
        actual = self._actual(explanation)
        question = Question(request_id, {**actual, **policies}, self._kinds())
        try:
            _check_finished(explanation)
            estimates = await self._simulated(question)
        except NoEstimate as error:
            return [pb.Counterfactual(policy=name, cause=str(error)) for name in policies]
        log.info("what-if estimated", request_id=request_id, requests=estimates.num_requests)
        return [*estimates.told()]

    def _actual(self, explanation: pb.Explanation) -> Mapping[str, RouterConfig]:
        """By the order that the queue had when the request left it last, where that was told, and
        by what holds now."""
        orders = (attempt.queue.order for attempt in reversed(explanation.attempts))
        order = next(filter(None, orders), self._rulebook.order)
        return {order: self._rulebook.supposed(order)}

    async def _simulated(self, question: Question) -> Estimates:
        with self._in_hand(tenant_of(question.request_id)):
            async with self._turn:
                with self._observed():
                    return await self._estimates(question)

    async def _estimates(self, question: Question) -> Estimates:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._simulator.estimates(question)
        except TimeoutError:
            raise NoEstimate(
                f"to simulate it takes more than {self._timeout_s:g} s (router.what_if_timeout)"
            ) from None

    @contextmanager
    def _observed(self) -> Iterator[None]:
        begun, answer = time.monotonic(), "error"
        try:
            yield
            answer = "estimate"
        except NoEstimate:
            answer = "no_estimate"
            raise
        except asyncio.CancelledError:
            answer = "cancelled"
            raise
        finally:
            self._observe(answer, time.monotonic() - begun)

    @contextmanager
    def _in_hand(self, tenant: str) -> Iterator[None]:
        """A tenant has one question in it, so that all have their turn."""
        if len(self._asking) >= _MAX_QUESTIONS or (tenant and tenant in self._asking):
            raise QueueFull("too many what-ifs wait", retry_after_s=self._timeout_s)
        self._asking.append(tenant)
        try:
            yield
        finally:
            self._asking.remove(tenant)


class NoCounterfactuals:
    """Where nobody simulates."""

    def supposed(self, policies: Sequence[str]) -> Mapping[str, RouterConfig]:
        """Raises Unsupported."""
        if policies:
            raise Unsupported(
                "what_if is not estimated here (router.what_if_timeout)", field="what_if"
            )
        return {}

    async def of(
        self,
        request_id: str,
        explanation: pb.Explanation,
        policies: Mapping[str, RouterConfig],
    ) -> list[pb.Counterfactual]:
        return []


NO_COUNTERFACTUALS = NoCounterfactuals()
WhatIf: TypeAlias = Counterfactuals | NoCounterfactuals


def _check_finished(explanation: pb.Explanation) -> None:
    """Raises NoEstimate."""
    if explanation.state != pb.REQUEST_STATE_FINISHED:
        state = state_name(explanation.state)
        raise NoEstimate(f"it is {state}: only what finished can be simulated")
