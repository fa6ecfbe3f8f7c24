"""Counters of requests: this router's, from its metrics, and those of the other routers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Protocol

import grpc
from prometheus_client.samples import Sample

from everlift import logs
from everlift.transport import Transport
from everlift.v1 import session_pb2, session_pb2_grpc
from router.console.prompts import Prompts
from router.ledger.base import Ledger
from router.observability.metrics.catalogue import CATALOGUE, OK

_REQUESTS = "everlift_requests_total"
_TENANT_PROMPT_TOKENS = "everlift_tenant_prompt_tokens_total"
_TENANT_HIT_TOKENS = "everlift_tenant_prefix_hit_tokens_total"


class Instruments(Protocol):
    def samples(self, name: str) -> Iterable[Sample]: ...


class MeasuredRequests:
    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments

    def bounds(self, name: str) -> Sequence[float]:
        return (*CATALOGUE[name].buckets, inf)

    def cumulative(self, name: str) -> Sequence[int]:
        counts: Counter[float] = Counter()
        for sample in self._instruments.samples(name):
            if sample.name.endswith("_bucket"):
                counts[float(sample.labels["le"])] += int(sample.value)
        return [counts[bound] for bound in self.bounds(name)]

    def failures(self) -> Mapping[str, int]:
        failures: Counter[str] = Counter()
        for sample in self._instruments.samples(_REQUESTS):
            if sample.name == _REQUESTS and (outcome := sample.labels["outcome"]) != OK:
                failures[outcome] += int(sample.value)
        return failures

    def tenant_prompts(self) -> Mapping[str, Prompts]:
        cached = self._by_tenant(_TENANT_HIT_TOKENS)
        return {
            tenant: Prompts(tokens, cached[tenant])
            for tenant, tokens in self._by_tenant(_TENANT_PROMPT_TOKENS).items()
        }

    def _by_tenant(self, name: str) -> Mapping[str, int]:
        return {
            sample.labels["tenant"]: int(sample.value)
            for sample in self._instruments.samples(name)
            if sample.name == name
        }


log = logs.get_logger(__name__)

#: Maximum number of other routers that are queried.
_MAX_PEERS = 64
_TIMEOUT_S = 1.0


class Peers:
    """Client that reads the other routers' counters.

    The client keeps a channel open to each router that answers.
    """

    def __init__(self, router_id: str, ledger: Ledger, transport: Transport) -> None:
        self._router_id = router_id
        self._ledger = ledger
        self._transport = transport
        #: channels by the router's address
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def counts(self) -> tuple[list[session_pb2.Counts], int]:
        """Return the counters of the other routers, and the number of routers without an answer.

        The other routers are those that the ledger lists. A router is without an answer if it does
        not answer in time, or if it is not queried because there are too many. Each address is
        queried once, because a router that restarted at the same address is listed twice for a
        while. Raises LedgerUnavailable.
        """
        gateways = await self._ledger.gateways()
        others = sorted({*gateways.values()} - {gateways.get(self._router_id)})
        queried = others[:_MAX_PEERS]
        await self._close_others(queried)
        answers = await asyncio.gather(*map(self._read_counts, queried))
        received = [counts for counts in answers if counts is not None]
        return received, len(others) - len(received)

    async def close(self) -> None:
        await self._close_others(())

    async def _close_others(self, addresses: Collection[str]) -> None:
        for address in self._channels.keys() - set(addresses):
            await self._channels.pop(address).close()

    async def _read_counts(self, address: str) -> session_pb2.Counts | None:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._transport.channel(address)
        stub: session_pb2_grpc.RouterInternalAsyncStub
        stub = session_pb2_grpc.RouterInternalStub(channel)
        try:
            return await stub.Count(session_pb2.CountRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.debug("router counters not received", address=address, code=error.code().name)
            # The next query opens a new channel, which uses the certificate that is then valid.
            self._channels.pop(address, None)
            await channel.close()
            return None
