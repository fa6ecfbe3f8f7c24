"""Parser of server-sent events in bytes that arrive in chunks of any size. Pure."""

from __future__ import annotations

from collections.abc import Iterator

#: Data of the event that ends a stream of OpenAI's API.
DONE = b"[DONE]"


class Events:
    """Parser of server-sent events, which returns only their data.

    The data of an event must be on one line, as it is in OpenAI's streams.
    """

    def __init__(self) -> None:
        self._buffer = b""

    def of(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes, and yield the data of each event that they complete."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
