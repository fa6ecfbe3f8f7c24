"""Observers of requests, for metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from everlift.messages import FinishReason


class ClassObserver(Protocol):
    """Observer of the requests of one class.

    Durations are seconds. Called from the event loop, for every piece of output: must be quick.
    """

    def accepted(self, prompt_tokens: int) -> None:
        """Count an accepted request."""
        ...

    def dispatched(self, wait_s: float) -> None:
        """Note the first dispatch, and the time since acceptance."""
        ...

    def first_token(self, since_call_s: float, since_dispatch_s: float) -> None: ...

    def ttft_predicted(self, ttft_s: float, seen_s: float) -> None:
        """Record the time to first token ``seen_s`` beside the predicted ``ttft_s``."""
        ...

    def tpot_predicted(self, ratio: float) -> None:
        """Record the ratio of the actual to the predicted time of each token after the first."""
        ...

    def next_tokens(self, interval_s: float) -> None:
        """Record the seconds between two moments at which more of a choice became readable."""
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

        ``latency_s`` counts from its call, ``decode_s`` from its first token; ``bypassed`` later
        requests left the queue before it; ``reasons`` are by choice.
        """
        ...

    def failed(self, slug: str) -> None:
        """Note an end with this error."""
        ...


class Observer(Protocol):
    def of_class(self, priority: int) -> ClassObserver: ...

    def refused(self, slug: str) -> None:
        """Count a refused request."""
        ...


class _Nobody:
    def accepted(self, prompt_tokens: int) -> None: ...

    def dispatched(self, wait_s: float) -> None: ...

    def first_token(self, since_call_s: float, since_dispatch_s: float) -> None: ...

    def ttft_predicted(self, ttft_s: float, seen_s: float) -> None: ...

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

    def of_class(self, priority: int) -> ClassObserver:
        return self

    def refused(self, slug: str) -> None: ...


#: For a gateway without metrics.
NOBODY = _Nobody()
