"""Connections to the ledger's servers: one server, the primary that sentinels name, or a cluster.

These classes try a command once; ``shards.py`` retries.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import (
    Connection,
    ConnectionPool,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelManagedConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException

from everlift.reloaded import Reloaded
from router.ledger.config import LedgerConfig
from router.ledger.redis.address import Address, Kind, parse
from router.ledger.redis.channel import (
    Argument,
    Channel,
    SentinelTlsConnection,
    TlsConnection,
    context,
)

#: Size of redis-py's pools, in effect unlimited. Semaphores limit the connections instead, because
#: a pool would count a connection for ever if its return was cancelled.
_ANY_NUMBER = 1 << 31
#: Share of a call's timeout after which the next sentinel is asked.
_SENTINEL_PART = 1 / 8


@dataclass(frozen=True, slots=True)
class Command:
    """Redis command with its arguments; ``key`` selects the server to which it is sent."""

    key: str
    arguments: Sequence[Argument]


class Connections(Protocol):
    async def send(self, commands: Sequence[Command], *, settles: bool = False) -> list[Any]:
        """Send commands and return their answers, in order.

        An error reply is an exception in the list. The commands for one server are sent together,
        over one connection, in their order. ``settles`` must be set if the commands make a server
        wait, for example for a replica as WAIT does; other calls then never wait for this one.
        Raises RedisError or RedisClusterException when a server cannot be reached; the commands may
        then have run or not.
        """
        ...

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands, possibly on a connection that other calls share; return their answers.

        The answers are in the order of the commands; an error reply is an exception in the list.
        The commands must not make the server wait, for example for a replica as WAIT does. Raises
        RedisError or RedisClusterException when a server cannot be reached; the commands may then
        have run or not.
        """
        ...

    async def servers(self, keys: Sequence[str]) -> list[str]:
        """Return one of ``keys`` for each server that is responsible for any of them.

        With sentinels, the call also asks them which server is the primary, and uses the new one
        after a change. Raises RedisError or RedisClusterException when a server cannot be reached.
        """
        ...

    async def rediscover(self) -> None:
        """Find out again which server stores which keys, because a failure suggests a change."""
        ...

    async def close(self) -> None: ...


def connections(config: LedgerConfig) -> Connections:
    """Return the connections for the configured url, without connecting.

    Raises LedgerSetupError if the TLS files are unusable, ValueError for an invalid url.
    """
    address = parse(config.url)
    if address.kind is Kind.CLUSTER:
        return _Cluster(address, config)
    if address.kind is Kind.SENTINEL:
        return _SentinelPrimary(address, config)
    return _OneServer(Redis.from_pool(_pool(address, config)), config)


class _Slots:
    """Limits of concurrent calls, so that connections are limited.

    Calls that wait for a replica have their own limit: while no replica answers, heartbeats would
    otherwise wait for them, and the router would lose its lease.
    """

    def __init__(self, config: LedgerConfig) -> None:
        self._settling = asyncio.Semaphore(config.max_connections)
        self._others = asyncio.Semaphore(config.max_connections)

    def of(self, *, settles: bool) -> asyncio.Semaphore:
        return self._settling if settles else self._others


class _OneServer:
    def __init__(self, client: Redis, config: LedgerConfig) -> None:
        self._client = client
        self._channel = Channel(client.connection_pool.make_connection, _timeout_s(config))
        self._slots = _Slots(config)

    async def send(self, commands: Sequence[Command], *, settles: bool = False) -> list[Any]:
        async with self._slots.of(settles=settles):
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command.arguments)
            return await pipeline.execute(raise_on_error=False)

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        return await self._channel.send([command.arguments for command in commands])

    async def servers(self, keys: Sequence[str]) -> list[str]:
        return list(keys[:1])

    async def rediscover(self) -> None:
        # The host name may belong to another server now. A connection in use ends with its call.
        self._channel.retire()
        await self._client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        await self._channel.close()
        await self._client.aclose()


class _SentinelPrimary(_OneServer):
    """Connections to the primary; each new connection first asks the sentinels for its address.

    After a failover, the old primary may accept writes for up to ten seconds, because it does not
    know yet that it was replaced. These writes are lost. So the sentinels are also asked at every
    heartbeat.
    """

    def __init__(self, address: Address, config: LedgerConfig) -> None:
        self._service = address.service
        self._primary: tuple[str, int] | None = None
        settings = _settings(address, config)
        self._sentinel = Sentinel([])  # type: ignore[no-untyped-call]
        self._sentinel.sentinels = _sentinels(address, settings, config.timeout * _SENTINEL_PART)
        #: each with one of the sentinels; the first one is asked at the next heartbeat
        self._watches = deque(_watch(each) for each in self._sentinel.sentinels)
        kind = SentinelTlsConnection if address.tls else SentinelManagedConnection
        super().__init__(
            self._sentinel.master_for(
                address.service,
                connection_class=kind,
                db=address.db,
                max_connections=_ANY_NUMBER,
                **settings,
            ),
            config,
        )

    async def servers(self, keys: Sequence[str]) -> list[str]:
        # One sentinel is asked per call, because a heartbeat that waits for several silent ones
        # would be longer than the lease.
        before = self._primary
        watch = self._sentinel if before is None else self._watches[0]
        try:
            self._primary = await watch.discover_master(self._service)
        except MasterNotFoundError:
            # The known primary stays in use, and the next call asks another sentinel.
            if watch is self._watches[0]:
                self._watches.rotate(-1)
        if before not in (None, self._primary):
            self._channel.drop()
            await self._client.connection_pool.disconnect()
        return await super().servers(keys)

    async def close(self) -> None:
        await super().close()
        await self._sentinel.aclose()


def _watch(sentinel: Redis) -> Sentinel:
    watch = Sentinel([])  # type: ignore[no-untyped-call]
    watch.sentinels = [sentinel]
    return watch


def _sentinels(address: Address, settings: dict[str, Any], timeout_s: float) -> list[Redis]:
    settings_with_timeout = settings | dict.fromkeys(
        ("socket_timeout", "socket_connect_timeout"), timeout_s
    )
    logins = [settings_with_timeout, settings_with_timeout | {"username": None, "password": None}]
    kind = TlsConnection if address.tls else Connection
    return [
        Redis.from_pool(ConnectionPool(kind, host=host, port=port, **login))
        for login in (logins if address.password else logins[:1])
        for host, port in address.hosts
    ]


class _Cluster:
    """Connections to a cluster, which do not follow redirections.

    A redirected call fails; its retry looks up the servers first. Following ASK in particular would
    be wrong: while a slot moves, a shard's keys are on two nodes, and a script that runs on one of
    them does not see the keys on the other.
    """

    def __init__(self, address: Address, config: LedgerConfig) -> None:
        self._address = address
        self._settings = _settings(address, config)
        self._tls = self._settings.pop("tls", None)
        self._client = self._make_client()
        self._slots = _Slots(config)

    def _make_client(self) -> RedisCluster:
        client = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self._address.hosts],
            # A shard whose slot is covered works even if other slots are not.
            require_full_coverage=False,
            max_connections=_ANY_NUMBER,
            **self._settings,
        )
        if self._tls is not None:
            _use_tls(client, self._tls)
        return client

    async def send(self, commands: Sequence[Command], *, settles: bool = False) -> list[Any]:
        # Each call uses one connection per server.
        async with self._slots.of(settles=settles):
            client = await self._client.initialize()
            pipeline = client.pipeline()
            for command in commands:
                node = client.get_node_from_key(command.key)
                pipeline.execute_command(*command.arguments, target_nodes=node)
            return await pipeline.execute(raise_on_error=False, allow_redirections=False)

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        return await self.send(commands)

    async def servers(self, keys: Sequence[str]) -> list[str]:
        client = await self._client.initialize()
        by_node = {client.get_node_from_key(key): key for key in keys}
        return list(by_node.values())

    async def rediscover(self) -> None:
        client = self._client
        if not client.nodes_manager.slots_cache:
            # The client has not found the cluster yet, so its next call begins with a lookup.
            return
        try:
            await client.nodes_manager.initialize()
        except RedisClusterException:
            # No known node answers. The hosts in the url may have other addresses now.
            if client is self._client:
                self._client = self._make_client()
                await asyncio.shield(_close(client))

    async def close(self) -> None:
        await _close(self._client)


async def _close(client: RedisCluster) -> None:
    await client.aclose()
    # ``aclose`` does nothing for an uninitialised client, which may still have connections.
    for nodes in ("nodes_cache", "startup_nodes"):
        await client.nodes_manager.aclose(nodes)


def _use_tls(client: RedisCluster, tls: Reloaded[ssl.SSLContext]) -> None:
    settings = client.connection_kwargs
    settings.update(connection_class=TlsConnection, tls=tls)
    known = client.nodes_manager.startup_nodes
    for name, node in known.items():
        known[name] = ClusterNode(node.host, node.port, **settings)


def _pool(address: Address, config: LedgerConfig) -> ConnectionPool:
    settings = _settings(address, config)
    if address.path:
        return ConnectionPool(
            UnixDomainSocketConnection, _ANY_NUMBER, path=address.path, **settings
        )
    [(host, port)] = address.hosts
    kind = TlsConnection if address.tls else Connection
    return ConnectionPool(kind, _ANY_NUMBER, host=host, port=port, db=address.db, **settings)


def _settings(address: Address, config: LedgerConfig) -> dict[str, Any]:
    timeout_s = _timeout_s(config)
    return {
        "username": address.username,
        "password": address.password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # Only ``shards.py`` retries, and always whole calls.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        # Sending the driver's name and version would take two more commands and the permission for
        # them.
        "driver_info": None,
        **({"tls": context(config)} if address.tls else {}),
    }


def _timeout_s(config: LedgerConfig) -> float:
    return config.timeout / 2
