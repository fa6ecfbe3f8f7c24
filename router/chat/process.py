"""A renderer's process, as the router sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

from everlift import logs
from everlift.errors import EverliftError, PromptTextTooLong, TemplateFailed, TemplateTimeout
from router.chat import frames
from router.chat.frames import Frame, Launch

log = logs.get_logger(__name__)

#: On a busy machine the same work takes so many times its CPU time.
_PATIENCE = 5
#: It loads transformers: 1 s, and more where it does so for the first time.
_START_S = 120.0
#: UTF-8 of one character, written as JSON.
_MAX_BYTES_PER_CHARACTER = 6
#: Of an answer, beside the text; of an error all.
_MAX_FRAME_HEAD = 4096
#: What a template has no business with stays out of its process.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TZ")
#: It forks: it must find no threads.
_FOR_FORKS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class _Ended(Exception):
    pass


class RendererProcess:
    """Renderer process, started by the first chat. One chat runs at a time."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> None:
        """Start the process unless it runs. Raises EverliftError if that fails."""
        if self._process is None or self._process.poll() is not None:
            await self._start()

    async def render(self, request: bytes) -> str:
        """Render a chat.

        Raises TemplateFailed, TemplateTimeout, PromptTextTooLong; EverliftError if no process can
        be started.
        """
        await self.start()
        try:
            answer = await self._exchange(request, _PATIENCE * self._launch.cpu_s)
        except TimeoutError:
            raise self._too_slow() from None
        except _Ended:
            raise _crashed() from None
        return self._text(answer)

    def end(self) -> None:
        """End the process and wait for it."""
        if self._socket is not None:
            self._socket.close()
        # Else its child, if that is left, ends with the socket.
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._socket = None

    async def _start(self) -> None:
        self.end()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "router.chat.renderer"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
                # Ctrl-C is for the router, and the children are its group.
                start_new_session=True,
            )
        log.info("chat renderer started", child_pid=self._process.pid)
        try:
            await self._exchange(frames.encode(asdict(self._launch)), _START_S)
        except (_Ended, TimeoutError):
            raise EverliftError("no chat can be rendered; see the router's log") from None

    async def _exchange(self, request: bytes, timeout_s: float) -> Frame:
        assert self._socket is not None
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_sendall(self._socket, request)
                head = await self._receive(frames.LENGTH_BYTES)
                return frames.decode(await self._receive(frames.decode_length(head)))
        except (EOFError, OSError, ValueError) as error:
            self.end()
            # It is an OSError.
            raise error if isinstance(error, TimeoutError) else _Ended from None
        except asyncio.CancelledError:
            self.end()
            raise

    async def _receive(self, count: int) -> bytes:
        assert self._socket is not None
        if count > self._max_frame:
            raise EOFError
        loop, received = asyncio.get_running_loop(), bytearray()
        while len(received) < count:
            if not (chunk := await loop.sock_recv(self._socket, count - len(received))):
                raise EOFError
            received += chunk
        return bytes(received)

    @property
    def _max_frame(self) -> int:
        return _MAX_BYTES_PER_CHARACTER * self._launch.max_characters + _MAX_FRAME_HEAD

    def _text(self, answer: Frame) -> str:
        match answer:
            case {"text": str(text)}:
                return text
            case {"error": str(cause)}:
                raise TemplateFailed(cause)
            case {"too_long": int(length)}:
                raise PromptTextTooLong(
                    f"the prompt is too long: the chat becomes {length} characters, which is "
                    "longer than the model's context length "
                    f"({self._launch.max_characters} at most)"
                )
            # It ended over this chat, and another one has taken its place.
            case {"ready": signal.SIGPROF.name}:
                raise self._too_slow()
        raise _crashed()

    def _too_slow(self) -> TemplateTimeout:
        return TemplateTimeout(
            f"the chat template takes more than {self._launch.cpu_s:g} s over these messages"
        )


def _crashed() -> TemplateFailed:
    return TemplateFailed("the chat template ended the process that rendered it")


def _environment() -> dict[str, str]:
    # What this process can import, however it came to that, its child can too.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, **_FOR_FORKS, "PYTHONPATH": path}
