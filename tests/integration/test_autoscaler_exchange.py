"""What the autoscaler hears of the ledger, and says there."""

from __future__ import annotations

import asyncio

from cluster.autoscale.exchange import LedgerExchange
from everlift.v1.session_pb2 import ClusterLoad, Scaling
from router.ledger.config import LedgerConfig
from router.ledger.redis_ledger import connect
from tests.ledgers import PATIENCE_S, valkey_server


async def test_the_autoscaler_hears_the_leader_and_says_what_it_decided() -> None:
    with valkey_server() as url:
        config = LedgerConfig(url=url, durability_class="memory")
        ledger = await connect(config)
        exchange = LedgerExchange(lambda: config)
        try:
            await ledger.lead("router", "address", 1, PATIENCE_S)
            await ledger.put_load(ClusterLoad(term=1, queued=7))
            for workers in (2, 3):
                exchange.say(Scaling(workers=workers, reason="requests wait"))
            async with asyncio.timeout(PATIENCE_S):
                while (heard := exchange.latest()) is None:
                    await asyncio.sleep(0.02)
                while (told := await ledger.scaling()) is None or told.scaling.workers != 3:
                    await asyncio.sleep(0.02)
            assert heard.load.queued == 7
            assert told.scaling == Scaling(workers=3, reason="requests wait")
        finally:
            exchange.stop()
            await asyncio.to_thread(exchange._thread.join)
            await ledger.close()
