"""Executor of vLLM over several processes, which ends them all when one ends."""

from __future__ import annotations

import select
from threading import Thread

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from everlift import logs

log = logs.get_logger(__name__)


class WatchedExecutor(MultiprocExecutor):
    """Executor of one process per device.

    All processes are killed as soon as one ends, so that the step in progress fails at once. vLLM
    would first wait several seconds for the other processes, which may never end by themselves
    because they wait for the ended one. A shutdown likewise sends SIGTERM to all processes at once,
    because not all notice the end of their pipe.
    """

    _is_closing = False

    def shutdown(self) -> None:
        self._is_closing = True
        for worker in getattr(self, "workers", None) or ():
            worker.proc.terminate()
        super().shutdown()

    def start_worker_monitor(self, inline: bool = False) -> None:
        Thread(target=self._watch, name="vllm-processes", daemon=True).start()

    def _watch(self) -> None:
        processes = {worker.proc.sentinel: worker.proc for worker in self.workers}
        ends = select.poll()
        for sentinel in processes:
            ends.register(sentinel)
        ended = [processes[sentinel] for sentinel, _ in ends.poll()]
        if self._is_closing:
            return
        for process in ended:
            log.error("process of vLLM ended", process_pid=process.pid, status=process.exitcode)
        self.is_failed = True
        for process in processes.values():
            process.kill()
        if self.failure_callback is not None:
            self.failure_callback()
        self.shutdown()
