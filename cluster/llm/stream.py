"""One prompt's chunks as they come, for a program without an event loop."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from cluster.llm.background import Background
from cluster.llm.completion import Completion
from cluster.llm.worker import Task
from everlift.client.reception import Chunk


class CompletionStream(Iterator[Chunk]):
    """Iterate it; best inside ``with``, whose end closes it. After the last chunk ``completion`` is
    set, and its error raised if it has one."""

    def __init__(self, task: Task, background: Background) -> None:
        self.request_id = task.request.request_id
        self.completion: Completion | None = None
        self._is_over = False
        self._done: Future[Completion] = Future()
        #: chunks, then the future itself
        self._items: SimpleQueue[Chunk | Future[Completion]] = SimpleQueue()
        self._done.add_done_callback(self._items.put)
        background.submit(task, self._done, self._items.put)

    def __next__(self) -> Chunk:
        if self._is_over:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, Chunk):
            return item
        self._is_over = True
        self.completion = item.result()
        if self.completion.error is not None:
            raise self.completion.error
        raise StopIteration

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self._is_over = True
        self._done.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
