"""Output of `everlift up` during a start: a line for each stage with its duration."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from cluster.config import Config


@dataclass
class Stage:
    """Stage of a cluster's start. ``result`` is the text that is printed when the stage ends."""

    result: str


def listening(config: Config, addresses: Sequence[str], http_addresses: Sequence[str]) -> str:
    """Return a text with the routers' addresses, and the web console's URL if it is served."""
    places = f"at {', '.join(addresses)}"
    served = [address for address in http_addresses if address]
    if config.router.console and served:
        scheme = "https" if config.router.tls is not None else "http"
        places += f"; console {scheme}://{served[0]}/console"
    return places


class Stages:
    """Display of the stages of a cluster's start on ``console``; None shows nothing."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._status: Status | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context manager: show the name and text of the current stage on the terminal."""
        if self._console is None:
            yield
            return
        with self._console.status("starting") as self._status:
            yield

    @contextmanager
    def stage(self, name: str, doing: str) -> Iterator[Stage]:
        """Context manager: show the text ``doing`` during a stage, and its result at the end.

        The text is shown inside ``shown`` only. The result is printed unless the stage raises an
        error. The caller may set ``result`` of the yielded Stage; it is ``doing`` at first. If the
        console is not a terminal, for example a log, a line is also written at the beginning,
        because loading a model may take long.
        """
        stage, began = Stage(doing), time.monotonic()
        if self._console is None:
            yield stage
            return
        if self._status is not None:
            self._status.update(escape(f"{name}: {doing}"))
        if not self._console.is_terminal:
            self._print(name, f"{doing} ...")
        yield stage
        self._print(name, f"{stage.result} ({time.monotonic() - began:.1f} s)")

    def _print(self, name: str, text: str) -> None:
        assert self._console is not None
        self._console.print(f"  {name:<8} {escape(text)}", soft_wrap=True)
