"""Background tasks of a router's requests, which outlive the calls that started them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from everlift import logs
from everlift.errors import EverliftError
from router.requests.request import Elsewhere, LiveRequest

log = logs.get_logger(__name__)

T = TypeVar("T")

#: Seconds that a stopping router waits for the traces of ended requests.
_TRACING_S = 1.0


class TaskGroup:
    """Group of background tasks that are cancelled together when the router stops.

    ``fail`` is called to end a request whose task raised an unexpected exception.
    """

    def __init__(
        self, fail: Callable[[LiveRequest, EverliftError], Coroutine[Any, Any, None]]
    ) -> None:
        self._fail = fail
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tracing: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in a task that outlives the caller, and return the task.

        Its exceptions are logged, except Elsewhere.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def spawn_tracing(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in a task that may still finish during ``cancel_all``."""
        task = self.spawn(work)
        self._tracing.add(task)
        task.add_done_callback(self._tracing.discard)

    def spawn_for(self, live: LiveRequest, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` of one request in a task, and return the task.

        An unexpected exception ends the request with an internal error.
        """
        task = self.spawn(self._guarded(live, work))
        # A task that is cancelled before its first step never starts ``work``, so close it.
        task.add_done_callback(lambda _: work.close())
        return task

    async def _guarded(self, live: LiveRequest, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except (EverliftError, Elsewhere):
            raise
        except Exception:
            await self._fail(live, EverliftError("internal error; see the router's log"))
            raise

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        try:
            task.result()
        except Elsewhere:
            # The caller is redirected; without a caller, the owner continues the request.
            pass
        except EverliftError as error:
            log.info("operation on a request failed", cause=str(error))
        except Exception:
            log.exception("background task of a request failed")

    async def cancel_all(self) -> None:
        """Cancel all tasks and wait until they have ended.

        Before that, wait up to ``_TRACING_S`` seconds for tracing tasks to finish.
        """
        if self._tracing:
            await asyncio.wait(self._tracing, timeout=_TRACING_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
