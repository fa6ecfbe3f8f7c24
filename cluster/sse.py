"""Server-sent events out of bytes that come in any pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"


class Events:
    """Parser of server-sent events: the data only, which OpenAI's streams send on one line."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, data: bytes) -> Iterator[bytes]:
        """Yield the events that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
