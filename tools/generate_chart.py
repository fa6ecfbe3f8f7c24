"""Generate the files of the Helm chart that are derived from other files.

    helm/files/model_defaults.yaml      defaults of settings that must be equal on all workers
    helm/files/router_defaults.yaml     defaults of router settings that affect the pods
    helm/files/run_time_settings.yaml   settings that change without a restart
    helm/files/alerts.yaml, dashboard.json   copies of files in deploy/, because a chart can read
                                        only its own files
    helm/values.schema.json             from values.yaml, and for `config` from the dataclasses

With ``--check`` nothing is written, and the exit status is 1 if one of the files is not current.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from cluster.config import Config
from cluster.groups import GROUP_NAME, ModelGroup
from cluster.ray.deployments import RUN_TIME_SETTINGS
from everlift import settings
from router.config import RouterConfig
from router.ledger.config import PROMISES
from worker.config import FAKE, WorkerConfig

CHART = Path(__file__).parents[1] / "helm"
DEPLOY = CHART.parent / "deploy"
#: Settings, besides the model, that must be equal on all workers of one ledger.
_MODEL_SETTINGS = ("engine", "dtype", "quantization", "load_format", "max_model_len")
#: Settings that determine the termination grace period of a router's pod.
_POD_SETTINGS = ("drain",)
#: Settings whose defaults contain paths of this machine, which the schema must not contain.
_LOCAL_DEFAULTS = frozenset({"model", "state_dir"})

Json = dict[str, Any]

_TEXTS: Json = {"type": "object", "additionalProperties": {"type": "string"}}
_OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
_QUANTITIES: Json = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
_RESOURCES: Json = {
    "type": "object",
    "properties": {"limits": _QUANTITIES, "requests": _QUANTITIES},
    "additionalProperties": False,
}
_PORT: Json = {"type": "integer", "minimum": 1, "maximum": 65535}
#: JSON schemas of values whose type does not follow from the default, by path or by name.
_SHAPES: dict[str, Json] = {
    "access.mode": {"enum": list(get_args(get_type_hints(RouterConfig)["access"]))},
    "accessModes": {"type": "array", "items": {"type": "string"}},
    "affinity": {"type": "object"},
    "annotations": _TEXTS,
    # Format of durations in the Gateway API.
    "gateway.http.timeout": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){0,4}$"},
    "hostnames": {"type": "array", "items": {"type": "string"}},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "labels": _TEXTS,
    "ledger.durabilityClass": {"enum": list(PROMISES)},
    "ledger.embedded.maxMemoryMiB": {"type": "integer", "minimum": 1},
    # Ports that a process without root privileges may use.
    "monitoring.port": _PORT | {"minimum": 1024},
    "nodeSelector": _TEXTS,
    "commonLabels": _TEXTS,
    "podAnnotations": _TEXTS,
    "podLabels": _TEXTS,
    "podSecurityContext": {"type": "object"},
    "podSpec": {"type": "object"},
    "resources": _RESOURCES,
    "routers.max": {"type": "integer", "minimum": 0},
    "routers.replicas": {"type": "integer", "minimum": 1},
    "securityContext": {"type": "object"},
    "service.httpPort": _PORT,
    "service.port": _PORT,
    "service.type": {"enum": ["ClusterIP", "LoadBalancer", "NodePort"]},
    "upgrade.strategy": {"enum": ["NewCluster", "None"]},
    "workers.groups": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"},
                "pods": {"type": "integer", "minimum": 0},
                "maxPods": {"type": "integer", "minimum": 1},
                "gpuResource": {"type": "string"},
                "resources": _RESOURCES,
                "sharedMemory": {"type": "string"},
                "nodeSelector": _TEXTS,
                "tolerations": _OBJECTS,
                "affinity": {"type": "object"},
                "topologySpreadConstraints": _OBJECTS,
                "podAnnotations": _TEXTS,
                "podLabels": _TEXTS,
                "podSpec": {"type": "object"},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "workers.nodesPerWorker": {"type": "integer", "minimum": 1},
    "workers.device": {"enum": ["cuda", "cpu"]},
    "workers.max": {"type": "integer", "minimum": 1},
    "workers.min": {"type": "integer", "minimum": 0},
    "workers.tensorParallel": {"type": "integer", "minimum": 1},
}
_MADE_OF_DEPLOYMENTS = "# Made by make chart from cluster/ray/deployments.py.\n"
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", Path: "string"}


def main() -> None:
    wanted = _generated()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        if stale:
            names = ", ".join(str(path.relative_to(CHART.parent)) for path in stale)
            sys.exit(f"not current: {names}; run `make chart`")
        print("the chart is current")
        return
    for path in stale:
        path.write_text(wanted[path])


def _generated() -> dict[Path, str]:
    return {
        CHART / "files" / "model_defaults.yaml": defaults_of(
            WorkerConfig(), "worker", _MODEL_SETTINGS
        ),
        CHART / "files" / "router_defaults.yaml": defaults_of(
            RouterConfig(), "router", _POD_SETTINGS
        ),
        CHART / "files" / "run_time_settings.yaml": _MADE_OF_DEPLOYMENTS
        + yaml.safe_dump({"settings": list(RUN_TIME_SETTINGS)}),
        CHART / "files" / "alerts.yaml": (DEPLOY / "prometheus" / "alerts.yaml").read_text(),
        CHART / "files" / "dashboard.json": (DEPLOY / "grafana" / "everlift.json").read_text(),
        CHART / "values.schema.json": json.dumps(schema(), indent=1) + "\n",
    }


def defaults_of(part: WorkerConfig | RouterConfig, package: str, names: Sequence[str]) -> str:
    values = settings.to_dict(part)
    return f"# Made by make chart from {package}/config.py.\n" + yaml.safe_dump(
        {name: values[name] for name in names}
    )


def schema() -> Json:
    text = (CHART / "values.yaml").read_text()
    values = _schema_of(yaml.safe_load(text), dict(_descriptions(text)), "")
    # A parent chart may set global values for all its dependencies.
    values["properties"]["global"] = {"type": "object"}
    values["properties"]["config"] |= settings_schema(Config(), "")
    values["properties"]["models"] |= _models_schema(values["properties"]["workers"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | values


def _models_schema(workers: Json) -> Json:
    """Return the JSON schema of further models; ``workers`` is that of the first one's workers."""
    own = {name: each for name, each in workers["properties"].items() if name != "device"}
    config = settings_schema(ModelGroup(model=FAKE), "")
    # It applies to routers, and not to the workers of a model.
    del config["properties"]["autoscale"]["properties"]["requests_per_router"]
    model = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "revision": {"type": "string"},
            "config": config,
            "workers": workers | {"properties": own},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    names = {"pattern": f"^{GROUP_NAME.pattern}$"}
    return {"type": "object", "propertyNames": names, "additionalProperties": model}


def _schema_of(value: Any, descriptions: Mapping[str, str], path: str) -> Json:
    described = {"description": descriptions[path]} if path in descriptions else {}
    return described | _shape(value, descriptions, path)


def _shape(value: Any, descriptions: Mapping[str, str], path: str) -> Json:
    for known in (path, path.rpartition(".")[2]):
        if known in _SHAPES:
            return _SHAPES[known]
    if isinstance(value, dict):
        below = {
            name: _schema_of(each, descriptions, f"{path}.{name}".lstrip("."))
            for name, each in value.items()
        }
        return {"type": "object", "properties": below, "additionalProperties": False}
    return _OBJECTS if isinstance(value, list) else {"type": _SCALARS[type(value)]}


def settings_schema(initial: object, section: str) -> Json:
    """Return the JSON schema of a dataclass of settings, of which ``initial`` has the defaults.

    ``section`` is the prefix of the settings' paths: empty, or a dotted path that ends with a dot.
    """
    cls = type(initial)
    defaults, comments = settings.to_dict(initial), _comments(cls)
    set_by_chart = yaml.safe_load((CHART / "files" / "chart_settings.yaml").read_text())
    properties: Json = {}
    for name, hint in get_type_hints(cls).items():
        path = section + name
        if path in set_by_chart:
            # The templates reject such a setting, and name the value to set instead.
            properties[name] = {"description": f"set by {set_by_chart[path]}"}
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            properties[name] = settings_schema(getattr(initial, name), f"{path}.")
        else:
            described = {"description": comments[name]} if name in comments else {}
            default = {} if path in _LOCAL_DEFAULTS else {"default": defaults[name]}
            properties[name] = described | _type(hint) | default
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _type(hint: Any) -> Json:
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return {"enum": list(arguments)}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _type(arguments[0])}
    if type(None) in arguments:
        [inner] = (each for each in arguments if each is not type(None))
        return {"anyOf": [_type(inner), {"type": "null"}]}
    if issubclass(hint, Enum):
        return {"enum": [member.name.lower() for member in hint]}
    return {"type": _SCALARS[hint]}


def _comments(cls: type) -> dict[str, str]:
    """Return the ``#:`` comment above each field of a dataclass, by the field's name.

    Further models have settings of the first model, which has the comments.
    """
    comments = _comments(RouterConfig) | _comments(Config) if cls is ModelGroup else {}
    lines: list[str] = []
    for line in map(str.strip, inspect.getsource(cls).splitlines()):
        if line.startswith("#:"):
            lines.append(line.removeprefix("#:").strip())
            continue
        if lines and (field := re.match(r"(\w+):", line)):
            comments[field[1]] = " ".join(lines)
        lines = []
    return comments


def _descriptions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted path of each value in values.yaml with its ``# --`` comment, if any."""
    above: list[tuple[int, str]] = []
    description = ""
    for line in text.splitlines():
        if comment := re.match(r" *# -- (.*)", line):
            description = comment[1]
        elif key := re.match(r"( *)(\w+):", line):
            above = [(indent, name) for indent, name in above if indent < len(key[1])]
            above.append((len(key[1]), key[2]))
            if description:
                yield ".".join(name for _, name in above), description
            description = ""


if __name__ == "__main__":
    main()
