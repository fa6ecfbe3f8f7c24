"""Output of `everlift up` during a start: a line for each stage, with its duration."""

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
    """Stage of a start. ``result`` is the text of its line when it is over."""

    result: str


def listening(config: Config, addresses: Sequence[str], http_addresses: Sequence[str]) -> str:
    """Say where the routers listen, and where their console is."""
    places = f"at {', '.join(addresses)}"
    served = [address for address in http_addresses if address]
    if config.router.console and served:
        scheme = "https" if config.router.tls is not None else "http"
        places += f"; console {scheme}://{served[0]}/console"
    return places


class Stages:
    """Stages of a start, shown on a console if there is one."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._status: Status | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the current stage on a terminal for as long as this lasts."""
        if self._console is None:
            yield
            return
        with self._console.status("starting") as self._status:
            yield

    @contextmanager
    def stage(self, name: str, doing: str) -> Iterator[Stage]:
        """Show that a stage is ``doing`` something, and its result when it is over.

        A log, which is no terminal, has a line at the beginning too: loading a model may take long.
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
