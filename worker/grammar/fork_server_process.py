"""Process that forks a process for each grammar: ``python -m worker.grammar.fork_server_process``.

The fork server loads llguidance and the model's vocabulary once for all grammar processes. Its
argument is a Launch in JSON. Over its control socket it receives, for each grammar, the socket that
a new grammar process serves. The fork server ends when the control socket closes. A grammar process
that has compiled its grammar outlives the fork server, and ends when its own socket closes.
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
from worker.child_process import become_oom_victim, die_with_parent
from worker.grammar.grammar_process import COMPILE_STACK_BYTES, GrammarProcess, Model
from worker.grammar.launch import Launch
from worker.grammar.vocabulary import token_bytes, token_trie


def main() -> None:
    launch = Launch.decode(sys.argv[1])
    with socket.socket(fileno=launch.control) as control:
        # No process waits for the grammar processes; ignoring the signal prevents zombies.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        model = _load(launch)
        gc.freeze()
        fork_server = os.getpid()
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            if not os.fork():
                die_with_parent(fork_server)
                control.close()
                _run_grammar_process(socket.socket(fileno=descriptors[0]), model, launch)
            os.close(descriptors[0])


def _load(launch: Launch) -> Model:
    directory = model_files.locate(launch.model, launch.revision, weights=False)
    tokens = token_bytes(directory / "tokenizer.json", launch.vocab_size)
    return Model(token_trie(tokens), launch.vocab_size, end_token_ids(directory))


def _run_grammar_process(sock: socket.socket, model: Model, launch: Launch) -> None:
    try:
        _bound_memory(launch.process_mib)
        GrammarProcess(sock, model, launch.budget).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _bound_memory(mib: int) -> None:
    """Limit the growth of this process's data to ``mib`` MiB plus the compiling thread's stack.

    The process also becomes the OOM killer's first choice. Does nothing on systems other than
    Linux.
    """
    if sys.platform != "linux":
        return
    become_oom_victim()
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limit = used + (mib << 20) + COMPILE_STACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
