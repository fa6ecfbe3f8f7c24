"""Many tasks, of which the engine has a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue

from cluster.llm.completion import Completion
from cluster.llm.worker import Task

Begin = Callable[[Task], Future[Completion]]


def in_window(tasks: Iterable[Task], begin: Begin, size: int) -> Iterator[tuple[int, Completion]]:
    """Each task's place and completion, in the order in which they end; at most ``size`` choices
    are begun and not ended. What is begun is cancelled when the iteration ends before."""
    window = _Window(begin, size)
    try:
        for index, task in enumerate(tasks):
            while not window.has_room(task):
                yield window.take()
            window.begin(index, task)
        while window:
            yield window.take()
    finally:
        window.cancel()


class _Window:
    def __init__(self, begin: Begin, size: int) -> None:
        self._begin = begin
        self._room = size
        self._begun: dict[int, tuple[Task, Future[Completion]]] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._begun)

    def has_room(self, task: Task) -> bool:
        """One that is larger than the window has it for itself."""
        return not self._begun or task.request.n <= self._room

    def begin(self, index: int, task: Task) -> None:
        self._room -= task.request.n
        self._begun[index] = task, self._begin(task)
        self._begun[index][1].add_done_callback(lambda _: self._ended.put(index))

    def take(self) -> tuple[int, Completion]:
        """Waits for the next one that ends. Raises ClusterFailed."""
        index = self._ended.get()
        task, done = self._begun.pop(index)
        self._room += task.request.n
        return index, done.result()

    def cancel(self) -> None:
        for _, done in self._begun.values():
            done.cancel()
