"""Counters and histograms of requests and of calls to the ledger."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.samples import Sample

from everlift.errors import EverliftError, LedgerUnavailable
from everlift.messages import FinishReason
from router.event_loop import now
from router.ledger.base import Ledger
from router.observability.metrics.catalogue import (
    CATALOGUE,
    FINISH_REASONS,
    LEDGER_OPERATIONS,
    MAX_TENANTS,
    OK,
    OTHER_TENANTS,
    OUTCOMES,
)

#: Default priority class. Its time series exist from the start of the router.
_DEFAULT_CLASS = 0


class Instruments:
    """Observer of requests and ledger calls that updates counters and histograms.

    The labels of a model, priority class or tenant are resolved once, at its first use; those of
    ledger calls are resolved at creation. An observation therefore takes about a microsecond.
    """

    def __init__(self, models: Iterable[str] = ()) -> None:
        """Create the instruments; those of ``models`` exist from the start."""
        self.registry = CollectorRegistry(auto_describe=False)
        self._metrics: dict[str, Counter | Histogram] = {}
        #: counters of a model's requests by outcome, choices by reason, requests and prompt tokens
        self._counters = tuple(map(self._counter, _OF_MODEL))
        self._models: dict[str, _Model] = {}
        self._tenant_prompt_tokens = self._counter("everlift_tenant_prompt_tokens_total")
        self._tenant_hit_tokens = self._counter("everlift_tenant_prefix_hit_tokens_total")
        #: counters of prompt tokens and of prefix-cache hits by label
        self._tenants: dict[str, tuple[Counter, Counter]] = {}
        self._histograms = {
            metric.name: self._histogram(metric.name)
            for metric in CATALOGUE.values()
            if metric.labels == ("model", "priority")
        }
        self._classes: dict[tuple[str, int], _Class] = {}
        for model in models:
            self.of_class(model, _DEFAULT_CLASS)
        calls = self._histogram("everlift_ledger_call_seconds")
        failures = self._counter("everlift_ledger_failures_total")
        self.ledger_calls = {
            name: (calls.labels(name), failures.labels(name)) for name in LEDGER_OPERATIONS
        }

    def _counter(self, name: str) -> Counter:
        metric = CATALOGUE[name]
        counter = Counter(metric.name, metric.help, metric.labels, registry=self.registry)
        self._metrics[name] = counter
        return counter

    def _histogram(self, name: str) -> Histogram:
        metric = CATALOGUE[name]
        histogram = Histogram(
            metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self.registry
        )
        self._metrics[name] = histogram
        return histogram

    def samples(self, name: str) -> list[Sample]:
        """Return the current samples of the counter or histogram ``name``."""
        return [sample for family in self._metrics[name].collect() for sample in family.samples]

    def of_class(self, model: str, priority: int) -> _Class:
        if (known := self._classes.get((model, priority))) is None:
            known = self._classes[model, priority] = _Class(self, model, priority)
        return known

    def of_model(self, model: str) -> _Model:
        """Return a model's counters; ``model`` is empty for requests that name no known model."""
        if (known := self._models.get(model)) is None:
            known = self._models[model] = _Model(model, *self._counters)
        return known

    def refused(self, model: str, slug: str) -> None:
        self.of_model(model).ended(slug)

    def prefix_looked_up(self, tenant: str, prompt_tokens: int, cached_tokens: int) -> None:
        if tenant:
            prompts, hits = self._tenants.get(tenant) or self._of_new_tenant(tenant)
            prompts.inc(prompt_tokens)
            hits.inc(cached_tokens)

    def _of_new_tenant(self, tenant: str) -> tuple[Counter, Counter]:
        label = tenant if len(self._tenants) < MAX_TENANTS else OTHER_TENANTS
        if label not in self._tenants:
            counters = self._tenant_prompt_tokens, self._tenant_hit_tokens
            self._tenants[label] = counters[0].labels(label), counters[1].labels(label)
        return self._tenants[label]

    def histogram(self, name: str, model: str, priority: int) -> Histogram:
        return self._histograms[name].labels(model, priority)


#: Counters of a model, in the order of the arguments of ``_Model``.
_OF_MODEL = (
    "everlift_requests_total",
    "everlift_choices_finished_total",
    "everlift_requests_accepted_total",
    "everlift_prompt_tokens_total",
)


class _Model:
    def __init__(
        self,
        model: str,
        requests: Counter,
        choices: Counter,
        accepted: Counter,
        prompt_tokens: Counter,
    ) -> None:
        self._outcomes = {outcome: requests.labels(model, outcome) for outcome in OUTCOMES}
        self._reasons = {reason: choices.labels(model, reason) for reason in FINISH_REASONS}
        self._accepted = accepted.labels(model)
        self._prompt_tokens = prompt_tokens.labels(model)

    def accepted(self, prompt_tokens: int) -> None:
        self._accepted.inc()
        self._prompt_tokens.inc(prompt_tokens)

    def ended(self, outcome: str) -> None:
        """Count an ended request; ``outcome`` is "ok", or the short name (slug) of its error.

        An unknown slug is counted as "internal".
        """
        self._outcomes.get(outcome, self._outcomes[EverliftError.slug]).inc()

    def choice_finished(self, reason: FinishReason) -> None:
        self._reasons[reason.name.lower()].inc()


class _Class:
    def __init__(self, instruments: Instruments, model: str, priority: int) -> None:
        def of(name: str) -> Histogram:
            return instruments.histogram(f"everlift_{name}", model, priority)

        self._instruments = instruments
        self._model = instruments.of_model(model)
        self._first_token = of("time_to_first_token_seconds")
        self._ttft_error = of("ttft_prediction_error_ratio")
        self._tpot_error = of("tpot_prediction_error_ratio")
        self._inter_token = of("inter_token_latency_seconds")
        self._latency = of("request_latency_seconds")
        self._queue_wait = of("queue_wait_seconds")
        self._prefill = of("prefill_seconds")
        self._decode = of("decode_seconds")
        self._prompt_tokens = of("request_prompt_tokens")
        self._output_tokens = of("request_output_tokens")
        self._bypassed = of("bypassed")

    def accepted(self, prompt_tokens: int) -> None:
        self._model.accepted(prompt_tokens)

    def prefix_looked_up(self, tenant: str, prompt_tokens: int, cached_tokens: int) -> None:
        self._instruments.prefix_looked_up(tenant, prompt_tokens, cached_tokens)

    def dispatched(self, wait_s: float) -> None:
        self._queue_wait.observe(wait_s)

    def first_token(self, since_call_s: float, since_dispatch_s: float) -> None:
        self._first_token.observe(since_call_s)
        self._prefill.observe(since_dispatch_s)

    def ttft_predicted(self, ttft_s: float, measured_s: float) -> None:
        if measured_s > 0:
            self._ttft_error.observe(abs(ttft_s / measured_s - 1))

    def tpot_predicted(self, ratio: float) -> None:
        if ratio > 0:
            self._tpot_error.observe(abs(1 / ratio - 1))

    def next_tokens(self, interval_s: float) -> None:
        self._inter_token.observe(interval_s)

    def finished(
        self,
        latency_s: float,
        decode_s: float,
        prompt_tokens: int,
        output_tokens: int,
        bypassed: int,
        reasons: Sequence[FinishReason],
    ) -> None:
        self._model.ended(OK)
        self._latency.observe(latency_s)
        self._decode.observe(decode_s)
        self._prompt_tokens.observe(prompt_tokens)
        self._output_tokens.observe(output_tokens)
        self._bypassed.observe(bypassed)
        for reason in reasons:
            self._model.choice_finished(reason)

    def failed(self, slug: str) -> None:
        self._model.ended(slug)


def timed(ledger: Ledger, instruments: Instruments) -> Ledger:
    """Return a wrapper of the ledger that records the duration and failures of its calls.

    Only the methods in LEDGER_OPERATIONS are recorded.
    """
    return cast("Ledger", _Timed(ledger, instruments))


class _Timed:
    def __init__(self, ledger: Ledger, instruments: Instruments) -> None:
        self._ledger = ledger
        for name, (seconds, failures) in instruments.ledger_calls.items():
            setattr(self, name, partial(self._call, name, seconds, failures))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def _call(
        self, name: str, seconds: Histogram, failures: Counter, *args: object, **kwargs: object
    ) -> object:
        call: Callable[..., Awaitable[object]] = getattr(self._ledger, name)
        began = now()
        try:
            return await call(*args, **kwargs)
        except LedgerUnavailable:
            failures.inc()
            raise
        finally:
            seconds.observe(now() - began)
