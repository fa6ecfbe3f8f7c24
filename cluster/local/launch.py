"""Start parameters and reports of the processes of a cluster without Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    #: ``ledger.url`` contains the ledger's password. Therefore the launch is sent through a pipe,
    #: never in the command line or the environment
    ledger: LedgerConfig
    #: number of workers that the cluster is to have, by the name of their model for clients
    num_workers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """Start parameters of a rank, that is, of one process of a worker.

    ``rendezvous`` is the address at which the ranks connect to each other. Rank 0 reports it, and
    the other ranks are started with it; it is empty for rank 0.
    """

    role: ClassVar[str] = "rank"

    name: str
    log_level: str
    worker: WorkerConfig
    rank: int = 0
    rendezvous: str = ""
    #: name of the GPU in CUDA_VISIBLE_DEVICES; empty: CUDA chooses
    gpu: str = ""
    #: internal addresses of the routers, to which rank 0 announces the worker
    routers: tuple[str, ...] = ()
    #: settings of the worker for each model to which it can change, its first one included
    models: tuple[WorkerConfig, ...] = ()


Launch = RouterLaunch | RankLaunch
#: Report of a process: texts by name. A ready router reports its addresses, a ready rank 0 its
#: worker_id and address, and any other ready rank nothing. If there are several ranks, rank 0 first
#: reports its "rendezvous". A process that fails reports the cause as "error".
Report = dict[str, str]


def encode(launch: Launch) -> bytes:
    return json.dumps(settings.to_dict(launch)).encode()


def decode(role: str, data: bytes) -> Launch:
    """Return the start parameters that ``data``, a result of ``encode``, contains.

    ``role`` selects their type, "router" or "rank". Raises SettingsError for an invalid setting.
    """
    values = json.loads(data)
    if role == RouterLaunch.role:
        return settings.load(RouterLaunch, values)
    return settings.load(RankLaunch, values)
