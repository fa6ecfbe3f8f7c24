"""``python -m worker.grammar.nursery_process``: the process that forks a keeper for each grammar.

It loads, once, what every keeper needs: llguidance and the model's vocabulary. Its argument is a
Launch in JSON. Its control socket carries the sockets that the keepers are to serve; the process
ends with it. A keeper that has compiled its grammar outlives the process, and ends with its own
socket.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path

from everlift import model_files
from everlift.end_tokens import end_token_ids
from worker.grammar.keeper import COMPILE_STACK_BYTES, Keeper, Model
from worker.grammar.launch import Launch
from worker.grammar.token_trie import token_trie
from worker.grammar.vocabulary import token_bytes
from worker.process.child_process import go_first
from worker.process.parent import die_with_parent


def main() -> None:
    launch = Launch.decode(sys.argv[1])
    with socket.socket(fileno=launch.control) as control:
        # Nobody waits for a keeper.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        model = _load(launch)
        gc.freeze()
        nursery = os.getpid()
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            if not os.fork():
                die_with_parent(nursery)
                control.close()
                _keep(socket.socket(fileno=descriptors[0]), model, launch)
            os.close(descriptors[0])


def _load(launch: Launch) -> Model:
    directory = model_files.locate(launch.model, launch.revision, weights=False)
    tokens = token_bytes(directory / "tokenizer.json", launch.vocab_size)
    return Model(token_trie(tokens), launch.vocab_size, end_token_ids(directory))


def _keep(sock: socket.socket, model: Model, launch: Launch) -> None:
    """The whole life of the child process."""
    try:
        _bound_memory(launch.process_mib)
        Keeper(sock, model, launch.budget).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _bound_memory(mib: int) -> None:
    """Limit the process to ``mib`` more than the nursery has, beside the compiler's stack, and let
    the kernel end it first when memory runs out. Has an effect on Linux only."""
    if sys.platform != "linux":
        return
    go_first()
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limit = used + (mib << 20) + COMPILE_STACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
