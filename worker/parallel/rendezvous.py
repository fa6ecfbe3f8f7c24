"""Rendezvous of the ranks of one worker, at one address that rank 0 gives out.

    model     listener at the address                        connections of the ranks afterwards
    real      a TCPStore, which has the step log's address   a process group and the step log
    fake      the step log                                   the step log

Modules that import torch are imported only where they are needed, because the fake model runs
without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.config import WorkerConfig
from worker.parallel.step_log import StepLogListener, StepLogReader, StepLogWriter

if TYPE_CHECKING:
    from worker.parallel.group import Group

_STEP_LOG_KEY = "everlift/step_log"


@dataclass(frozen=True, slots=True)
class RankLinks:
    """Links of a rank to the others: a group for tensors, and the step log of rank 0.

    With a fake model ``group`` is None; in a worker of a single rank both are None.
    """

    group: Group | None = None
    log: StepLogWriter | StepLogReader | None = None

    def interrupt(self) -> None:
        """Break the connections of the step log, if any, which makes the other ranks end.

        A read or write of the step log that waits in another thread then raises ChannelBroken.
        """
        if self.log is not None:
            self.log.interrupt()

    def close(self) -> None:
        """Close the step log, if any; the group is closed by the runner."""
        if self.log is not None:
            self.log.close()


class Rendezvous:
    """Rank 0's side of the rendezvous, open at ``address`` as soon as it is created.

    ``fingerprint`` identifies the model's files and must be the same on all ranks.
    """

    def __init__(self, config: WorkerConfig, fingerprint: str) -> None:
        self._config = config
        self._listener = StepLogListener(config.host, fingerprint)
        self.address = self._listener.address
        if not config.is_fake:
            from worker.parallel.group import create_store

            self._store, self.address = create_store(config.host)
            self._store.set(_STEP_LOG_KEY, self._listener.address)

    def gather(self) -> RankLinks:
        """Wait for all ranks, and return the links to them.

        Raises ChannelBroken if they do not connect within the setting ``join_timeout``, if one has
        another model, or if ``close`` is called meanwhile.
        """
        try:
            log = self._listener.accept(self._config.num_ranks, self._config.join_timeout)
        finally:
            self.close()
        if self._config.is_fake:
            return RankLinks(log=log)
        from worker.device.device import choose_device
        from worker.parallel.group import init_group

        place = choose_device(self._config.device)
        group = init_group(self._store, 0, self._config.num_ranks, place)
        # The store listens as long as it is referenced; from here on only the group may do so.
        del self._store
        return RankLinks(group, log)

    def close(self) -> None:
        """Close the listener, so that no more ranks can connect."""
        self._listener.close()


def join(config: WorkerConfig, rank: int, address: str, fingerprint: str) -> RankLinks:
    """Connect ``rank``, which is above 0, to rank 0 at ``address``; return the rank's links.

    ``address`` is the address of rank 0's Rendezvous. ``fingerprint`` identifies the model's
    files. Raises ChannelBroken if the step log of rank 0 cannot be reached, and RuntimeError if its
    store cannot.
    """
    if config.is_fake:
        return RankLinks(log=StepLogReader.connect(address, rank, fingerprint))
    from worker.device import device
    from worker.parallel import group

    store = group.join_store(address)
    log = StepLogReader.connect(store.get(_STEP_LOG_KEY).decode(), rank, fingerprint)
    place = device.choose_device(config.device)
    return RankLinks(group.init_group(store, rank, config.num_ranks, place), log)
