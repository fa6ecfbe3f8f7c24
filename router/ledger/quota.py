"""Buckets of tenants' limits. Pure.

Of what a limit allows in a minute, a bucket holds a minute's worth and is filled evenly. It is
kept as one moment: ``due``, when it will be full again. To take something is to move it away, by
the time in which so much is filled in; where it is a minute away nothing is left.

            what is left        what was taken
    |------------------------|------------------|
    now                                         now + 60 s        full: due <= now
                             ^ now + 60 s - (due - now)

A request that takes more than a minute's worth begins when the bucket is full, and what it took is
made up for before the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from everlift.errors import RateLimited
from everlift.request_id import tenant_of

MINUTE_US = 60 * 1_000_000
#: Nobody knows when an unfinished request ends.
_SOME_S = 1.0
CONCURRENT = "max_concurrent"


@dataclass(frozen=True, slots=True)
class Charge:
    """Charge of a request and limits of its tenant; None is no limit.

    ``output_tokens`` counts all choices.
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
    """Settlement of a request that ended, with the tokens of all its choices.

    None: it never began, and takes nothing.
    """

    request_id: str
    output_tokens: int | None


def cost_us(amount: int, per_minute: int | None) -> int:
    """Return the whole µs in which a bucket refills by ``amount``."""
    return amount * MINUTE_US // per_minute if per_minute else 0


def refusal(charge: Charge, limit: str, wait_us: int) -> RateLimited:
    """Return the error for an exceeded limit."""
    of = f"{limit} ({getattr(charge, limit)})"
    wait_s = wait_us / 1e6 or _SOME_S
    return RateLimited(
        f"tenant {tenant_of(charge.request_id)!r} has reached its {of}", retry_after_s=wait_s
    )
