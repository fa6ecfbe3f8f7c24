"""Workers that a request lost in a row. Pure.

Two limits end a request that may itself cause the losses. ``max_losses`` counts losses while the
request was in a step: these identify a request that ends its workers. ``max_losses_total`` counts
all losses, because a request can also end a worker outside a step.

A worker that ends in a sequence's first step may not have reported that step. The first loss in a
row is therefore counted as a loss in a step if the worker reported nothing. From then on the worker
must have the report of the first step confirmed before it runs the step (``need_confirmation``),
and a loss without a report is a loss outside a step.
"""

from __future__ import annotations

from router.config import RouterConfig


class Losses:
    """Counts the losses of one request since its last new token.

    ``in_a_row`` are all of them, ``in_step`` those while the request was in a step, both as of the
    last loss: more output tokens than the request had then begin the count anew.
    """

    def __init__(self) -> None:
        self.in_a_row = self.in_step = 0
        self._num_tokens = -1

    def count(self, num_tokens: int, *, was_in_step: bool) -> None:
        """Count one loss of a request that has ``num_tokens`` output tokens by now."""
        if num_tokens > self._num_tokens:
            self.in_a_row = self.in_step = 0
        self._num_tokens = num_tokens
        self.in_a_row += 1
        self.in_step += was_in_step

    def need_confirmation(self, num_tokens: int, config: RouterConfig) -> bool:
        """Return whether the next worker needs a confirmation before the first step."""
        return num_tokens <= self._num_tokens or config.max_losses == 1

    def make_suspect(self, num_tokens: int, config: RouterConfig) -> bool:
        """Return whether one more loss in a step ends the request."""
        has_gone_on = num_tokens > self._num_tokens
        return not has_gone_on and self.in_step > 0 and self.in_step + 1 >= config.max_losses

    def are_too_many(self, config: RouterConfig) -> bool:
        return self.in_step >= config.max_losses or self.in_a_row >= config.max_losses_total
