"""Checks of the ledger: whether it is reachable, its durability, its latency and its clock."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from statistics import median

from cluster.config import Config
from cluster.doctor.finding import Finding, broken, doubtful, fine
from everlift.errors import LedgerUnavailable
from router.ledger.config import EMBEDDED, PROMISES, URL_VARIABLE, LedgerSetupError
from router.ledger.embedded.embedded import find_binary, running_url
from router.ledger.redis.redis_ledger import RedisLedger, connect

_NUM_PROBES = 21
#: Median latency of a call above which there is a warning, in seconds. Each step of a stream waits
#: for one call, so users notice a longer latency.
_SLOW_S = 0.005
#: Clock difference above which there is a warning, in seconds. Deadlines and leases use the
#: ledger's clock; logs and traces use the machine's.
_SKEW_S = 0.5


async def examine(config: Config) -> AsyncIterator[Finding]:
    url = config.ledger.url
    if url == EMBEDDED:
        found = running_url(config.state_dir)
        if found is None:
            yield _binary()
            return
        url = found
    try:
        ledger = await connect(replace(config.ledger, url=url))
    except LedgerSetupError as error:
        yield broken(
            "ledger", str(error), "change the server's configuration, or the settings ledger.*"
        )
    except LedgerUnavailable as error:
        if config.ledger.url == EMBEDDED:
            yield fine("ledger", "embedded; its server starts with a cluster")
        else:
            yield broken("ledger", str(error), f"check its URL ({URL_VARIABLE}) and the network")
    else:
        try:
            async for finding in _server_findings(ledger):
                yield finding
        finally:
            await ledger.close()


def _binary() -> Finding:
    try:
        find_binary()
    except LedgerSetupError as error:
        return broken("ledger", str(error), "set ledger.url to a Redis or Valkey server")
    return fine("ledger", "embedded; it starts with the cluster")


async def _server_findings(ledger: RedisLedger) -> AsyncIterator[Finding]:
    promise = PROMISES[ledger.durability_class]
    yield fine("ledger", f"{ledger.server}, {ledger.durability_class}: {promise}")
    waits, skews = [], []
    for _ in range(_NUM_PROBES):
        started_at, sent_at = time.perf_counter(), time.time()
        its_time = await ledger.time()
        waits.append(time.perf_counter() - started_at)
        skews.append(its_time - (sent_at + waits[-1] / 2))
    yield _latency(median(waits))
    yield _skew(median(skews))


def _latency(wait_s: float) -> Finding:
    says = f"{wait_s * 1000:.1f} ms per call"
    if wait_s > _SLOW_S:
        return doubtful("latency", says, "move the ledger's server nearer to the routers")
    return fine("latency", says)


def _skew(skew_s: float) -> Finding:
    says = f"the ledger's clock is {abs(skew_s):.3f} s {'ahead' if skew_s > 0 else 'behind'}"
    if abs(skew_s) > _SKEW_S:
        return doubtful("clock", says, "synchronise the clocks (chrony, systemd-timesyncd)")
    return fine("clock", says)
