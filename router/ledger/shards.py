"""Calls of scripts on the ledger's shards: retried, bounded in time, their failures one error."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import AuthenticationError, NoScriptError, RedisError

from everlift.errors import LedgerUnavailable
from router.ledger.config import LedgerConfig
from router.ledger.scripts import Script
from router.ledger.server import SCHEMA

T = TypeVar("T")
Argument = str | int | bytes

#: Waits of up to 10, 20, 40, ... 320 ms between tries: a server that restarts is met again.
_RETRY = Retry(ExponentialWithJitterBackoff(base=0.005, cap=0.32), retries=12)


@dataclass(frozen=True, slots=True)
class Call:
    script: Script
    shard: int
    arguments: Sequence[Argument]


class Shards:
    """One client, with its connections, of one server.

    Every script may run twice, because its answer can be lost: scripts are written for that.
    """

    def __init__(self, config: LedgerConfig) -> None:
        self._timeout_s = config.timeout
        self._roots = [f"{config.key_prefix}:{SCHEMA}:{{{n}}}:" for n in range(config.shards)]
        self._client = Redis.from_pool(_pool(config))

    def __len__(self) -> int:
        return len(self._roots)

    def of(self, request_id: str) -> int:
        return zlib.crc32(request_id.encode()) % len(self._roots)

    def key(self, name: str, shard: int = 0) -> str:
        return self._roots[shard] + name

    async def run(self, script: Script, shard: int, *arguments: Argument) -> Any:
        """What the script answers. Raises LedgerUnavailable."""
        return (await self.run_all([Call(script, shard, arguments)]))[0]

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """What each of the scripts answers, in one round trip. Raises LedgerUnavailable."""
        if not calls:
            return []
        return await self.attempt(calls[0].script.name, lambda: self._send(calls))

    async def attempt(self, name: str, do: Callable[[], Awaitable[T]]) -> T:
        """Does it until it succeeds or the time is up. Raises LedgerUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _RETRY.call_with_retry(do, _on_failure, is_retryable=_may_pass)
        except TimeoutError as error:
            raise LedgerUnavailable(f"{name}: no answer within {self._timeout_s:g} s") from error
        except RedisError as error:
            # Only the kind: a server's words may repeat the arguments.
            raise LedgerUnavailable(f"{name}: {type(_root(error)).__name__}") from error

    async def _send(self, calls: Sequence[Call]) -> list[Any]:
        answers = await self._evaluate(calls)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            await self._load({call.script for call in calls})
            answers = await self._evaluate(calls)
        for answer in answers:
            if isinstance(answer, RedisError):
                raise answer
        return answers

    async def _evaluate(self, calls: Sequence[Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for call in calls:
            pipeline.execute_command(
                "EVALSHA", call.script.sha, 1, self._roots[call.shard], *call.arguments
            )
        return await pipeline.execute(raise_on_error=False)

    async def _load(self, scripts: set[Script]) -> None:
        for script in scripts:
            await self._client.script_load(script.source)

    @property
    def client(self) -> Redis:
        """For the few plain commands; call them inside ``attempt``."""
        return self._client

    async def close(self) -> None:
        await self._client.aclose()


def _pool(config: LedgerConfig) -> BlockingConnectionPool:
    return BlockingConnectionPool.from_url(
        config.url,
        max_connections=config.max_connections,
        timeout=config.timeout,
        # A connection that says nothing is given up in time for a second one.
        socket_timeout=config.timeout / 2,
        socket_connect_timeout=config.timeout / 2,
        # The retries are ours alone, around whole calls.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


def _root(error: BaseException) -> BaseException:
    """What went wrong on the way to a connection comes wrapped."""
    return error.__cause__ if isinstance(error.__cause__, RedisError) else error


def _may_pass(error: Exception) -> bool:
    return not isinstance(_root(error), AuthenticationError)


async def _on_failure(error: Exception) -> None:
    """The next try is all that there is to do."""
