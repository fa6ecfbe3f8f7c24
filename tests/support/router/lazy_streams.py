"""Streams whose work is put off: in which order they get to it nobody can rely on, but for what
they were told to wait for."""

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
    """Stream that ignores waits for the streams ``deaf_to``."""

    def __init__(self, name: str, deaf_to: frozenset[str]) -> None:
        self._name = name
        self._deaf_to = deaf_to
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
        if mark.stream not in self._deaf_to:
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
    """Three streams. Of a pair (waiting, awaited) in ``deaf`` the first does not wait for the
    second."""

    def __init__(self, rng: Random, deaf: frozenset[tuple[str, str]] = frozenset()) -> None:
        self._rng = rng
        self.compute, self._out, self._into = (
            LazyStream(name, frozenset(of for who, of in deaf if who == name)) for name in _NAMES
        )

    @property
    def streams(self) -> CopyStreams:
        return CopyStreams(self.compute, self._out, self._into)

    def finish(self) -> None:
        """Does all that was put off. One of the streams is slow: it goes on where no other can, or
        else now and then."""
        streams = [self.compute, self._out, self._into]
        self._rng.shuffle(streams)
        while any(stream.work for stream in streams):
            ready = [stream for stream in streams if stream.can_go_on]
            assert ready, "each waits for another"
            at = 0 if self._rng.random() < 0.8 else self._rng.randrange(len(ready))
            ready[at].go_on()
