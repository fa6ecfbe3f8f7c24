"""``python -m router.chat.renderer``: renders chats with a model's template, an untrusted program.

    router <--socket (stdin)--> child: renders, one chat at a time
                                  ^ fork
                                this process: has transformers' sandbox loaded, and waits

The sandbox limits what a template can access, and the child's resource limits what it can use. The
kernel kills the child when a chat takes too much CPU time, and on Linux it also limits the child's
memory. The next child is ready 10 ms later, and its first message takes the place of the answer. If
something else killed the child, it may have been idle, so the router replaces this process as well
and sends the chat again, once.
The child ends when the socket is closed, and then this process ends too.

    from the router   a Launch; then {messages, tools, add_generation_prompt,
                      continue_final_message, variables, documents,
                      chat_template: that of the request, or null}
    to the router     {"ready": name of the signal that killed the previous child, or ""} from each
                      new child; then an answer to each chat: a text, {too_long: characters} or
                      {error: cause}
"""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

import jinja2.exceptions

from router.chat import frames
from router.chat.frames import Frame, Launch

#: Maximum characters of an error message for a client.
_MAX_CAUSE = 500


def main() -> None:
    # Loaded before the forks. The packages' own imports, which are not needed here, would take 1 s
    # of the 1.4 s of CPU time, and 18 of 60 MB.
    _skip_package_code("transformers")
    _skip_package_code("transformers.utils")
    import transformers.utils.chat_template_utils  # noqa: F401

    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as sock:
        launch = Launch(**_receive(sock)[1])
        ended_by = ""
        while True:
            if not (pid := os.fork()):
                _child(sock, launch, ended_by)
            status = os.waitpid(pid, 0)[1]
            if not os.WIFSIGNALED(status):
                sys.exit(os.waitstatus_to_exitcode(status))
            ended_by = signal.Signals(os.WTERMSIG(status)).name


def _skip_package_code(name: str) -> None:
    """Make later imports of modules of the package ``name`` skip the package's __init__.py."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations is not None
    package = ModuleType(name)
    package.__spec__ = spec
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package


def _child(sock: socket.socket, launch: Launch, ended_by: str) -> None:
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        _limit_resources(launch.memory_mib)
        sock.sendall(frames.START + frames.encode({"ready": ended_by}))
        while True:
            _serve(sock, launch)
    except (EOFError, ConnectionError):
        os._exit(0)
    finally:
        os._exit(1)


def _serve(sock: socket.socket, launch: Launch) -> None:
    number, request = _receive(sock)
    # If the time runs out, the timer's signal kills this process.
    signal.setitimer(signal.ITIMER_PROF, launch.cpu_s)
    answer = _answer(request, launch)
    signal.setitimer(signal.ITIMER_PROF, 0)
    sock.sendall(number)
    sock.sendall(answer)


def _answer(request: Frame, launch: Launch) -> bytes:
    try:
        text = _rendered(request, launch)
        if len(text) > launch.max_characters:
            return frames.encode({"too_long": len(text)})
        return frames.encode_text(text)
    except jinja2.exceptions.TemplateSyntaxError as error:
        return _refusal(
            f"syntax error in line {error.lineno} of the chat template: {error.message}"
        )
    except jinja2.exceptions.SecurityError as error:
        return _refusal(f"the chat template tried a forbidden operation: {error}")
    except jinja2.exceptions.TemplateError as error:
        return _refusal(str(error))
    except MemoryError:
        return _refusal("the chat template needs too much memory")
    # A template can raise any exception that Python code can raise.
    except Exception as error:
        return _refusal(f"the chat template failed: {type(error).__name__}: {error}")


def _rendered(request: Frame, launch: Launch) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = launch.default if request["tools"] is None else launch.tool_use
    own = request["chat_template"]
    rendered = render_jinja_template(
        conversations=[request["messages"]],
        tools=request["tools"],
        documents=request["documents"],
        chat_template=template if own is None else own,
        add_generation_prompt=request["add_generation_prompt"],
        continue_final_message=request["continue_final_message"],
        **{**launch.special_tokens, **request["variables"]},
    )
    return str(rendered[0][0])


def _refusal(cause: str) -> bytes:
    cause = cause[:_MAX_CAUSE].encode(errors="replace").decode()
    return frames.encode({"error": cause})


def _limit_resources(memory_mib: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if sys.platform != "linux":
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (memory_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _receive(sock: socket.socket) -> tuple[bytes, Frame]:
    """Return the number and the frame of the next message."""
    number = _receive_exactly(sock, frames.NUMBER_BYTES)
    length = frames.decode_length(_receive_exactly(sock, frames.LENGTH_BYTES))
    return number, frames.decode(_receive_exactly(sock, length))


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        if not (chunk := sock.recv(min(count - len(received), 1 << 20))):
            raise EOFError
        received += chunk
    return bytes(received)


if __name__ == "__main__":
    main()
