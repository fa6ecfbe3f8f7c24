"""Accounting of this router's requests against the limits of their tenants.

    submitted -> charged -> renewed by the router that owns the request -> settled at its end

A charge is an entry in the ledger that counts a request against the limits. It states the largest
number of tokens that the request may use: its prompt, and max_tokens for each choice. The
settlement of the charge, when the request has ended, refunds the tokens that were not used. A
charge expires unless the router that owns the request renews it. A request whose charge has
expired no longer counts as concurrent, but none of its tokens are refunded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from everlift.errors import LedgerUnavailable
from everlift.messages import Request
from everlift.request_id import tenant_of
from router.auth.limits import NO_LIMITS, Limits
from router.ledger.base import Ledger
from router.ledger.quota import Charge, Settlement

#: Lease of a charge in seconds. It is longer than the time until another router takes over the
#: request, or until the router has restarted.
_LEASE_S = 30.0
#: Seconds between two renewals.
_RENEW_INTERVAL_S = _LEASE_S / 3
#: Seconds before a call to an unavailable ledger is repeated.
_RETRY_S = 0.1


def unlimited(tenant: str) -> Limits:
    return NO_LIMITS


class Quotas:
    def __init__(self, ledger: Ledger, limits_of: Callable[[str], Limits] = unlimited) -> None:
        self._ledger = ledger
        self._limits_of = limits_of
        #: requests that this router owns, and that were charged here or before a takeover
        self._owned: set[str] = set()
        #: settlements that were not sent to the ledger yet
        self._ended: dict[str, Settlement] = {}
        self._has_ended = asyncio.Event()
        self._flush_lock = asyncio.Lock()

    async def charge(self, request: Request) -> bool:
        """Charge a request before it is stored in the ledger; return whether it was charged now.

        Returns False if no limit applies to the sum of the tenant's requests, or if the request was
        charged before. If True is returned and the request then cannot be stored, the caller must
        refund the charge. Raises RateLimited if a limit is exceeded, LedgerFull, and
        LedgerUnavailable.
        """
        limits = self._limits_of(tenant_of(request.request_id))
        if not limits.is_metered:
            return False
        # Requests that have ended are settled first, so that a client that has seen a request end
        # can already use the limit again.
        await self.flush()
        charge = Charge(
            request.request_id,
            len(request.prompt_ids),
            request.n * request.max_tokens,
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.max_concurrent,
        )
        return await self._ledger.charge(charge, _LEASE_S)

    def start_renewal(self, request_id: str) -> None:
        """Renew the charge of a request from now on, because this router owns it."""
        if self._is_metered(request_id):
            self._owned.add(request_id)

    def stop_renewal(self, request_id: str) -> None:
        """Stop renewing the charge of a request, because this router no longer owns it."""
        self._owned.discard(request_id)

    def settle(self, request_id: str, output_tokens: int | None) -> None:
        """Queue the final accounting (settlement) of a request that has ended.

        ``output_tokens`` is the number of output tokens of all its choices. None means that the
        request never began; the whole charge is then refunded. Of several calls for a request, the
        first one counts.
        """
        self.stop_renewal(request_id)
        if self._is_metered(request_id):
            self._ended.setdefault(request_id, Settlement(request_id, output_tokens))
            self._has_ended.set()

    def _is_metered(self, request_id: str) -> bool:
        return self._limits_of(tenant_of(request_id)).is_metered

    async def run(self) -> None:
        """Settle ended requests and renew the charges of unfinished ones, until cancelled.

        If the ledger is unavailable, these operations are retried.
        """
        loop = asyncio.get_running_loop()
        due = loop.time() + _RENEW_INTERVAL_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._has_ended.wait()
            try:
                await self.flush()
                if loop.time() >= due:
                    await self._renew_all()
                    due = loop.time() + _RENEW_INTERVAL_S
            except LedgerUnavailable:
                await asyncio.sleep(_RETRY_S)

    async def flush(self) -> None:
        """Send the queued settlements of ended requests to the ledger.

        Raises LedgerUnavailable; the settlements then stay queued.
        """
        async with self._flush_lock:
            self._has_ended.clear()
            if ended := list(self._ended.values()):
                try:
                    await self._ledger.settle_charges(ended)
                except BaseException:
                    self._has_ended.set()
                    raise
                for each in ended:
                    if self._ended.get(each.request_id) is each:
                        del self._ended[each.request_id]

    async def _renew_all(self) -> None:
        async with self._flush_lock:
            if owned := list(self._owned):
                await self._ledger.renew_charges(owned, _LEASE_S)
