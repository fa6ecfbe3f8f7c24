"""Copy streams that defer their work, and run it in random order except for explicit waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from torch import Tensor

from worker.device.streams import CopyStreams

_NAMES = ("compute", "out", "into")


class Mark:
    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.is_passed = False


class LazyStream:
    """Stream that ignores waits for the streams ``ignored``."""

    def __init__(self, name: str, ignored: frozenset[str]) -> None:
        self._name = name
        self._ignored = ignored
        self.work: deque[Mark | Callable[[], object]] = deque()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.run(lambda: target.copy_(source))

    def run(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def mark(self) -> Mark:
        mark = Mark(self._name)

        def passed() -> None:
            mark.is_passed = True

        self.run(passed)
        return mark

    def wait(self, mark: Mark) -> None:
        if mark.stream not in self._ignored:
            self.work.append(mark)

    @property
    def can_go_on(self) -> bool:
        head = self.work[0] if self.work else None
        return head is not None and (not isinstance(head, Mark) or head.is_passed)

    def go_on(self) -> None:
        head = self.work.popleft()
        if not isinstance(head, Mark):
            head()


class LazyDevice:
    """Three lazy streams.

    For a pair (waiting, awaited) in ``ignored``, the first stream ignores waits for the second.
    """

    def __init__(self, rng: Random, ignored: frozenset[tuple[str, str]] = frozenset()) -> None:
        self._rng = rng
        self.compute, self._out, self._into = (
            LazyStream(name, frozenset(of for who, of in ignored if who == name)) for name in _NAMES
        )

    @property
    def streams(self) -> CopyStreams:
        return CopyStreams(self.compute, self._out, self._into)

    def finish(self) -> None:
        """Run all deferred work in a random order that respects waits.

        The streams have random priorities: the last one mostly runs only when no other can.
        """
        streams = [self.compute, self._out, self._into]
        self._rng.shuffle(streams)
        while any(stream.work for stream in streams):
            ready = [stream for stream in streams if stream.can_go_on]
            assert ready, "each waits for another"
            at = 0 if self._rng.random() < 0.8 else self._rng.randrange(len(ready))
            ready[at].go_on()
