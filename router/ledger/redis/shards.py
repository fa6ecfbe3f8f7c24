"""Script calls on the ledger's shards, with retries and a timeout.

Every failure is raised as LedgerUnavailable.
"""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import (
    TimeoutError as ServerTimeout,
)

from everlift.errors import LedgerUnavailable
from everlift.request_id import shard_key
from router.event_loop import Expiry
from router.ledger.config import LedgerConfig
from router.ledger.redis.channel import Argument
from router.ledger.redis.connections import Command, connections
from router.ledger.redis.scripts import Script
from router.ledger.redis.server import SCHEMA, Info

T = TypeVar("T")

#: Waits of up to 10, 20, 40, ... 320 ms between tries, so that a restarted server is found soon.
_BACKOFF = ExponentialWithJitterBackoff(base=0.005, cap=0.32)
#: Share of a call's timeout for each of two waits: until a replica has a write, and until the write
#: is on the replica's disk. If one of them takes longer, the call is retried. Both waits must fit
#: into the timeout of a connection.
_SETTLE_PART = 0.2
#: Time to live, in ms, of the key that is written before each wait for a replica.
_SETTLED_KEY_MS = 24 * 3600 * 1000

#: Failures after which the servers are looked up again, because one may be gone or may not be
#: responsible for the keys any more.
_REDISCOVER_ERRORS = (
    ConnectionError,
    ServerTimeout,
    ReadOnlyError,
    AskError,
    ClusterError,
    RedisClusterException,
)
#: First words of error replies that are temporary: busy, disk failure, too few replicas.
_TEMPORARY_WORDS = frozenset({"BUSY", "MISCONF", "NOREPLICAS"})
_KILLED = "Script killed by user"
_FORBIDDEN = "The user executing the script can't run this command"
_FAILURES = (RedisError, RedisClusterException)


class NotReplicated(RedisError):
    """Raised if no replica confirmed a write in time; the call is retried."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a script on one shard, with its arguments.

    ``settles`` marks an important write: one that opens, releases, ends, erases or restores a
    request, ends a choice, or changes API keys or objects. Under durability class ``replicated``,
    such a call succeeds only when a replica has the write.
    """

    script: Script
    shard: int
    arguments: Sequence[Argument]
    settles: bool = False
    #: key that the script gets instead of the shard's root; empty: the root
    key: str = ""
    #: whether the call is hedged, and therefore must not share a connection with other calls:
    #: the further call must not wait for the same dead connection as the first one
    is_hedged: bool = False


def root(key_prefix: str, shard: int) -> str:
    """Return the prefix of all keys of the shard with this number."""
    return f"{key_prefix}:{SCHEMA}:{{{shard}}}:"


class Shards:
    """Shards of the ledger (parts of its keys, each on one server), on which scripts run.

    A call whose answer is lost is retried, so a script may run twice.
    """

    def __init__(self, config: LedgerConfig) -> None:
        self._timeout_s = config.timeout
        self._roots = [root(config.key_prefix, n) for n in range(config.shards)]
        self._connections = connections(config)
        self._is_replicated = config.durability_class == "replicated"
        #: whether all servers support WAITAOF; set by each check of the servers
        self.knows_waitaof = False
        self._disturbed_until = 0.0
        self._disturbance_s = 0.0

    def __len__(self) -> int:
        return len(self._roots)

    def of(self, request_id: str) -> int:
        return zlib.crc32(shard_key(request_id).encode()) % len(self._roots)

    def key(self, name: str, shard: int = 0) -> str:
        return self._roots[shard] + name

    async def run(
        self,
        script: Script,
        shard: int,
        *arguments: Argument,
        settles: bool = False,
        key: str = "",
        is_hedged: bool = False,
    ) -> Any:
        """Run a script on a shard, and return its answer.

        ``settles``, ``key`` and ``is_hedged`` are fields of Call. Raises LedgerUnavailable.
        """
        return (await self.run_all([Call(script, shard, arguments, settles, key, is_hedged)]))[0]

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip, and return their answers in the order of ``calls``.

        Raises LedgerUnavailable if any of them fails.
        """
        if not calls:
            return []
        return await self.attempt(calls[0].script.name, lambda: self._run(calls))

    async def run_with_info(
        self, call: Call, sections: Sequence[str], more: Sequence[Command]
    ) -> tuple[Any, list[Info]]:
        """Run a script; return its answer, and ``sections`` of INFO of each server with a shard.

        The commands ``more`` are run too. Their answers are not returned, and a refusal by a full
        server is ignored. All commands are sent in one round trip, so the script's server does not
        restart between the script's answer and the server's INFO. Raises LedgerUnavailable.
        """
        info = ("INFO", *sections)

        async def run() -> tuple[Any, list[Info]]:
            commands = [Command(key, info) for key in await self._connections.servers(self._roots)]
            answer, *rest = await self._run([call], [*commands, *more])
            return answer, rest[: len(commands)]

        return await self.attempt(call.script.name, run)

    async def run_commands(self, name: str, *commands: Command) -> list[Any]:
        """Run commands and return their answers, in order; ``name`` names the call in errors.

        Raises LedgerUnavailable, also if a server answers a command with an error.
        """
        return await self.attempt(name, lambda: self._answered(commands))

    async def run_on_each_server(self, name: str, *arguments: Argument) -> list[Any]:
        """Run one command on each server that has a shard; return one answer per server.

        The answer is None if the server refused the command. ``name`` names the call in errors.
        Raises LedgerUnavailable.
        """

        async def run() -> list[Any]:
            keys = await self._connections.servers(self._roots)
            answers = await self._connections.send([Command(key, arguments) for key in keys])
            for answer in answers:
                if isinstance(answer, RedisError) and _is_temporary(answer):
                    raise answer
            return [None if isinstance(answer, RedisError) else answer for answer in answers]

        return await self.attempt(name, run)

    async def servers(self) -> list[str]:
        """Return one root (prefix of a shard's keys) per server. Raises LedgerUnavailable."""
        return await self.attempt("servers", lambda: self._connections.servers(self._roots))

    def disturb(self, seconds: float, delay_s: float) -> None:
        """Inject a fault: for ``seconds`` every call takes ``delay_s`` seconds longer.

        With an infinite ``delay_s`` no call is sent before the fault ends. A call that is delayed
        beyond the ledger's timeout fails. If ``seconds`` is 0, the fault in progress ends.
        """
        self._disturbed_until = asyncio.get_running_loop().time() + seconds
        self._disturbance_s = delay_s

    async def attempt(self, name: str, do: Callable[[], Awaitable[T]]) -> T:
        """Call ``do`` until it succeeds, and return its result; ``name`` names the call in errors.

        Raises LedgerUnavailable if ``do`` fails with an error that is not temporary, or if the
        timeout has passed. The cause of the exception is the last failure.
        """
        failure: Exception | None = None
        failures = 0
        try:
            async with asyncio.timeout(None) as limit:
                expiry = Expiry(limit, self._timeout_s)
                try:
                    if self._disturbed_until:
                        await self._disturbance()
                    # asyncio.gather loses the cancellation by the timeout if a node's answer fails
                    # at the same moment, so the loop also checks the timeout itself.
                    while not (limit.expired() or expiry.is_extended):
                        try:
                            if isinstance(failure, _REDISCOVER_ERRORS):
                                await self._connections.rediscover()
                            return await do()
                        except _FAILURES as error:
                            failure = _root(error)
                            if not _is_temporary(failure):
                                raise
                        failures += 1
                        await asyncio.sleep(_BACKOFF.compute(failures))
                    raise TimeoutError
                finally:
                    expiry.cancel()
        except TimeoutError as error:
            cause = "no answer" if failure is None else kind(failure)
            raise LedgerUnavailable(f"{name}: {cause} within {self._timeout_s:g} s") from (
                failure or error
            )
        except _FAILURES as error:
            raise LedgerUnavailable(f"{name}: {kind(_root(error))}") from _root(error)

    async def _disturbance(self) -> None:
        remaining_s = self._disturbed_until - asyncio.get_running_loop().time()
        if remaining_s > 0:
            await asyncio.sleep(min(remaining_s, self._disturbance_s))
        else:
            self._disturbed_until = 0.0

    async def _run(self, calls: Sequence[Call], more: Sequence[Command] = ()) -> list[Any]:
        commands = [self._command(call) for call in calls]
        settling = self._settling(calls)
        per_shard = 4 if self.knows_waitaof else 3
        all_commands = [*commands, *more, *settling]
        # Waits for a replica, and commands that are no scripts, must not delay a shared channel.
        is_alone = bool(settling or more) or any(call.is_hedged for call in calls)

        async def send() -> list[Any]:
            if is_alone:
                return await self._connections.send(all_commands, settles=bool(settling))
            return await self._connections.call(all_commands)

        answers = await send()
        missing = [
            call
            for call, answer in zip(calls, answers, strict=False)
            if isinstance(answer, NoScriptError)
        ]
        if missing:
            await self._load(missing)
            answers = await send()
        num_answers = len(commands) + len(more)
        _raise_first(answers[: len(commands)])
        _raise_first(
            answer
            for answer in answers[len(commands) : num_answers]
            if not isinstance(answer, OutOfMemoryError)
        )
        _check_settled(answers[num_answers:], per_shard)
        return answers[:num_answers]

    def _command(self, call: Call) -> Command:
        key = self._key(call)
        return Command(key, ("EVALSHA", call.script.sha, 1, key, *call.arguments))

    def _key(self, call: Call) -> str:
        return call.key or self._roots[call.shard]

    def _settling(self, calls: Sequence[Call]) -> list[Command]:
        """Return commands that, sent after ``calls``, wait until a replica has their writes.

        The commands also wait for the disks of the primary and a replica if all servers support
        WAITAOF. The list is empty if no call settles, or if the durability class is not
        ``replicated``. WAIT and WAITAOF wait only for the last write of their connection, but a
        retried call may write nothing. Therefore the commands first write a key that has no other
        use. PEXPIRE is the last of these writes, because this command is always replicated, and a
        full server accepts it. WAIT precedes WAITAOF, because WAITAOF alone would take a second:
        the replica would first report the state of its disk from before it received the write.
        """
        if not self._is_replicated:
            return []
        wait_ms = max(1, round(self._timeout_s * _SETTLE_PART * 1000))
        waits: list[tuple[Argument, ...]] = [("WAIT", 1, wait_ms)]
        if self.knows_waitaof:
            waits.append(("WAITAOF", 1, 1, wait_ms))
        commands = []
        for shard in {call.shard for call in calls if call.settles}:
            key = self.key("settled", shard)
            writes = ("SET", key, "", "NX"), ("PEXPIRE", key, _SETTLED_KEY_MS)
            commands += [Command(key, arguments) for arguments in (*writes, *waits)]
        return commands

    async def _load(self, calls: Sequence[Call]) -> None:
        sources = {(self._key(call), call.script.source) for call in calls}
        loading = [Command(key, ("SCRIPT LOAD", source)) for key, source in sources]
        await self._answered(loading)

    async def _answered(self, commands: Sequence[Command]) -> list[Any]:
        answers = await self._connections.send(commands)
        _raise_first(answers)
        return answers

    async def close(self) -> None:
        await self._connections.close()


def kind(error: BaseException) -> str:
    """Return a short name for a failure, to be shown to users.

    Only the first word of a server's message is used, because the rest may contain arguments.
    """
    if isinstance(error, NotReplicated):
        return "not replicated"
    words = str(error)
    if _FORBIDDEN in words:
        return NoPermissionError.__name__
    word = words.partition(" ")[0]
    if type(error) is ResponseError and word.isalpha() and word.isupper():
        return word
    return type(error).__name__


def _raise_first(answers: Iterable[Any]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer


def _check_settled(answers: Sequence[Any], per_shard: int) -> None:
    for start in range(0, len(answers), per_shard):
        # SET may fail, because a full server refuses to create the key but accepts PEXPIRE on it.
        _, written, replicas, *on_disks = answers[start : start + per_shard]
        _raise_first([written, replicas, *on_disks])
        if not written or min([replicas, *chain(*on_disks)]) < 1:
            raise NotReplicated


def _root(error: BaseException) -> Exception:
    assert isinstance(error, Exception)
    inner = error.__cause__ or error.__context__
    if isinstance(error, RedisClusterException | ConnectionError) and isinstance(inner, _FAILURES):
        return _root(inner)
    return error


def _is_temporary(error: Exception) -> bool:
    if isinstance(error, AuthenticationError | AuthorizationError):
        return False
    if isinstance(error.__cause__ or error.__context__, ssl.SSLCertVerificationError):
        return False
    if isinstance(error, (*_REDISCOVER_ERRORS, TryAgainError, NoScriptError, NotReplicated)):
        return True
    words = str(error)
    return words.partition(" ")[0] in _TEMPORARY_WORDS or _KILLED in words
