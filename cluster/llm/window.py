"""Streaming of the output for one prompt, and runs of many prompts with limited concurrency."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from cluster.llm.background import Background
from cluster.llm.completion import Completion
from cluster.llm.worker import Task
from everlift.client.received_output import Chunk


class CompletionStream(Iterator[Chunk]):
    """Iterator over the chunks of one prompt's output, and context manager that closes it.

    ``completion`` is set after the last chunk. The iteration then ends, or raises the error of the
    request if the request failed. The iteration raises ClusterFailed if the engine has ended, and
    Cancelled if the engine was stopped; ``completion`` is then None.
    """

    def __init__(self, task: Task, background: Background) -> None:
        self.request_id = task.request.request_id
        self.completion: Completion | None = None
        self._is_over = False
        self._done: Future[Completion] = Future()
        #: chunks, and after them the completed future ``_done``
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
        """End the iteration, and cancel the request if it has not ended."""
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


Submit = Callable[[Task], Future[Completion]]


def run_in_window(
    tasks: Iterable[Task], submit: Submit, size: int
) -> Iterator[tuple[int, Completion]]:
    """Run the tasks; yield the index and the completion of each task, in the order of their ends.

    ``submit`` starts a task and returns the future of its completion. A task has one or more
    choices (alternative outputs). At most ``size`` choices are unfinished at a time; a task with
    more of them runs alone. If the iteration ends early, all tasks that have started are cancelled.
    Raises ClusterFailed if the engine has ended.
    """
    window = _Window(submit, size)
    try:
        for index, task in enumerate(tasks):
            while not window.can_start(task):
                yield window.next_done()
            window.start(index, task)
        while window:
            yield window.next_done()
    finally:
        window.cancel()


class _Window:
    def __init__(self, submit: Submit, size: int) -> None:
        self._submit = submit
        self._num_free = size
        self._running: dict[int, tuple[Task, Future[Completion]]] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._running)

    def can_start(self, task: Task) -> bool:
        """Return whether ``task`` can begin now.

        A task with more choices than the whole window can begin only when no other task runs.
        """
        return not self._running or task.request.n <= self._num_free

    def start(self, index: int, task: Task) -> None:
        self._num_free -= task.request.n
        self._running[index] = task, self._submit(task)
        self._running[index][1].add_done_callback(lambda _: self._ended.put(index))

    def next_done(self) -> tuple[int, Completion]:
        """Wait for the next task to end; return its index and completion.

        Raises ClusterFailed if the engine has ended.
        """
        index = self._ended.get()
        task, done = self._running.pop(index)
        self._num_free += task.request.n
        return index, done.result()

    def cancel(self) -> None:
        for _, done in self._running.values():
            done.cancel()
