"""Token buckets for the limits of tenants. Pure.

A bucket holds as much as its limit allows in one minute, and refills at a constant rate. It is
stored as a single time, ``due``, at which it will be full again. Taking an amount increases ``due``
by the time in which that amount refills. If ``due`` is one minute ahead, the bucket is empty.

            available           taken
    |------------------------|------------------|
    now                                         now + 60 s        full: due <= now
                             ^ now + 60 s - (due - now)

A request that takes more than a full bucket holds is accepted when the bucket is full. The excess
must refill before the next request can be accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from everlift.errors import RateLimited
from everlift.request_id import tenant_of

MINUTE_US = 60 * 1_000_000
#: Suggested seconds before a retry at the limit of concurrent requests, whose ends are unknown.
_SOME_S = 1.0
CONCURRENT = "max_concurrent"


@dataclass(frozen=True, slots=True)
class Charge:
    """Amounts to take from a tenant's limits for a new request, and these limits.

    The amounts are the largest that the request may use; ``output_tokens`` is the sum over all
    choices. None means no limit.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Settlement:
    """Actual use of a request that has ended; amounts that it did not use are refunded.

    ``output_tokens`` is the number of generated tokens, over all choices. None means that the
    request never began: all that was taken for it is refunded.
    """

    request_id: str
    output_tokens: int | None


def cost_us(amount: int, per_minute: int | None) -> int:
    """Return the time in µs in which a bucket refills by ``amount``; 0 if there is no limit.

    ``per_minute`` is the limit: the amount that refills in a minute. The time is rounded down.
    """
    return amount * MINUTE_US // per_minute if per_minute else 0


def refusal(charge: Charge, limit: str, wait_us: int) -> RateLimited:
    """Return the error for a request that exceeds ``limit``, the name of a field of Charge.

    ``wait_us`` is the time in µs until a retry can succeed. 0 means unknown: the error then
    suggests a retry after a second.
    """
    reached = f"{limit} ({getattr(charge, limit)})"
    wait_s = wait_us / 1e6 or _SOME_S
    return RateLimited(
        f"tenant {tenant_of(charge.request_id)!r} has reached its {reached}", retry_after_s=wait_s
    )
