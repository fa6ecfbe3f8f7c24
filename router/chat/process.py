"""Router's side of a renderer process: starts it, and sends chats to it."""

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

#: Limit of a chat's elapsed time, as a multiple of the limit of its CPU time. On a busy machine the
#: elapsed time is longer than the CPU time.
_ELAPSED_FACTOR = 5
#: Seconds for the start of the process. It takes 0.5 s to load modules, and more the first time.
_START_S = 120.0
_MAX_BYTES_PER_CHARACTER = 4
#: Maximum bytes of an answer in addition to its text, and of an error in total.
_MAX_FRAME_HEAD = 4096
#: Variables of the environment that the process receives. All others are withheld from templates.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TZ")
#: The process forks, so these libraries must not start threads in it.
_FOR_FORKS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class _Ended(Exception):
    pass


class RendererProcess:
    """Renderer process that is started when needed, and renders one chat at a time."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._num_chats = 0

    async def start(self) -> None:
        """Start the process unless it runs. Raises EverliftError if it does not become ready."""
        if self._process is None or self._process.poll() is not None:
            await self._start()

    async def render(self, request: bytes) -> str:
        """Return the rendered text of a chat; ``request`` is the chat encoded by ``frames.encode``.

        Raises TemplateFailed if the template rejects the chat or crashes, TemplateTimeout if
        rendering takes too long, and PromptTextTooLong if the text is longer than
        ``Launch.max_characters``. Raises EverliftError if no process can be started.
        """
        answer = await self._answer(request)
        if _is_killed(answer):
            # The child may have been idle, and the answer to this chat would then follow.
            self.end()
            answer = await self._answer(request)
        return self._text(answer)

    async def _answer(self, request: bytes) -> Frame:
        await self.start()
        self._num_chats += 1
        number = self._num_chats.to_bytes(frames.NUMBER_BYTES, "big")
        try:
            return await self._exchange(number, request, _ELAPSED_FACTOR * self._launch.cpu_s)
        except TimeoutError:
            raise self._too_slow() from None
        except _Ended:
            raise _crashed() from None

    def end(self) -> None:
        """Kill the process and wait for its end."""
        if self._socket is not None:
            self._socket.close()
        # If the process has already ended, a child that still runs ends because its socket closes.
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._socket = None

    async def _start(self) -> None:
        self.end()
        self._socket, renderer_socket = socket.socketpair()
        self._socket.setblocking(False)
        with renderer_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "router.chat.renderer"],
                stdin=renderer_socket.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
                # In a session of its own, the process does not receive Ctrl-C, and forms a process
                # group with its children.
                start_new_session=True,
            )
        log.info("chat renderer started", child_pid=self._process.pid)
        try:
            await self._exchange(frames.START, frames.encode(asdict(self._launch)), _START_S)
        except (_Ended, TimeoutError):
            raise EverliftError("the chat renderer did not start; see the router's log") from None

    async def _exchange(self, number: bytes, request: bytes, timeout_s: float) -> Frame:
        """Send a request, and return its answer or the message of a new child."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(self._socket, number)
                await loop.sock_sendall(self._socket, request)
                answered = await self._receive(frames.NUMBER_BYTES)
                head = await self._receive(frames.LENGTH_BYTES)
                answer = frames.decode(await self._receive(frames.decode_length(head)))
                # The answer to another chat must never reach this one's client.
                if answered != number and "ready" not in answer:
                    raise ValueError("the answer has another number than the request")
                return answer
        except (EOFError, OSError, ValueError) as error:
            self.end()
            # TimeoutError is an OSError, but must remain distinguishable.
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
                    f"the prompt is too long: the rendered chat has {length} characters; at most "
                    f"{self._launch.max_characters} fit into the model's context"
                )
            # The child exceeded the CPU time limit with this chat, and a new child has replaced it.
            case {"ready": signal.SIGPROF.name}:
                raise self._too_slow()
        self.end()
        raise _crashed()

    def _too_slow(self) -> TemplateTimeout:
        return TemplateTimeout(f"rendering these messages takes more than {self._launch.cpu_s:g} s")


def _is_killed(answer: Frame) -> bool:
    """Return whether a new child has replaced one that something but its time limit killed."""
    return "ready" in answer and answer["ready"] != signal.SIGPROF.name


def _crashed() -> TemplateFailed:
    return TemplateFailed("the chat template crashed the process that rendered it")


def _environment() -> dict[str, str]:
    # The process must be able to import the same modules as this one.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, **_FOR_FORKS, "PYTHONPATH": path}
