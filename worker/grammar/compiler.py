"""Compilation of grammars for the sequences of one worker, with a cache of compiled grammars.

The compiler runs in the event loop's thread and never blocks it.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol
from weakref import WeakValueDictionary

from everlift import logs
from everlift.errors import EngineFailed, EverliftError, InvalidGrammar, QueueFull
from everlift.sampling import MAX_GRAMMAR_BYTES, Grammar
from worker.config import Grammars
from worker.grammar.backlog import Backlog
from worker.grammar.channel import Channel
from worker.grammar.matcher import CompiledGrammar
from worker.grammar.messages import (
    CHUNK,
    CompileResult,
    Frames,
    Reply,
    decode_reply,
    encode_request,
)

log = logs.get_logger(__name__)

Done = Callable[[CompiledGrammar | EverliftError], None]

#: Estimated memory of a grammar process without its grammar.
_PROCESS_BYTES = 6 << 20
#: Timeout of a compilation in multiples of its maximum CPU time, because processors may be shared.
_TIMEOUT_FACTOR = 6
#: Timeout of a mask in multiples of its maximum CPU time, because the process may have to wait for
#: a core.
_MASK_TIMEOUT_FACTOR = 50
#: Largest timeout of a mask, as a fraction of the time after which a step counts as stuck.
_STEP_PART = 0.5


class GrammarProcesses(Protocol):
    """Source of grammar processes, implemented by GrammarForkServer."""

    async def start_process(self) -> socket.socket:
        """Start a grammar process and return this end of its socket, which is non-blocking."""
        ...

    def close(self) -> None: ...


class GrammarCompiler:
    """Compiler and cache of grammars.

    Its methods must be called in the event loop's thread, which also calls the ``done`` callbacks.
    """

    def __init__(
        self, settings: Grammars, processes: GrammarProcesses, step_timeout: float
    ) -> None:
        """Create the compiler, which obtains a process for each grammar from ``processes``.

        ``step_timeout`` is the time in seconds after which a step counts as stuck; a wait for a
        mask may take at most half of it.
        """
        self._settings = settings
        masks_s = _MASK_TIMEOUT_FACTOR * settings.step_budget
        self._mask_timeout_s = min(masks_s, _STEP_PART * step_timeout)
        self._processes = processes
        self._backlog = Backlog()
        self._callbacks: dict[Grammar, list[Done]] = {}
        self._waiting: deque[Grammar] = deque()
        self._compiling: dict[Grammar, asyncio.Task[None]] = {}
        #: cached results, the most recently used last
        self._cache: OrderedDict[Grammar, CompiledGrammar | InvalidGrammar] = OrderedDict()
        #: compiled grammars that the cache or a sequence references
        self._alive: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()

    def compile(self, grammar: Grammar, done: Done) -> None:
        """Compile ``grammar``, and call ``done`` with the compiled grammar or with an error.

        The error is InvalidGrammar, QueueFull if too many other grammars are queued, or
        EngineFailed if no grammar process could be started or the compiler failed. Three results
        are passed to ``done`` before this method returns: QueueFull, a cached InvalidGrammar, and a
        reusable compiled grammar. A compiled grammar is reusable while its process is alive and the
        cache or a sequence refers to it.
        """
        if (known := self._known(grammar)) is not None:
            self._cache_result(grammar, known)
            done(known)
        elif grammar in self._callbacks:
            self._callbacks[grammar].append(done)
        elif len(self._waiting) >= self._settings.max_queued:
            done(QueueFull("too many grammars are being compiled"))
        else:
            self._callbacks[grammar] = [done]
            self._waiting.append(grammar)
            self._start_compilations()

    def close(self) -> None:
        """End every grammar process. Callbacks of unfinished compilations are not called."""
        for task in self._compiling.values():
            task.cancel()
        for grammar in tuple(self._alive.values()):
            grammar.fail_sequences()
        self._waiting.clear()
        self._cache.clear()
        self._processes.close()

    def _known(self, grammar: Grammar) -> CompiledGrammar | InvalidGrammar | None:
        known = self._cache.get(grammar) or self._alive.get(grammar)
        return None if isinstance(known, CompiledGrammar) and known.is_lost else known

    def _start_compilations(self) -> None:
        while self._waiting and len(self._compiling) < self._settings.max_compiling:
            grammar = self._waiting.popleft()
            self._compiling[grammar] = asyncio.create_task(self._finish(grammar))

    async def _finish(self, grammar: Grammar) -> None:
        result = await self._result(grammar)
        if isinstance(result, CompiledGrammar):
            self._alive[grammar] = result
            self._cache_result(grammar, result)
        del self._compiling[grammar]
        self._start_compilations()
        for done in self._callbacks.pop(grammar):
            done(result)

    async def _result(self, grammar: Grammar) -> CompiledGrammar | EverliftError:
        try:
            return await self._compiled(grammar)
        except EverliftError as error:
            return error
        except Exception:
            log.exception("grammar compiler failed")
            return EngineFailed("the grammar compiler failed")

    async def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        sock = await self._processes.start_process()
        try:
            compiled = CompileResult.decode(await self._reply(sock, grammar))
        except BaseException:
            sock.close()
            raise
        budget_s, timeout_s = self._settings.step_budget, self._mask_timeout_s
        channel = Channel(sock, budget_s, timeout_s, self._backlog)
        return CompiledGrammar(channel, compiled.eos_token_ids, compiled.num_bytes)

    async def _reply(self, sock: socket.socket, grammar: Grammar) -> bytes:
        """Send ``grammar`` to a new grammar process over ``sock``; return the body of its reply.

        Raises EngineFailed if the process did not start, and InvalidGrammar if it refuses the
        grammar, ends or does not reply in time. A refusal is cached, because a second compilation
        would be refused as well. The end of a process is not cached, because its cause is unknown
        and may not be the grammar.
        """
        loop, replies = asyncio.get_running_loop(), _Replies(sock)
        try:
            await replies.next()
        except (EOFError, OSError):
            raise EngineFailed("no grammar can be compiled; see the worker's log") from None
        request = {"do": "compile", "kind": grammar.kind.value, "texts": grammar.texts}
        # If the process has ended meanwhile, waiting for the reply below raises the error.
        with suppress(ConnectionError):
            await loop.sock_sendall(sock, encode_request(request))
        try:
            async with asyncio.timeout(_TIMEOUT_FACTOR * self._settings.compile_timeout):
                reply = await replies.next()
        except (EOFError, OSError, TimeoutError):
            raise InvalidGrammar(
                f"the grammar takes more than {self._settings.compile_timeout:g} s to compile, or "
                f"more than {self._settings.process_mib} MiB"
            ) from None
        if reply.is_refusal:
            refusal = InvalidGrammar(reply.body.decode())
            self._cache_result(grammar, refusal)
            raise refusal
        return reply.body

    def _cache_result(self, grammar: Grammar, result: CompiledGrammar | InvalidGrammar) -> None:
        self._cache[grammar] = result
        self._cache.move_to_end(grammar)
        while sum(map(_cost, self._cache.values())) > self._settings.cache_mib << 20:
            self._cache.popitem(last=False)


class _Replies:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = Frames()
        self._unread: deque[bytes] = deque()

    async def next(self) -> Reply:
        loop = asyncio.get_running_loop()
        while not self._unread:
            self._unread.extend(self._frames.feed(await loop.sock_recv(self._sock, CHUNK)))
        return decode_reply(self._unread.popleft())


def _cost(cached: CompiledGrammar | InvalidGrammar) -> int:
    if isinstance(cached, CompiledGrammar):
        return _PROCESS_BYTES + cached.num_bytes
    return MAX_GRAMMAR_BYTES
