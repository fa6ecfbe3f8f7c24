"""Virtual time: simulated processes on one clock, each with an event loop of its own.

    now ---> the next callback or timer of any process runs, without waiting ---> now'

A frozen process runs nothing while the clock advances. When it thaws, all that has become due
happens late and at once, as after SIGSTOP and SIGCONT. A killed process runs nothing any more, and
the actions of its tasks during their cancellation have no effect.

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

#: Start of the clock. Monotonic clocks do not start at 0, and code that takes 0 for long ago relies
#: on that.
_BEGINNING = 1_000.0
#: Most callbacks at one time; real code needs far fewer.
_MAX_CALLBACKS = 200_000
#: Most rounds in which the tasks of a killed process are cancelled.
_MAX_ROUNDS = 100


class NothingHappens(Exception):
    """Raised when every process waits, but no callback or timer is left."""


class Endless(Exception):
    """Raised when callbacks schedule callbacks without end, so that time stands still."""


class Clock:
    """Clock with the present time ``now`` in seconds, and its processes."""

    def __init__(self) -> None:
        self.now = _BEGINNING
        self._loops: list[VirtualLoop] = []
        #: uncaught errors of simulated code, with the process's name
        self.uncaught: list[tuple[str, BaseException | str]] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.now - _BEGINNING

    def process(self, name: str) -> VirtualLoop:
        """Start a process."""
        loop = VirtualLoop(name, self)  # type: ignore[abstract]  # it has no sockets
        self._loops.append(loop)
        return loop

    def remove(self, loop: VirtualLoop) -> None:
        self._loops.remove(loop)

    def close(self) -> None:
        """Kill all processes."""
        for loop in self._loops:
            loop.is_dead = True
        for loop in tuple(self._loops):
            loop.kill()

    def run(self, task: asyncio.Future[T], limit: float) -> T:
        """Run until the task is done, and return its result.

        Raises TimeoutError after ``limit`` seconds, NothingHappens and Endless.
        """
        self.run_until(task.done, limit)
        return task.result()

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while (at := self._next()) is not None and at <= end:
            self._advance(at)
        self.now = end

    def run_until(self, condition: Callable[[], bool], limit: float) -> None:
        """Run until ``condition`` holds; raise errors as ``run`` does."""
        end = self.now + limit
        while not condition():
            at = self._next()
            if at is None:
                raise NothingHappens(f"at {self.elapsed:.3f} s")
            if at > end:
                raise TimeoutError(f"not within {limit:g} s of virtual time")
            self._advance(at)

    def _next(self) -> float | None:
        """Return the time of the next callback or timer, or None if there is none."""
        times = [at for loop in self._loops if (at := loop.next_event()) is not None]
        return min(times, default=None)

    def _advance(self, at: float) -> None:
        """Run all that is due at this time, process by process, until nothing is due."""
        now = self.now = max(self.now, at)
        for _ in range(_MAX_CALLBACKS):
            due = [loop for loop in self._loops if loop.is_due(now)]
            if not due:
                return
            for loop in due:
                loop.run_due()
        raise Endless(f"at {self.elapsed:.3f} s")


class VirtualLoop(asyncio.AbstractEventLoop):
    """Event loop of a simulated process, without sockets, signals and threads.

    Functions for a thread run in place.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.frozen_until = 0.0
        self.is_dead = False
        self._clock = clock
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._tickets = count()

    # one of several processes

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
        """Return whether anything is ready to run."""
        is_ripe = self._ready or (self._timers and self._timers[0][0] <= now)
        return bool(is_ripe) and self.frozen_until <= now

    def run_due(self) -> None:
        """Run ready callbacks and due timers, and those that they schedule, until none is left."""
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

    # interface of an event loop

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
        """Schedule a timer; timers of the same time run in the order of scheduling."""
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
