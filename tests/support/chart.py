"""Helm chart as rendered by Helm, which runs in a process of its own.

Helm is a shared library with threads of its own, which a process that forks must not have.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from cluster.autoscale.config import AutoscaleConfig

CHART = Path(__file__).parents[2] / "helm"
RELEASE, NAMESPACE = "ev", "models"

Object = dict[str, Any]

_DEFAULT_SCALING = asdict(AutoscaleConfig())


def all_settings(application: Object) -> Object:
    """Return the settings that an application of Serve was built with."""
    router, worker, *others = application["deployments"]
    given = router["user_config"]
    settings = deepcopy(application["args"])
    settings |= _worker_settings(worker, given)
    if routers := router.get("autoscaling_config"):
        settings["num_routers"] = routers["min_replicas"]
        settings.setdefault("autoscale", {})["max_routers"] = routers["max_replicas"]
    else:
        settings["num_routers"] = router["num_replicas"]
    assert [worker["name"], *(each["name"] for each in others)] == [*given["num_workers"]]
    for each in others:
        found = _worker_settings(each, given)
        # A missing setting has its default and is not inherited.
        found["autoscale"] = _DEFAULT_SCALING | found.get("autoscale", {})
        settings["models"][each["name"].removeprefix("worker-")] |= found
    settings["log_level"] = given["log_level"]
    settings["router"] = settings.get("router", {}) | given["router"]
    return settings


def _worker_settings(deployment: Object, given: Object) -> Object:
    """Return the settings of workers in their deployment and in the routers' user_config."""
    name = deployment["name"]
    assert deployment["user_config"]["log_level"] == given["log_level"]
    autoscale = dict(given["autoscale"][name])
    if bounds := deployment.get("autoscaling_config"):
        assert given["num_workers"][name] is None
        autoscale["min_workers"] = bounds["min_replicas"]
        autoscale["max_workers"] = bounds["max_replicas"]
        return {"autoscale": autoscale}
    assert given["num_workers"][name] == deployment["num_replicas"]
    found = {"num_workers": deployment["num_replicas"]}
    return found | ({"autoscale": autoscale} if autoscale else {})


class Refused(Exception):
    """Raised when Helm rejects the values."""


class Rendered:
    """Rendered objects and notes of a release."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
        self.text = "".join(text for name, text in files.items() if not name.endswith("NOTES.txt"))
        self.objects: list[Object] = [
            each
            for name, text in files.items()
            if not name.endswith("NOTES.txt")
            for each in yaml.load_all(text, yaml.CSafeLoader)
            if each
        ]

    def the(self, kind: str, name: str = "") -> Object:
        """Return the only object of ``kind``, or of those whose names end with ``name``."""
        [found] = (
            each
            for each in self.objects
            if each["kind"] == kind and (not name or each["metadata"]["name"].endswith(name))
        )
        return found

    @property
    def kinds(self) -> set[str]:
        return {each["kind"] for each in self.objects}

    @property
    def ray(self) -> Object:
        return self.the("RayService")["spec"]["rayClusterConfig"]

    def group(self, name: str) -> Object:
        """Return a node group of the Ray cluster: "head", "routers" or a group of workers."""
        if name == "head":
            return self.ray["headGroupSpec"]
        [found] = (each for each in self.ray["workerGroupSpecs"] if each["groupName"] == name)
        return found

    @property
    def groups(self) -> list[Object]:
        return [self.group("head"), *self.ray["workerGroupSpecs"]]

    @property
    def worker_groups(self) -> list[Object]:
        groups: list[Object] = self.ray["workerGroupSpecs"]
        return [each for each in groups if each["groupName"] != "routers"]

    @property
    def application(self) -> Object:
        """Application that Serve is configured to run."""
        deployed = yaml.load(self.the("RayService")["spec"]["serveConfigV2"], yaml.CSafeLoader)
        assert deployed["proxy_location"] == "Disabled"
        [application] = deployed["applications"]
        return application

    @property
    def deployments(self) -> dict[str, Object]:
        """Options of Serve's deployments, by name."""
        return {each["name"]: each for each in self.application["deployments"]}

    @property
    def settings(self) -> Object:
        """All settings of Everlift: those of the application and those of its deployments."""
        return all_settings(self.application)

    @property
    def pods(self) -> list[Object]:
        """All pod templates and pods: metadata and spec."""
        templates = [group["template"] for group in self.groups]
        templates += [
            each["spec"]["template"] for each in self.objects if each["kind"] == "StatefulSet"
        ]
        return templates + [each for each in self.objects if each["kind"] == "Pod"]


def container(group: Object) -> Object:
    [only] = group["template"]["spec"]["containers"]
    return only


class Helm:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def render(
        self,
        values: Mapping[str, Any] | None = None,
        release: str = RELEASE,
        namespace: str = NAMESPACE,
    ) -> Rendered:
        """Render the chart; raise Refused if Helm rejects the values."""
        question = {"values": values or {}, "release": release, "namespace": namespace}
        return Rendered(self._ask(question))

    def lint(self) -> list[str]:
        """Return Helm's errors and warnings."""
        return list(self._ask({"lint": True}))

    def _ask(self, question: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer["result"]


@contextmanager
def running_helm() -> Iterator[Helm]:
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        # The process ends when its stdin is closed.
        yield Helm(process)


def _answer(question: Mapping[str, Any]) -> Any:
    import helm_python

    if "lint" in question:
        found = helm_python.lint(CHART, strict=True)["messages"]
        return [each["error"] for each in found if each["severity"] > _INFORMATION]
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(
            question["values"], name=question["release"], namespace=question["namespace"]
        )


_INFORMATION = 1


def _main() -> None:
    import helm_python

    for line in sys.stdin:
        try:
            answer = {"result": _answer(json.loads(line))}
        except (helm_python.HelmValuesError, helm_python.HelmRenderError) as error:
            answer = {"refused": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
