"""Losses of a request, that is, failures of workers that had it, and their limits. Pure.

Two limits end a request that may itself cause the losses. ``max_losses`` counts losses while the
request was in an engine step, because these identify a request that crashes its workers.
``max_losses_total`` counts all losses, because a request can also crash a worker outside a step.

A worker that crashes in a sequence's first step may not have reported that step. The first crash
since the last new token therefore counts as a loss in a step, even without a report. The next
attempts require a confirmation (``need_confirmation``): the worker reports the first step, and
waits a short time for this router's confirmation before it runs the step. A crash without a report
then counts as a loss outside a step. The first attempt also requires a confirmation if
``max_losses`` is 1.
"""

from __future__ import annotations

from router.config import RouterConfig


class Losses:
    """Counts the losses of one request since its last new token.

    ``in_a_row`` counts all losses, and ``in_step`` only those in which the request was in an engine
    step. Both counts restart at the first loss after new output tokens, not at the tokens.
    """

    def __init__(self) -> None:
        self.in_a_row = self.in_step = 0
        self._num_tokens = -1

    def count(self, num_tokens: int, *, was_in_step: bool) -> None:
        """Count one loss of a request that has ``num_tokens`` output tokens now."""
        if num_tokens > self._num_tokens:
            self.in_a_row = self.in_step = 0
        self._num_tokens = num_tokens
        self.in_a_row += 1
        self.in_step += was_in_step

    def need_confirmation(self, num_tokens: int, config: RouterConfig) -> bool:
        """Return whether the worker of the next attempt must wait before the request's first step.

        The worker then reports the step, and runs it when this router has confirmed the report, or
        after a short time without a confirmation. The wait is necessary if the request has no new
        tokens since its last loss, or if ``max_losses`` is 1. ``num_tokens`` is the request's
        number of output tokens now.
        """
        return num_tokens <= self._num_tokens or config.max_losses == 1

    def is_suspect(self, num_tokens: int, config: RouterConfig) -> bool:
        """Return whether the request was lost in a step, and one more such loss would end it.

        Losses before the last new token do not count. ``num_tokens`` is the request's number of
        output tokens now.
        """
        has_new_tokens = num_tokens > self._num_tokens
        return not has_new_tokens and self.in_step > 0 and self.in_step + 1 >= config.max_losses

    def are_too_many(self, config: RouterConfig) -> bool:
        return self.in_step >= config.max_losses or self.in_a_row >= config.max_losses_total
