"""Start parameters and reports of the processes of a cluster without Ray."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from everlift import settings
from router.config import RouterConfig
from router.ledger.config import LedgerConfig
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class RouterLaunch:
    role: ClassVar[str] = "router"

    name: str
    log_level: str
    router: RouterConfig
    #: with the ledger's password in its url: goes over a pipe, never by command line or environment
    ledger: LedgerConfig
    #: workers that there are to be
    num_workers: int


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """Start parameters of a rank. Rank 0 of several reports the ``rendezvous`` of the others."""

    role: ClassVar[str] = "rank"

    name: str
    log_level: str
    worker: WorkerConfig
    rank: int = 0
    rendezvous: str = ""
    #: as CUDA_VISIBLE_DEVICES calls it; empty: whichever CUDA takes
    gpu: str = ""
    #: internal addresses of the routers, to which rank 0 announces the worker
    routers: tuple[str, ...] = ()


Launch = RouterLaunch | RankLaunch
#: What a process says of itself, by name: its addresses, or the cause of its failure as "error".
Report = dict[str, str]


def encode(launch: Launch) -> bytes:
    return json.dumps(settings.to_dict(launch)).encode()


def decode(role: str, data: bytes) -> Launch:
    """Return the launch that ``data`` holds. Raises SettingsError."""
    values = json.loads(data)
    if role == RouterLaunch.role:
        return settings.load(RouterLaunch, values)
    return settings.load(RankLaunch, values)
