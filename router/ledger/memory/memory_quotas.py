"""Token buckets and concurrency limits of tenants in the memory of one process. Pure.

They behave like the Redis ledger's scripts charge.lua, settle.lua and hold.lua.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everlift.request_id import tenant_of
from router.ledger.quota import (
    CONCURRENT,
    MINUTE_US,
    Charge,
    Settlement,
    cost_us,
    refusal,
)


@dataclass(slots=True)
class _Account:
    #: by the name of a limit: the time in µs at which its bucket is full again
    full_at: dict[str, int] = field(default_factory=dict)
    #: by unfinished request: the time in µs until which it counts, unless it is renewed
    slots: dict[str, int] = field(default_factory=dict)
    charges: dict[str, Charge] = field(default_factory=dict)


class MemoryQuotas:
    """Quotas of all tenants; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def charge(self, charge: Charge, lease_s: float) -> bool:
        now = self._now()
        account = self._accounts.setdefault(tenant_of(charge.request_id), _Account())
        _drop_ended(account, now)
        is_new = charge.request_id not in account.charges
        if is_new:
            _charge_account(account, charge, now)
        account.slots[charge.request_id] = now + round(lease_s * 1e6)
        return is_new

    def settle(self, ends: Sequence[Settlement]) -> None:
        for end in ends:
            account = self._accounts.get(tenant_of(end.request_id), _Account())
            account.slots.pop(end.request_id, None)
            if (charge := account.charges.pop(end.request_id, None)) is not None:
                _refund(account, charge, end.output_tokens)

    def renew_charges(self, request_ids: Sequence[str], lease_s: float) -> None:
        ends = self._now() + round(lease_s * 1e6)
        for request_id in request_ids:
            account = self._accounts.setdefault(tenant_of(request_id), _Account())
            account.slots[request_id] = ends

    def _now(self) -> int:
        return round(self._clock() * 1e6)


def _drop_ended(account: _Account, now: int) -> None:
    for request_id in [it for it, ends in account.slots.items() if ends <= now]:
        del account.slots[request_id]
        account.charges.pop(request_id, None)


def _charge_account(account: _Account, charge: Charge, now: int) -> None:
    if charge.max_concurrent is not None and len(account.slots) >= charge.max_concurrent:
        raise refusal(charge, CONCURRENT, 0)
    amounts = {"requests_per_minute": 1, "tokens_per_minute": charge.tokens}
    full_at, waits = {}, {}
    for limit, amount in amounts.items():
        per_minute = getattr(charge, limit)
        if per_minute is not None:
            filled = max(account.full_at.get(limit, now), now)
            full_at[limit] = filled + cost_us(amount, per_minute)
            waits[limit] = filled + cost_us(min(amount, per_minute), per_minute) - now - MINUTE_US
    limit = max(waits, key=waits.__getitem__, default="")
    if limit and waits[limit] > 0:
        raise refusal(charge, limit, waits[limit])
    account.full_at |= full_at
    account.charges[charge.request_id] = charge


def _refund(account: _Account, charge: Charge, output_tokens: int | None) -> None:
    if output_tokens is None:
        _fill(account, "requests_per_minute", cost_us(1, charge.requests_per_minute))
    used = 0 if output_tokens is None else charge.prompt_tokens + output_tokens
    charged, used_us = (cost_us(it, charge.tokens_per_minute) for it in (charge.tokens, used))
    _fill(account, "tokens_per_minute", charged - used_us)


def _fill(account: _Account, limit: str, us: int) -> None:
    if limit in account.full_at:
        account.full_at[limit] -= us
