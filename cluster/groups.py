"""Worker groups of a cluster: the workers of one model each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path

from pydantic.dataclasses import dataclass

from cluster.autoscale.config import AutoscaleConfig
from everlift.adapters import parse_adapters
from everlift.hub import is_hub_id, name_for_clients
from everlift.packaged_models import PACKAGED_MODELS
from everlift.settings import CHECKED, Count
from router.config import ModelConfig
from worker.config import FAKE, WorkerConfig

#: Names of groups, which are parts of the names of deployments, pods and files.
GROUP_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?")
#: Settings of autoscaling that apply to the routers, which all models share.
_OF_ROUTERS = ("max_routers", "requests_per_router")
#: Settings of the sections worker and autoscale that a further model does not inherit, and settings
#: of the section router that it inherits.
OWN_OF_WORKERS = ("model", "model_revision", "adapters", "internal_tls")
_OWN_SCALING = ("min_workers", "max_workers", *_OF_ROUTERS)
_INHERITED_OF_ROUTER = ("sampling_defaults", "tool_format", "reasoning_format")


@dataclass(frozen=True, slots=True, config=CHECKED)
class ModelGroup(ModelConfig):
    """Settings of a further model of a cluster, and of its workers.

    The fields of ModelConfig have the meaning that they have for the first model. ``model`` is
    required. A relative path is resolved against the working directory.
    """

    #: number of workers, if it is fixed (without autoscale.max_workers)
    num_workers: Count = 1
    #: number of Ray nodes over which the ranks of a worker are spread
    nodes_per_worker: Count = 1
    #: custom Ray resource of which each rank takes one; not set: ranks run on any node
    worker_resource: str = ""
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if not self.model:
            raise ValueError("model: must be set")
        for name in _OF_ROUTERS:
            if getattr(self.autoscale, name) != getattr(AutoscaleConfig(), name):
                raise ValueError(
                    f"autoscale.{name} must be set for the whole cluster, not for a model"
                )
        check_sizes(self.worker, self.autoscale, self.num_workers, self.nodes_per_worker)
        object.__setattr__(self, "model", located(self.model, self.model_revision))
        object.__setattr__(self, "adapters", checked_adapters(self.adapters, self.model))

    @property
    def for_routers(self) -> ModelConfig:
        return ModelConfig(**{each.name: getattr(self, each.name) for each in fields(ModelConfig)})


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers of one model; ``name`` is that of its section in ``models``, "" for the first model.

    ``worker`` is complete: it has the model, its revision and adapters, and the settings of the
    whole cluster.
    """

    name: str
    worker: WorkerConfig
    autoscale: AutoscaleConfig
    num_workers: int
    nodes_per_worker: int
    worker_resource: str

    @property
    def model(self) -> str:
        """Name of the model for clients."""
        return self.worker.name

    @property
    def section(self) -> str:
        """Prefix of the paths of the group's settings, which ends with a dot if it is not empty."""
        return f"models.{self.name}." if self.name else ""

    @property
    def label(self) -> str:
        """Name of the group's workers as a whole: worker, or worker-NAME."""
        return f"worker-{self.name}" if self.name else "worker"

    @property
    def most_workers(self) -> int:
        """Largest number of workers that the group can have at the same time."""
        return self.autoscale.max_workers or self.num_workers

    @property
    def most_ranks(self) -> int:
        """Largest number of devices that the group's workers can use at the same time."""
        return self.most_workers * self.worker.tensor_parallel


def check_sizes(
    worker: WorkerConfig, autoscale: AutoscaleConfig, num_workers: int, nodes_per_worker: int
) -> None:
    """Raise ValueError if the settings of a group's size contradict each other."""
    if worker.tensor_parallel % nodes_per_worker:
        raise ValueError(
            f"nodes_per_worker must divide worker.tensor_parallel ({worker.tensor_parallel}), not "
            f"be {nodes_per_worker}"
        )
    if autoscale.is_on and num_workers != 1:
        raise ValueError(
            "num_workers is for a fixed number of workers; with autoscale.max_workers, set "
            "autoscale.min_workers"
        )


def located(model: str, revision: str) -> str:
    """Return ``model`` with an absolute path if it is a directory or file.

    Raises ValueError if ``revision`` is set and ``model`` is not a hub id.
    """
    if is_hub_id(model, revision):
        return model
    if revision:
        raise ValueError(f"model_revision is for a hub id (org/name), not for {model!r}")
    if model == FAKE or model in PACKAGED_MODELS:
        return model
    return str(Path(model).expanduser().absolute())


def checked_adapters(texts: tuple[str, ...], model: str) -> tuple[str, ...]:
    """Return the adapters ``texts`` with absolute paths.

    Raises ValueError if one is invalid, two have the same name, or ``model`` can have none.
    """
    try:
        sources = [source.absolute for source in parse_adapters(texts)]
    except ValueError as error:
        raise ValueError(f"adapters {error}") from None
    if sources and model == FAKE:
        raise ValueError(f"adapters need a model; the model {FAKE!r} has none")
    return tuple(map(str, sources))


def check_names(models: Mapping[str, ModelConfig]) -> None:
    """Raise ValueError if a name that clients can request belongs to two models or adapters.

    ``models`` are the settings of each model by the name of its group, with "" for the first model.
    """
    places: dict[str, str] = {}
    for group, model in models.items():
        own: dict[str, str] = {}
        for place, name in _names(group, model):
            other = places.get(name) or (own.get(name) if place.endswith("adapters") else None)
            if other:
                raise ValueError(f"{place} has the name {name!r}, which {other} has too")
            own[name] = place
        places |= own


def _names(group: str, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield (path, name) for each name by which clients can request a model or its adapters.

    ``path`` is the path of the setting that defines the name.
    """
    section = f"models.{group}." if group else ""
    yield f"{section}model", name_for_clients(model.model, model.model_revision)
    of_router = section or "router."
    for name in model.served_model_names:
        yield f"{of_router}served_model_names", name
    for source in parse_adapters(model.adapters):
        yield f"{section}adapters", source.name


def check_group_name(name: str) -> None:
    """Raise ValueError if ``name`` cannot be the name of a section of ``models``."""
    if not GROUP_NAME.fullmatch(name):
        raise ValueError(
            f"models.{name}: the name must have at most 32 lower-case letters, digits and hyphens, "
            "and neither begin nor end with a hyphen"
        )


def inherited(values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that further models inherit from the nested settings ``values``.

    The result is nested like a section of ``models``. Settings of a wrong type are left out.
    """
    found: dict[str, object] = {}
    for section, own in (("worker", OWN_OF_WORKERS), ("autoscale", _OWN_SCALING)):
        if isinstance(below := values.get(section), Mapping):
            found[section] = {name: value for name, value in below.items() if name not in own}
    if isinstance(router := values.get("router"), Mapping):
        found |= {name: router[name] for name in _INHERITED_OF_ROUTER if name in router}
    return found


def source_of(path: str) -> str:
    """Return the path of the setting from which a model inherits its setting ``path``.

    ``path`` is relative to the model's section, the result to the root of the configuration.
    """
    return f"router.{path}" if path in _INHERITED_OF_ROUTER else path


def interchangeable(groups: Sequence[WorkerGroup], group: WorkerGroup) -> list[WorkerGroup]:
    """Return the groups whose models a worker of ``group`` can serve after a change at run time.

    The result contains ``group`` and all others whose workers run Everlift's own engine on one
    node, with the same resources. The result is empty if there is no such other group, or if the
    workers of ``group`` have another engine or several nodes. A worker on several nodes cannot
    change its model, because only the first node would get the new files before the change.
    """

    def resources(it: WorkerGroup) -> tuple[object, ...]:
        worker = it.worker
        return worker.tensor_parallel, worker.device, worker.python, it.worker_resource

    same = [it for it in groups if it.worker.engine == "everlift" and it.nodes_per_worker == 1]
    same = [it for it in same if resources(it) == resources(group)]
    return same if group in same and len(same) > 1 else []
