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
from cluster.groups import (
    ModelGroup,
    WorkerGroup,
    check_group_name,
    check_names,
    check_sizes,
    checked_adapters,
    inherited,
    located,
    source_of,
)
from everlift import settings
from everlift.errors import SettingsError
from everlift.settings import CHECKED, Count
from everlift.tls import InternalTls
from router.config import RouterConfig
from router.ledger.config import LedgerConfig
from worker.config import WorkerConfig

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
    passed on to the sections router and worker, and the further ``models`` to the section router.
    The constructor raises pydantic's ValidationError if a setting is invalid or contradicts another
    one. Only ``load`` lets further models inherit settings from the sections router, worker and
    autoscale.
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
    #: custom Ray resource of which each rank takes one; not set: ranks run on any node
    worker_resource: str = ""
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
    #: further models with their workers, by the name of the group of workers
    models: Mapping[str, ModelGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most_routers = self.autoscale.max_routers
        if most_routers is not None and most_routers < self.num_routers:
            raise ValueError(
                f"autoscale.max_routers ({most_routers}) must be at least num_routers "
                f"({self.num_routers})"
            )
        check_sizes(self.worker, self.autoscale, self.num_workers, self.nodes_per_worker)
        self._set("state_dir", self.state_dir.expanduser().absolute())
        self._set("model", located(self.model, self.model_revision))
        self._set("adapters", checked_adapters(self.adapters, self.model))
        for name in self.models:
            check_group_name(name)
        self._check_parts()
        for name in ("router", "worker"):
            self._set(name, self._completed(getattr(self, name), self))
        more_models = tuple(group.for_routers for group in self.models.values())
        self._set("router", replace(self.router, more_models=more_models))
        self._set("models", {name: self._completed_group(it) for name, it in self.models.items()})
        check_names(dict(zip(("", *self.models), self.router.models, strict=True)))

    def _check_parts(self) -> None:
        """Raise ValueError if a section contradicts a setting of the cluster or of its model.

        The sections router and worker, including each further model's section worker, may not set
        the model, its revision, its adapters or ``internal_tls`` to another value. Unset values are
        permitted. ``router.more_models`` must be empty or match ``models``.
        """
        parts: list[tuple[RouterConfig | WorkerConfig, Config | ModelGroup, str]] = [
            (self.router, self, ""),
            (self.worker, self, ""),
            *((group.worker, group, f"models.{name}.") for name, group in self.models.items()),
        ]
        for part, whole, section in parts:
            for name, unset in _UNSET.items():
                value = getattr(self if name == "internal_tls" else whole, name)
                if getattr(part, name) not in (unset, value):
                    raise ValueError(
                        f"{section}{name} must be set for the whole "
                        f"{'model' if section else 'cluster'}, not for a part of it"
                    )
        more_models = tuple(group.for_routers for group in self.models.values())
        if self.router.more_models not in ((), more_models):
            raise ValueError("router.more_models must not be set: set models")

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        """Worker groups of all models; the first one is that of the main model."""
        named: dict[str, Config | ModelGroup] = {"": self, **self.models}
        return tuple(
            WorkerGroup(
                name,
                it.worker,
                it.autoscale,
                it.num_workers,
                it.nodes_per_worker,
                it.worker_resource,
            )
            for name, it in named.items()
        )

    def _completed_group(self, group: ModelGroup) -> ModelGroup:
        return replace(group, worker=self._completed(group.worker, group))

    def _completed(self, part: P, whole: Config | ModelGroup) -> P:
        return replace(
            part,
            model=whole.model,
            model_revision=whole.model_revision,
            adapters=whole.adapters,
            chaos=self.chaos or part.chaos,
            internal_tls=self.internal_tls,
        )

    def single_worker(self) -> Config:
        """Return this configuration with one worker of the main model, and no other model."""
        router = replace(self.router, more_models=())
        return replace(self, num_workers=1, autoscale=AutoscaleConfig(), models={}, router=router)

    def with_sources(self, group: str, model_revision: str, adapters: tuple[str, ...]) -> Config:
        """Return this configuration with another revision and other adapters of a group's model."""
        whole = self.models[group] if group else self
        worker = replace(whole.worker, model_revision="", adapters=())
        if group:
            changed = replace(
                self.models[group], model_revision=model_revision, adapters=adapters, worker=worker
            )
            router = replace(self.router, more_models=())
            return replace(self, router=router, models={**self.models, group: changed})
        router = replace(self.router, model_revision="", adapters=())
        return replace(
            self, model_revision=model_revision, adapters=adapters, router=router, worker=worker
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

    values, copies = _with_inherited(settings.merge(base or {}, content, *above))

    def location(path: str) -> str:
        path = copies.get(path, path)
        is_of_file = path in lines and not any(_has(layer, path) for layer in above)
        return f"{file}:{lines[path]}: " if is_of_file else ""

    return settings.load(Config, values, location_of=location, copies=copies)


def _with_inherited(values: Mapping[str, object]) -> tuple[Mapping[str, object], dict[str, str]]:
    """Return ``values`` with the settings that further models inherit, and their sources.

    The first result has the inherited settings in each section of ``models``. The second result
    maps the path of each inherited setting there to the path of the setting that it copies.
    """
    models = values.get("models")
    if not isinstance(models, Mapping):
        return values, {}
    base = inherited(values)
    completed = dict(models)
    copies: dict[str, str] = {}
    for name, group in models.items():
        if isinstance(group, Mapping):
            completed[name] = settings.merge(base, group)
            section = f"models.{name}."
            added = {*settings.paths(base)} - {*settings.paths(group)}
            copies |= {f"{section}{path}": source_of(path) for path in added}
    return {**values, "models": completed}, copies


def _has(layer: Mapping[str, object], path: str) -> bool:
    value: object = layer
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True
