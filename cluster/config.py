"""Configuration of a whole cluster, with sections for router, worker, ledger and autoscaling.

The defaults of the settings in a section are in the section's own dataclass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Literal, TypeVar

from pydantic.dataclasses import dataclass

from cluster import settings_file
from cluster.autoscale.config import AutoscaleConfig
from everlift import settings
from everlift.adapters import parse_adapters
from everlift.errors import SettingsError
from everlift.hub import is_hub_id, name_for_clients
from everlift.packaged_models import PACKAGED_MODELS
from everlift.settings import CHECKED, Count
from everlift.tls import InternalTls
from router.config import RouterConfig
from router.ledger.config import LedgerConfig
from worker.config import FAKE, WorkerConfig

P = TypeVar("P", RouterConfig, WorkerConfig)

DEMO_MODEL = Path(__file__).with_name("demo_model")
ADDRESS_VARIABLE = "EVERLIFT_ADDRESS"
API_KEY_VARIABLE = "EVERLIFT_API_KEY"
#: Environment variables of the TLS files, by the names of Tls's fields.
TLS_VARIABLES = {
    "ca": "EVERLIFT_TLS_CA",
    "cert": "EVERLIFT_TLS_CERT",
    "key": "EVERLIFT_TLS_KEY",
    "name": "EVERLIFT_TLS_NAME",
}
#: EVERLIFT_ variables that are not settings. Client commands and tests use them.
_OTHER_VARIABLES = frozenset(
    {
        ADDRESS_VARIABLE,
        API_KEY_VARIABLE,
        *TLS_VARIABLES.values(),
        "EVERLIFT_PROTO_VENV",
        "EVERLIFT_CLIENTS_VENV",
    }
)
#: Settings of the whole cluster that are copied to its parts (router and worker), by name. The
#: value is the one of a part in which the setting is not set.
_UNSET: Mapping[str, object] = {
    "model": "",
    "model_revision": "",
    "adapters": (),
    "internal_tls": InternalTls(),
}


def _default_state_dir() -> Path:
    home = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".local" / "state") / "everlift"
    except RuntimeError:
        raise SettingsError(
            f"state_dir: must be set, or HOME: user {os.getuid()} has no home directory"
        ) from None


@dataclass(frozen=True, slots=True, config=CHECKED)
class Config:
    """Settings of a whole cluster.

    Relative paths, except ``worker.ready_dir``, are resolved against the working directory when the
    object is created. The model, its revision and adapters, ``chaos`` and ``internal_tls`` are
    passed on to the sections router and worker. The constructor raises pydantic's ValidationError
    if a setting is invalid or contradicts another one.
    """

    #: the served model: Hugging Face directory, GGUF file, hub id (org/name), "smollm2" or "fake"
    model: str = str(DEMO_MODEL)
    #: branch, tag or commit of a hub id; not set: its main branch
    model_revision: str = ""
    #: LoRA adapters that clients may name as model, each written NAME=DIRECTORY or NAME=ID@REVISION
    #: (hub id)
    adapters: tuple[str, ...] = ()
    num_routers: Count = 1
    #: custom Ray resource of which each router takes one; not set: routers run on any node
    router_resource: str = ""
    #: number of workers, if it is fixed (without autoscale.max_workers)
    num_workers: Count = 1
    #: number of Ray nodes over which the ranks of a worker are spread
    nodes_per_worker: Count = 1
    #: directory of the embedded ledger's data, the logs, and the cluster's address for other
    #: commands
    state_dir: Path = field(default_factory=_default_state_dir)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    #: allow fault injection (everlift chaos): sets router.chaos and worker.chaos
    chaos: bool = False
    #: address of a running Ray cluster, or "auto"; "local" starts one on this machine
    ray_address: str = "local"
    #: mutual TLS between routers and workers
    internal_tls: InternalTls = field(default_factory=InternalTls)
    router: RouterConfig = field(default_factory=RouterConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)

    def __post_init__(self) -> None:
        most_routers = self.autoscale.max_routers
        if most_routers is not None and most_routers < self.num_routers:
            raise ValueError(
                f"autoscale.max_routers ({most_routers}) must be at least num_routers "
                f"({self.num_routers})"
            )
        if self.worker.tensor_parallel % self.nodes_per_worker:
            raise ValueError(
                f"nodes_per_worker must divide worker.tensor_parallel "
                f"({self.worker.tensor_parallel}), not be {self.nodes_per_worker}"
            )
        if self.autoscale.is_on and self.num_workers != 1:
            raise ValueError(
                "num_workers is for a fixed number of workers; with autoscale.max_workers, set "
                "autoscale.min_workers"
            )
        self._set("state_dir", self.state_dir.expanduser().absolute())
        if not is_hub_id(self.model, self.model_revision):
            self._find_directory()
        for part in (self.router, self.worker):
            for name in _UNSET:
                if getattr(part, name) not in (_UNSET[name], getattr(self, name)):
                    raise ValueError(
                        f"{name} must be set for the whole cluster, not for a part of it"
                    )
        self._check_adapters()
        for name in ("router", "worker"):
            self._set(name, self._completed(getattr(self, name)))

    def _check_adapters(self) -> None:
        try:
            sources = [source.absolute for source in parse_adapters(self.adapters)]
        except ValueError as error:
            raise ValueError(f"adapters {error}") from None
        if sources and self.model == FAKE:
            raise ValueError(f"adapters need a model; the model {FAKE!r} has none")
        model = name_for_clients(self.model, self.model_revision)
        for source in sources:
            if source.name in (model, *self.router.served_model_names):
                raise ValueError(f"adapters name {source.name!r}, which is a name of the model")
        self._set("adapters", tuple(map(str, sources)))

    @property
    def most_workers(self) -> int:
        """Return the largest number of workers that the cluster can have at the same time."""
        return self.autoscale.max_workers or self.num_workers

    def _completed(self, part: P) -> P:
        return replace(
            part,
            model=self.model,
            model_revision=self.model_revision,
            adapters=self.adapters,
            chaos=self.chaos or part.chaos,
            internal_tls=self.internal_tls,
        )

    def _find_directory(self) -> None:
        if self.model_revision:
            raise ValueError(f"model_revision is for a hub id (org/name), not for {self.model!r}")
        if self.model != FAKE and self.model not in PACKAGED_MODELS:
            self._set("model", str(Path(self.model).expanduser().absolute()))

    def at_commit(self, commit: str) -> Config:
        """Return this configuration with ``commit`` as the revision of its model."""
        return replace(
            self,
            model_revision=commit,
            router=replace(self.router, model_revision=""),
            worker=replace(self.worker, model_revision=""),
        )

    def with_adapters(self, adapters: tuple[str, ...]) -> Config:
        """Return this configuration with other ``adapters``."""
        return replace(
            self,
            adapters=adapters,
            router=replace(self.router, adapters=()),
            worker=replace(self.worker, adapters=()),
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def load(
    file: Path | None,
    environ: Mapping[str, str],
    assignments: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    base: Mapping[str, object] | None = None,
) -> Config:
    """Return the configuration that several sources of settings define together.

    The sources are, each overriding those before it: the defaults, the nested mapping ``base``,
    the YAML ``file``, the EVERLIFT_ variables of ``environ``, ``assignments`` such as
    "router.port=0", and the nested mapping ``options``. Raises SettingsError, which lists the
    invalid settings, and for each one in ``file`` its line.
    """
    content, lines = settings_file.read(file) if file else ({}, {})
    above = (
        settings.from_environment(Config, environ, ignore=_OTHER_VARIABLES),
        settings.from_flags(Config, assignments),
        options or {},
    )

    def location(path: str) -> str:
        is_of_file = path in lines and not any(_has(layer, path) for layer in above)
        return f"{file}:{lines[path]}: " if is_of_file else ""

    return settings.load(Config, base or {}, content, *above, location_of=location)


def _has(layer: Mapping[str, object], path: str) -> bool:
    value: object = layer
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True
