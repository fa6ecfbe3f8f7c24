"""Interface through which requests report events to the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from everlift.messages import FinishReason


class ClassObserver(Protocol):
    """Observer of the requests of one priority class of a model.

    Durations are in seconds. The methods must return quickly, because the event loop calls them for
    every piece of output. The observer belongs to one router: after a takeover, the first dispatch
    and the first token of a request are the first ones at the new router.
    """

    def accepted(self, prompt_tokens: int) -> None:
        """Count an accepted request."""
        ...

    def dispatched(self, wait_s: float) -> None:
        """Record a request's first dispatch, ``wait_s`` after its acceptance or takeover."""
        ...

    def prefix_looked_up(self, tenant: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a prompt that a worker admitted, and its tokens found in the prefix cache.

        The method is called once for each request. ``tenant`` is empty if there are no tenants.
        """
        ...

    def first_token(self, since_call_s: float, since_dispatch_s: float) -> None: ...

    def ttft_predicted(self, ttft_s: float, measured_s: float) -> None:
        """Record the predicted time to first token ``ttft_s`` and the measured ``measured_s``."""
        ...

    def tpot_predicted(self, ratio: float) -> None:
        """Record the ratio of measured to predicted time per output token after the first one."""
        ...

    def next_tokens(self, interval_s: float) -> None:
        """Record the time between two consecutive increases of a choice's readable tokens."""
        ...

    def finished(
        self,
        latency_s: float,
        decode_s: float,
        prompt_tokens: int,
        output_tokens: int,
        bypassed: int,
        reasons: Sequence[FinishReason],
    ) -> None:
        """Record a finished request.

        ``latency_s`` is the time from its call to its end, and ``decode_s`` from its first token to
        its end. ``bypassed`` is the number of later requests that left the queue before it.
        ``reasons`` are the finish reasons of its choices.
        """
        ...

    def failed(self, slug: str) -> None:
        """Record a request that ended with the error ``slug``."""
        ...


class Observer(Protocol):
    """Observer of all requests of a router.

    ``of_class`` returns the observer of the requests of one priority class of a model.
    """

    def of_class(self, model: str, priority: int) -> ClassObserver: ...

    def refused(self, model: str, slug: str) -> None:
        """Count a request that was rejected with the error ``slug``; ``model`` may be empty."""
        ...


class _NoObserver:
    def accepted(self, prompt_tokens: int) -> None: ...

    def dispatched(self, wait_s: float) -> None: ...

    def prefix_looked_up(self, tenant: str, prompt_tokens: int, cached_tokens: int) -> None: ...

    def first_token(self, since_call_s: float, since_dispatch_s: float) -> None: ...

    def ttft_predicted(self, ttft_s: float, measured_s: float) -> None: ...

    def tpot_predicted(self, ratio: float) -> None: ...

    def next_tokens(self, interval_s: float) -> None: ...

    def finished(
        self,
        latency_s: float,
        decode_s: float,
        prompt_tokens: int,
        output_tokens: int,
        bypassed: int,
        reasons: Sequence[FinishReason],
    ) -> None: ...

    def failed(self, slug: str) -> None: ...

    def of_class(self, model: str, priority: int) -> ClassObserver:
        return self

    def refused(self, model: str, slug: str) -> None: ...


#: Observer of a router without metrics.
NO_OBSERVER = _NoObserver()
