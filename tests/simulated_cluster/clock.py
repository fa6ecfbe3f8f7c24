"""Virtual time: simulated processes, each with an event loop of its own, on one clock.

    now ---> the next callback or timer of any process runs; nothing ever waits ---> now'

A process that is frozen runs nothing, while the clock goes on: when it thaws, all that has become
due happens late and at once, as after SIGSTOP and SIGCONT. A process that is killed runs nothing
any more, and nobody hears of what its tasks do as they are taken apart.

The same calls in the same order make the same history.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Monotonic clocks do not begin at 0, and code that takes 0 for long ago relies on that.
_BEGINNING = 1_000.0
#: Callbacks in one moment; real code comes nowhere near.
_MAX_CALLBACKS = 200_000
#: What is left of a process is cancelled so many times at most.
_MAX_ROUNDS = 100


class NothingHappens(Exception):
    """Every process waits for something that no timer and no other process will bring."""


class Endless(Exception):
    """Time stands still: callbacks call callbacks for ever."""


class Clock:
    """``now`` in seconds, and all processes that live by it."""

    def __init__(self) -> None:
        self.now = _BEGINNING
        self._loops: list[VirtualLoop] = []
        #: what simulated code raised and nobody caught, by process
        self.uncaught: list[tuple[str, BaseException | str]] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.now - _BEGINNING

    def process(self, name: str) -> VirtualLoop:
        """A new one, alive."""
        loop = VirtualLoop(name, self)  # type: ignore[abstract]  # it has no sockets
        self._loops.append(loop)
        return loop

    def remove(self, loop: VirtualLoop) -> None:
        self._loops.remove(loop)

    def close(self) -> None:
        """The end of all processes."""
        for loop in self._loops:
            loop.is_dead = True
        for loop in tuple(self._loops):
            loop.kill()

    def run(self, task: asyncio.Future[T], limit: float) -> T:
        """Until the task is done: its result. Raises TimeoutError where it takes longer than
        ``limit`` seconds, NothingHappens, Endless."""
        self.run_until(task.done, limit)
        return task.result()

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while (at := self._next()) is not None and at <= end:
            self._advance(at)
        self.now = end

    def run_until(self, condition: Callable[[], bool], limit: float) -> None:
        """Raises as ``run`` does."""
        end = self.now + limit
        while not condition():
            at = self._next()
            if at is None:
                raise NothingHappens(f"at {self.elapsed:.3f} s")
            if at > end:
                raise TimeoutError(f"not within {limit:g} s of virtual time")
            self._advance(at)

    def _next(self) -> float | None:
        """When something happens next; ``now`` where something is ready."""
        moments = [at for loop in self._loops if (at := loop.next_event()) is not None]
        return min(moments, default=None)

    def _advance(self, at: float) -> None:
        """Run everything that is due at this moment, process by process, until nothing is left."""
        now = self.now = max(self.now, at)
        for _ in range(_MAX_CALLBACKS):
            due = [loop for loop in self._loops if loop.is_due(now)]
            if not due:
                return
            for loop in due:
                loop.run_due()
        raise Endless(f"at {self.elapsed:.3f} s")


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process. It has no sockets, signals or threads; what would go
    to a thread runs in place."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.frozen_until = 0.0
        self.is_dead = False
        self._clock = clock
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._tickets = count()

    # one process among others

    def next_event(self) -> float | None:
        now = self._clock.now
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if self._ready:
            at = now
        elif self._timers:
            at = self._timers[0][0]
        else:
            return None
        return max(at, self.frozen_until)

    def is_due(self, now: float) -> bool:
        """Something is ready to run."""
        is_ripe = self._ready or (self._timers and self._timers[0][0] <= now)
        return bool(is_ripe) and self.frozen_until <= now

    def run_due(self) -> None:
        """Runs what is ready, and what that makes ready, until nothing is."""
        hooks, outer = sys.get_asyncgen_hooks(), events._get_running_loop()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(finalizer=self._finish_generator)
        try:
            for _ in range(_MAX_CALLBACKS):
                if not self._ready and not self._ripen():
                    return
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(outer)
        raise Endless(f"in {self.name} at {self._clock.elapsed:.3f} s")

    def _ripen(self) -> bool:
        """Move due timers to the ready callbacks; return whether any callback is ready."""
        now = self._clock.now
        while self._timers and self._timers[0][0] <= now:
            self._ready.append(heapq.heappop(self._timers)[2])
        return bool(self._ready)

    def _finish_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.call_soon(self.create_task, generator.aclose())

    def freeze(self, seconds: float) -> None:
        self.frozen_until = max(self.frozen_until, self._clock.now + seconds)

    def kill(self) -> None:
        """Cancel all tasks. Callers check ``is_dead``, so that later actions have no effect."""
        self.is_dead, self.frozen_until = True, 0.0
        self._clock.remove(self)
        for _ in range(_MAX_ROUNDS):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self.run_due()
        raise Endless(f"tasks of {self.name} do not end")

    # an event loop

    def time(self) -> float:
        return self._clock.now

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._clock.now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Timers of the same moment run in the order in which they were set."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._tickets), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing, because a cancelled timer is dropped when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_dead:
            cause = context.get("exception") or str(context.get("message"))
            self._clock.uncaught.append((self.name, cause))
