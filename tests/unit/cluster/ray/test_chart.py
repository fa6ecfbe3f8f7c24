"""Chart in helm/, rendered by Helm: its objects are valid, and follow from the values."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from cluster.config import TLS_VARIABLES, Config, load
from cluster.ray import build, deployments
from cluster.ray.deployments import ROUTER_POLICY
from everlift import settings
from everlift.tls import InternalTls, Tls
from router.api.kserve.v2 import open_inference_pb2
from router.api.openai import openapi
from router.config import RouterConfig
from router.ledger.config import EMBEDDED
from router.observability.metrics.http_server import READY
from tests.support.chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    Helm,
    Object,
    Refused,
    Rendered,
    container,
    running_helm,
)
from worker.serving.startup import ReadyFile

#: Versions of Kubernetes that objects are checked against; OLDEST checks the default values only.
OLDEST, NEWEST = "1.32", "1.37"
#: maxReplicas of a group without a bound, as KubeRay writes it.
NO_BOUND = (1 << 31) - 1
#: Objects of other projects, whose schemas are not available to the test.
UNCHECKED = {"RayService", "ServiceMonitor", "PrometheusRule", "GRPCRoute", "HTTPRoute"}

EXTERNAL = {
    "embedded": {"enabled": False},
    "external": {"existingSecret": "their-redis", "key": "uri"},
}
GCS_ELSEWHERE = {
    "redisAddress": "redis.example:6379",
    "existingSecret": "their-redis",
    "usernameKey": "user",
    "passwordKey": "secret",
}
VALUES: dict[str, Object] = {
    "defaults": {},
    "cpu": {"workers": {"device": "cpu", "tolerations": []}, "routers": {"replicas": 1}},
    "tensor parallel": {
        "workers": {
            "tensorParallel": 4,
            "sharedMemory": "16Gi",
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "podAnnotations": {"note": "ours"},
        }
    },
    "other accelerators": {"workers": {"gpuResource": "nvidia.com/mig-3g.40gb"}},
    "autoscaling": {"workers": {"min": 2, "max": 8}},
    "from no worker": {"workers": {"min": 0, "max": 3}},
    "routers that follow requests": {
        "routers": {"replicas": 2, "max": 6},
        "config": {"autoscale": {"requests_per_router": 100}},
    },
    "fixed workers": {"workers": {"min": 3, "max": 3}},
    "model on a claim": {
        "model": {"name": "/models/llama", "volume": {"persistentVolumeClaim": "models"}}
    },
    "model in an image": {
        "model": {"name": "/llm/llama", "volume": {"image": "example/llama:1", "mountPath": "/llm"}}
    },
    "model of a hub": {
        "model": {"name": "org/name", "revision": "v2", "hub": {"existingSecret": "hub"}}
    },
    "cache on a claim": {
        "model": {"name": "org/name", "cache": {"size": "200Gi", "storageClassName": "shared"}}
    },
    "cache on nodes": {"model": {"name": "org/name", "cache": {"hostPath": "/var/lib/models"}}},
    "cache on another claim": {"model": {"name": "org/n", "cache": {"existingClaim": "hub"}}},
    "pods of one's own": {
        "commonLabels": {"kueue.x-k8s.io/queue-name": "llm"},
        "serviceAccount": {"create": True, "annotations": {"iam/role": "models"}},
        "envFrom": [{"secretRef": {"name": "proxy"}}],
        "extraVolumes": [{"name": "certs", "configMap": {"name": "certs"}}],
        "extraVolumeMounts": [{"name": "certs", "mountPath": "/etc/ssl/ours", "readOnly": True}],
        "workers": {
            "podLabels": {"team": "ml"},
            "podSpec": {
                "priorityClassName": "high",
                "runtimeClassName": "nvidia",
                "schedulerName": "volcano",
                "initContainers": [
                    {"name": "wait", "image": "busybox:1", "command": ["sh", "-c", "true"]}
                ],
            },
        },
        "head": {"podSpec": {"priorityClassName": "low"}},
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-more"},
                "data": {"key": "value"},
            }
        ],
    },
    "several groups": {
        "workers": {
            "min": 1,
            "max": 9,
            "groups": [
                {
                    "name": "spot",
                    "maxPods": 8,
                    "nodeSelector": {"pool": "spot"},
                    "tolerations": [{"key": "spot", "operator": "Exists"}],
                },
                {"name": "on-demand", "resources": {"limits": {"memory": "64Gi"}}},
            ],
        }
    },
    "several fixed groups": {
        "workers": {
            "min": 3,
            "max": 3,
            "groups": [{"name": "a", "pods": 2}, {"name": "b", "pods": 1, "maxPods": 4}],
        }
    },
    "workers over nodes": {
        "workers": {"min": 2, "max": 2, "tensorParallel": 16, "nodesPerWorker": 2}
    },
    "several models": {
        "model": {"name": "org/big", "volume": {"persistentVolumeClaim": "models"}},
        "config": {
            "router": {"tool_format": "hermes"},
            "worker": {"max_num_seqs": 9, "num_threads": 2},
            "autoscale": {"ttft_target": 3},
        },
        "workers": {
            "min": 2,
            "max": 2,
            "tensorParallel": 4,
            "nodesPerWorker": 2,
            "nodeSelector": {"gpu": "h200"},
            "sharedMemory": "16Gi",
        },
        "models": {
            "small": {
                "name": "/models/small.gguf",
                "workers": {
                    "min": 2,
                    "max": 3,
                    "tensorParallel": 1,
                    "nodeSelector": {"gpu": "l4"},
                    "groups": [{"name": "spot", "maxPods": 1}, {"name": "on-demand"}],
                },
                "config": {
                    "served_model_names": ["s"],
                    "worker": {"num_threads": 3},
                    "autoscale": {"drain_target": 5},
                },
            },
            "one": {"name": "org/one", "revision": "v2", "workers": {"gpuResource": "mig"}},
        },
    },
    "ledger elsewhere": {"ledger": EXTERNAL, "gcsFaultTolerance": {"enabled": False}},
    "all elsewhere, over TLS": {
        "ledger": EXTERNAL | {"tls": {"existingSecret": "tls", "clientCertificate": True}},
        "gcsFaultTolerance": GCS_ELSEWHERE,
    },
    "TLS": {
        "tls": {"clients": {"existingSecret": "clients"}, "internal": {"existingSecret": "inside"}}
    },
    "mutual TLS": {
        "tls": {"clients": {"existingSecret": "clients", "mutual": True, "testSecret": "tester"}}
    },
    "keys in a Secret": {
        "access": {
            "mode": "file",
            "existingSecret": "who",
            "key": "who.yaml",
            "test": {"existingSecret": "probe", "key": "it"},
        }
    },
    "keys in the ledger": {
        "access": {"mode": "ledger"},
        "ledger": EXTERNAL | {"tls": {"existingSecret": "tls"}},
        "gcsFaultTolerance": GCS_ELSEWHERE,
        "config": {"ledger": {"shards": 4}},
    },
    "durable": {
        "ledger": {
            "durabilityClass": "always",
            "embedded": {
                "existingSecret": "passwords",
                "maxMemoryMiB": 4096,
                "resources": {"limits": {"memory": "8G"}},
                "persistence": {"size": "50Gi", "storageClassName": "fast"},
            },
        }
    },
    "nothing kept": {"ledger": {"durabilityClass": "memory"}},
    "exposed": {
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "gw"}],
            "hostnames": ["llm.example"],
            "http": {"enabled": True, "hostnames": ["web.example"]},
        },
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "llm.example",
            "tlsSecret": "cert",
            "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"},
            "http": {
                "enabled": True,
                "host": "web.example",
                "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
            },
        },
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"lb": "internal"}},
    },
    "exposed on two listeners": {
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "gw", "sectionName": "grpc"}],
            "hostnames": ["llm.example"],
            "http": {"enabled": True, "parentRefs": [{"name": "gw", "sectionName": "http"}]},
        },
    },
    "watched": {
        "monitoring": {
            "port": 9999,
            "serviceMonitor": {"enabled": True, "labels": {"team": "ml"}},
            "prometheusRule": {"enabled": True, "labels": {"team": "ml"}},
            "dashboard": {"enabled": True},
        }
    },
    "traced": {
        "config": {"router": {"trace_endpoint": "https://otel.example:4317", "trace_sample": 0.1}},
        "env": [
            {
                "name": "OTEL_EXPORTER_OTLP_HEADERS",
                "valueFrom": {"secretKeyRef": {"name": "otel", "key": "headers"}},
            },
            {"name": "OTEL_SERVICE_NAME", "value": "chat"},
        ],
    },
    "closed": {
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
            "operator": [{"namespaceSelector": {"matchLabels": {"name": "kuberay"}}}],
            "monitoring": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        }
    },
    "open": {
        "networkPolicy": {"enabled": False},
        "rayAuth": {"enabled": False},
        "routers": {"podDisruptionBudget": {"enabled": False}},
        "workers": {"min": 3, "max": 3, "podDisruptionBudget": {"enabled": False}},
        "upgrade": {"strategy": "None"},
    },
    "own names and settings": {
        "fullnameOverride": "chat",
        "image": {"repository": "example/everlift", "tag": "v9", "pullSecrets": [{"name": "r"}]},
        "rayAuth": {"existingSecret": "token"},
        "config": {
            "log_level": "debug",
            "worker": {"max_num_seqs": 64, "num_threads": 3, "dtype": "float32"},
            "router": {
                "drain": 9.5,
                "on_ledger_loss": "strict",
                "cors_origins": ["https://chat.example"],
                "max_body_bytes": 1 << 20,
            },
            "ledger": {"retention": 60},
            "autoscale": {"ttft_target": 1},
        },
    },
}


def both_routes(grpc: list[str], http: list[str], **http_values: object) -> Object:
    return {
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "gw"}],
            "hostnames": grpc,
            "http": {"enabled": True, "hostnames": http, **http_values},
        }
    }


#: Values whose GRPCRoute and HTTPRoute conflict: no Gateway accepts both.
CLASHES = [
    both_routes([], []),
    both_routes(["llm.example"], []),
    both_routes(["llm.example"], ["llm.example"]),
    both_routes(["a.example", "llm.example"], ["b.example", "llm.example"]),
    both_routes(["*.example"], ["llm.example"]),
    both_routes(["a.llm.example"], ["*.example"]),
    both_routes(["llm.example"], [], parentRefs=[{"name": "gw", "sectionName": "https"}]),
]


@pytest.fixture(scope="module")
def helm() -> Iterator[Helm]:
    with running_helm() as helm:
        yield helm


# The cache saves 0.03 s per object: each schema of Kubernetes is parsed once.
utils.schema_contents = cache(utils.schema_contents)


class Renderings(dict[str, Rendered]):
    """Chart with each of VALUES, rendered at its first use."""

    def __init__(self, helm: Helm) -> None:
        super().__init__()
        self._helm = helm

    def __missing__(self, name: str) -> Rendered:
        self[name] = self._helm.render(VALUES[name])
        return self[name]


@pytest.fixture(scope="module")
def rendered(helm: Helm) -> Renderings:
    return Renderings(helm)


def test_chart_alerts_and_dashboard_match_deploy(rendered: dict[str, Rendered]) -> None:
    watched, deploy = rendered["watched"], CHART.parent / "deploy"
    rule = watched.the("PrometheusRule")
    alerts = (deploy / "prometheus" / "alerts.yaml").read_text()
    # The alert must ignore the routers of other releases.
    ours = f'absent(everlift_router_ready{{job="{NAMESPACE}/{RELEASE}-everlift"}})'
    assert "absent(everlift_router_ready)" in alerts
    expected = alerts.replace("absent(everlift_router_ready)", ours)
    assert rule["spec"] == yaml.safe_load(expected)
    assert rule["metadata"]["labels"]["team"] == "ml"
    dashboard = watched.the("ConfigMap", "-dashboard")
    shown = json.loads(dashboard["data"]["everlift.json"])
    assert shown == json.loads((deploy / "grafana" / "everlift.json").read_text())
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert not {"PrometheusRule", "ServiceMonitor"} & rendered["defaults"].kinds


def test_chart_passes_helm_lint(helm: Helm) -> None:
    assert helm.lint() == []


@pytest.mark.parametrize("name", VALUES)
def test_chart_objects_are_valid_for_kubernetes(rendered: Renderings, name: str) -> None:
    versions = (OLDEST, NEWEST) if name == "defaults" else (NEWEST,)
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x"},
            "spec": group["template"]["spec"],
        }
        for group in rendered[name].groups
    ]
    own = [each for each in rendered[name].objects if each["kind"] not in UNCHECKED]
    for version in versions:
        for each in own + pods:
            kubernetes_validate.validate(each, version, strict=True)


def pod(rendered: Rendered, group: str) -> Object:
    spec: Object = rendered.group(group)["template"]["spec"]
    return spec


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("cache on a claim", {"persistentVolumeClaim": {"claimName": "ev-everlift-models"}}),
        ("cache on another claim", {"persistentVolumeClaim": {"claimName": "hub"}}),
        ("cache on nodes", {"hostPath": {"path": "/var/lib/models", "type": "DirectoryOrCreate"}}),
    ],
)
def test_chart_caches_hub_models(rendered: dict[str, Rendered], name: str, source: Object) -> None:
    for group in ("routers", "workers"):
        spec = pod(rendered[name], group)
        assert {"name": "hub"} | source in spec["volumes"]
        [container] = spec["containers"]
        [mount] = [it for it in container["volumeMounts"] if it["name"] == "hub"]
        assert {"name": "HF_HOME", "value": mount["mountPath"]} in container["env"]
        assert not mount.get("readOnly")
    assert "hub" not in [it["name"] for it in pod(rendered[name], "head")["volumes"]]
    claims = [it for it in rendered[name].objects if it["kind"] == "PersistentVolumeClaim"]
    assert len(claims) == (name == "cache on a claim")
    for claim in claims:
        assert claim["spec"]["resources"]["requests"] == {"storage": "200Gi"}
        assert claim["spec"]["storageClassName"] == "shared"
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_chart_pods_include_extras_of_the_values(rendered: dict[str, Rendered]) -> None:
    own = rendered["pods of one's own"]
    worker, router, head = (pod(own, group) for group in ("workers", "routers", "head"))
    assert worker["priorityClassName"] == "high" and head["priorityClassName"] == "low"
    assert "priorityClassName" not in router
    assert (worker["runtimeClassName"], worker["schedulerName"]) == ("nvidia", "volcano")
    assert [it["name"] for it in worker["initContainers"]] == ["wait"]
    for spec in (worker, router, head):
        [container] = spec["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "proxy"}}]
        assert {"name": "certs", "configMap": {"name": "certs"}} in spec["volumes"]
        assert "certs" in [it["name"] for it in container["volumeMounts"]]
    # The head has the account of KubeRay, which permits Ray's autoscaler to create pods.
    accounts = [spec.get("serviceAccountName") for spec in (worker, router, head)]
    assert accounts == ["ev-everlift", "ev-everlift", None]
    account = own.the("ServiceAccount")
    assert account["metadata"]["name"] == "ev-everlift"
    assert account["metadata"]["annotations"] == {"iam/role": "models"}
    assert own.the("ConfigMap", "ev-more")["data"] == {"key": "value"}
    queue = {"kueue.x-k8s.io/queue-name": "llm"}
    for each in own.objects:
        if each["metadata"]["name"] != "ev-more":
            assert queue.items() <= each["metadata"]["labels"].items()
    labels = own.group("workers")["template"]["metadata"]["labels"]
    assert (queue | {"team": "ml"}).items() <= labels.items()
    # Selectors must not include the additional labels.
    assert not queue.keys() & own.the("Service", "ev-everlift")["spec"]["selector"].keys()


def test_chart_worker_groups_override_defaults(rendered: dict[str, Rendered]) -> None:
    several = rendered["several groups"]
    spot, on_demand = several.group("spot"), several.group("on-demand")
    assert (spot["maxReplicas"], on_demand["maxReplicas"]) == (8, 2147483647)
    assert (spot["minReplicas"], spot["replicas"]) == (0, 0)
    assert pod(several, "spot")["nodeSelector"] == {"pool": "spot"}
    assert "nodeSelector" not in pod(several, "on-demand")
    default = pod(rendered["defaults"], "workers")["tolerations"]
    assert pod(several, "spot")["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert pod(several, "on-demand")["tolerations"] == default
    limits = [
        pod(several, it)["containers"][0]["resources"]["limits"] for it in ("spot", "on-demand")
    ]
    assert [it["memory"] for it in limits] == ["32Gi", "64Gi"]
    assert all(it["nvidia.com/gpu"] == 1 for it in limits)
    fixed = rendered["several fixed groups"]
    assert [fixed.group(name)["replicas"] for name in "ab"] == [2, 1]


def test_chart_router_autoscaling_follows_requests(rendered: dict[str, Rendered]) -> None:
    scaled = rendered["routers that follow requests"]
    router, worker = scaled.deployments["router"], scaled.deployments["worker"]
    assert "num_replicas" not in router
    bounds = router["autoscaling_config"]
    assert (bounds["min_replicas"], bounds["max_replicas"]) == (2, 6)
    assert router["user_config"]["autoscale"] == {"worker": {"requests_per_router": 100}}
    assert worker["num_replicas"] == 1
    # Ray's autoscaler creates the pods of all groups, as many as Serve requests.
    assert scaled.ray["enableInTreeAutoscaling"]
    assert scaled.group("routers")["maxReplicas"] == NO_BOUND
    module, _, name = bounds["policy"]["policy_function"].partition(":")
    assert ROUTER_POLICY == f"{module}:{name}"


def test_chart_worker_spans_several_pods(rendered: dict[str, Rendered]) -> None:
    spread = rendered["workers over nodes"]
    group = spread.group("workers")
    assert (group["replicas"], group["rayStartParams"]["num-gpus"]) == (4, "8")
    limits = pod(spread, "workers")["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 8
    assert spread.settings["nodes_per_worker"] == 2
    assert spread.settings["worker"]["tensor_parallel"] == 16


def test_chart_toleration_change_makes_a_new_ray_cluster(helm: Helm) -> None:
    """KubeRay changes no pods of a running Ray cluster: a changed configuration makes a new one."""
    tolerations = [{"key": "spot", "operator": "Exists"}]
    for group in ("head", "routers", "workers"):
        changed = helm.render({group: {"tolerations": tolerations}})
        assert _as_compared(changed) != _as_compared(helm.render())


@pytest.fixture(scope="module")
def rayservice_schema() -> Object:
    """Return the schema of KubeRay, whose CRDs are outside of this repository (CRD_DIR)."""
    directory = os.environ.get("CRD_DIR")
    if not directory:
        pytest.skip("CRD_DIR names no directory with KubeRay's CRDs (rayservices.yaml)")
    crd = yaml.load((Path(directory) / "rayservices.yaml").read_text(), yaml.CSafeLoader)
    [schema] = (each["schema"] for each in crd["spec"]["versions"] if each["name"] == "v1")
    return _closed(schema["openAPIV3Schema"])


def _closed(schema: Any) -> Any:
    """Return the schema without formats; it rejects unknown fields, as ``kubectl apply`` does."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items() if name != "format"}
    if "properties" in closed and closed.get("type") == "object":
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    return closed


@pytest.mark.parametrize("name", VALUES)
def test_chart_rayservice_matches_the_kuberay_schema(
    rendered: dict[str, Rendered], rayservice_schema: Object, name: str
) -> None:
    jsonschema.Draft202012Validator(rayservice_schema).validate(
        # A CRD does not describe metadata.
        rendered[name].the("RayService") | {"metadata": {}}
    )


def test_kuberay_schema_rejects_an_unknown_key(
    rendered: dict[str, Rendered], rayservice_schema: Object
) -> None:
    service = deepcopy(rendered["defaults"].the("RayService")) | {"metadata": {}}
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["tempalte"] = {}
    with pytest.raises(jsonschema.ValidationError, match="tempalte"):
        jsonschema.Draft202012Validator(rayservice_schema).validate(service)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 3}, "'replicas' not allowed"),
        ({"workers": {"gpus": 3}}, "'gpus' not allowed"),
        ({"ledger": {"embedded": {"persistence": {"class": "fast"}}}}, "'class' not allowed"),
        ({"workers": {"tensorParallel": 0}}, "/workers/tensorParallel"),
        ({"workers": {"device": "tpu"}}, "'cuda', 'cpu'"),
        ({"service": {"port": "x"}}, "/service/port"),
        ({"config": {"max_num_seqs": 3}}, "'max_num_seqs' not allowed"),
        ({"config": {"worker": {"max_seqs": 3}}}, "'max_seqs' not allowed"),
        ({"config": {"worker": {"grammar": {"x": 3}}}}, "'x' not allowed"),
        ({"config": {"worker": {"max_num_seqs": "many"}}}, "got string, want integer"),
        ({"config": {"worker": {"dtype": "fp8"}}}, "'bfloat16'"),
        ({"workers": {"min": 4}}, r"workers.max \(1\) must be at least workers.min \(4\)"),
        ({"ledger": {"durabilityClass": "replicated"}}, "needs ledger.external"),
        ({"access": {"mode": "file"}}, "access.existingSecret: must be set"),
        ({"access": {"mode": "ledger", "existingSecret": "who"}}, "is for access.mode file"),
        ({"access": {"mode": "open"}}, "'off', 'file', 'ledger'"),
        ({"ledger": {"embedded": {"enabled": False}}}, "ledger.external.existingSecret: must"),
        ({"ledger": {"external": {"existingSecret": "x"}}}, "ledger.embedded.enabled to false"),
        ({"ledger": {"tls": {"existingSecret": "x"}}}, "has no TLS"),
        ({"ledger": EXTERNAL | {"tls": {"clientCertificate": True}}}, "ledger.tls.existingSecret"),
        ({"ledger": EXTERNAL}, "gcsFaultTolerance.redisAddress: must be set"),
        ({"gcsFaultTolerance": {"redisAddress": "x:1"}}, "are for ledger.external"),
        (
            {"ledger": EXTERNAL, "gcsFaultTolerance": GCS_ELSEWHERE | {"existingSecret": ""}},
            "gcsFaultTolerance.existingSecret: must be set with gcsFaultTolerance.usernameKey",
        ),
        ({"model": {"volume": {"image": "a", "persistentVolumeClaim": "b"}}}, "not both"),
        ({"model": {"volume": {"persistentVolumeClaim": "a"}}}, "model.name: must be set"),
        (
            {"ledger": {"embedded": {"maxMemoryMiB": 4096}}},
            r"limits.memory \(2Gi\) must be above ledger.embedded.maxMemoryMiB \(4096\)",
        ),
        ({"model": {"revision": "v1"}}, r"is for a hub id \(org/name\)"),
        ({"model": {"name": "/models/x", "revision": "v1"}}, r"is for a hub id \(org/name\)"),
        (
            {"env": [{"name": "EVERLIFT_WORKER__MAX_NUM_SEQS", "value": "8"}]},
            "env: EVERLIFT_WORKER__MAX_NUM_SEQS: settings are not read",
        ),
        ({"service": {"port": 8000}}, r"service.httpPort \(8000\) must be another port"),
        ({"monitoring": {"port": 443}}, "/monitoring/port"),
        ({"monitoring": {"port": 8000}}, "monitoring.port: 8000 is already used in a router's pod"),
        ({"monitoring": {"port": 8080}}, "monitoring.port: 8080 is already used in a router's pod"),
        ({"tls": {"clients": {"mutual": True}}}, "tls.clients.existingSecret: must be set"),
        ({"tls": {"clients": {"testSecret": "x"}}}, "tls.clients.mutual: must be set"),
        ({"gateway": {"enabled": True}}, "gateway.parentRefs: must be set"),
        ({"gateway": {"http": {"enabled": True}}}, "gateway.http.parentRefs: must be set"),
        *((gateway, "gateway.http.hostnames: a Gateway accepts only one") for gateway in CLASHES),
        ({"gateway": {"http": {"timeout": "soon"}}}, "does not match pattern"),
        ({"gateway": {"http": {"hostnames": [{}]}}}, "got object, want string"),
        ({"workers": {"nodesPerWorker": 2}}, r"\(2\) must divide workers.tensorParallel \(1\)"),
        ({"workers": {"groups": [{"name": "routers"}]}}, "the name routers is already used"),
        ({"workers": {"groups": [{"name": "a"}, {"name": "a"}]}}, "the name a is already used"),
        (
            {"workers": {"groups": [{"name": "a"}]}},
            "the groups have 0 pods in total, but the workers need 1",
        ),
        (
            {"workers": {"max": 4, "groups": [{"name": "a", "pods": 1}]}},
            "a: pods is only for a fixed number of workers; set maxPods",
        ),
        ({"workers": {"groups": [{"size": 2}]}}, "'size' not allowed"),
        ({"routers": {"podSpec": {"containers": []}}}, "routers.podSpec.containers: is set by"),
        ({"model": {"cache": {"size": "1Gi", "hostPath": "/m"}}}, "set one of size, existingClaim"),
        ({"models": {"a": {"revision": "v1"}}}, "missing property 'name'"),
        ({"models": {"A": {"name": "org/a"}}}, "'A' does not match pattern"),
        ({"models": {"a": {"name": "/a", "revision": "v1"}}}, "models.a.revision: is for a hub id"),
        (
            {"models": {"a": {"name": "org/a", "workers": {"min": 3}}}},
            r"models.a.workers.max \(1\) must be at least models.a.workers.min \(3\)",
        ),
        (
            {"models": {"a": {"name": "org/a", "workers": {"device": "cpu"}}}},
            "'device' not allowed",
        ),
        (
            {"models": {"a": {"name": "org/a", "workers": {"groups": [{"name": "workers"}]}}}},
            "models.a.workers.groups: the name workers is already used",
        ),
        (
            {"models": {"a": {"name": "org/a", "workers": {"podSpec": {"volumes": []}}}}},
            "models.a.workers.podSpec.volumes: is set by the chart",
        ),
        (
            {"models": {"a": {"name": "org/a", "config": {"worker": {"tensor_parallel": 2}}}}},
            "models.a.config.worker.tensor_parallel: is set by models.a.workers.tensorParallel",
        ),
        (
            {"models": {"a": {"name": "org/a", "config": {"model": "org/b"}}}},
            "models.a.config.model: is set by models.a.name",
        ),
        (
            {"models": {"a": {"name": "org/a", "config": {"autoscale": {"max_routers": 2}}}}},
            "models.a.config.autoscale.max_routers: is set by routers.max",
        ),
        ({"ingress": {"enabled": True}}, "ingress.host: must be set"),
        ({"ingress": {"http": {"enabled": True}}}, "ingress.http.host: must be set"),
    ],
)
def test_chart_rejects_invalid_values(helm: Helm, values: Object, message: str) -> None:
    with pytest.raises(Refused, match=message):
        helm.render(values)


SET_BY_CHART: dict[str, str] = yaml.safe_load((CHART / "files/chart_settings.yaml").read_text())


@pytest.mark.parametrize("path", SET_BY_CHART)
def test_chart_refuses_its_own_settings_with_the_value_to_set(helm: Helm, path: str) -> None:
    *sections, name = path.split(".")
    config: Any = {name: "x"}
    for section in reversed(sections):
        config = {section: config}
    with pytest.raises(Refused, match=rf"config\.{path}: is set by {SET_BY_CHART[path]}"):
        helm.render({"config": config})


@pytest.mark.parametrize(
    ("memory", "is_enough"),
    [
        ("1Gi", False),
        ("1025Mi", True),
        ("1.5Gi", True),
        ("1.1G", True),
        ("1073M", False),
        ("1048576Ki", False),
        (1 << 30, False),
        (1 << 31, True),
        # Other notations are accepted without a check.
        ("1500000000000m", True),
        ("1e3", True),
        (None, True),
    ],
)
def test_chart_ledger_memory_limit_exceeds_max_memory(
    helm: Helm, memory: object, is_enough: bool
) -> None:
    values = {"ledger": {"embedded": {"resources": {"limits": {"memory": memory}}}}}
    if is_enough:
        helm.render(values)
    else:
        with pytest.raises(Refused, match=r"must be above ledger.embedded.maxMemoryMiB \(1024\)"):
            helm.render(values)


def test_chart_reserved_settings_and_their_values_exist() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    keys = settings.Keys(Config)
    for path, source in SET_BY_CHART.items():
        assert path in keys or path == "models"
        if re.fullmatch(r"\w+\.[\w.]+", source):
            assert isinstance(at(values, source), str | int | bool)


def test_chart_schema_accepts_every_setting() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["config"]
    taken = set(_leaves(schema["properties"], lambda each: each.get("properties")))
    every = set(_leaves(settings.to_dict(Config()), lambda each: each))
    assert taken == every > SET_BY_CHART.keys()
    assert {"router.cors_origins", "router.max_message_bytes", "router.trace_endpoint"} <= taken


def _leaves(tree: Object, inside: Callable[[Any], Any], section: str = "") -> Iterator[str]:
    """Yield the paths of the entries for which ``inside`` returns no entries."""
    for name, value in tree.items():
        if isinstance(below := inside(value), dict) and below:
            yield from _leaves(below, inside, f"{section}{name}.")
        else:
            yield f"{section}{name}"


def at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


@pytest.mark.parametrize(
    ("value", "setting"),
    [
        ("service.port", "router.port"),
        ("service.httpPort", "router.http_port"),
        ("workers.tensorParallel", "worker.tensor_parallel"),
        ("workers.min", "autoscale.min_workers"),
        ("ledger.durabilityClass", "ledger.durability_class"),
        ("ledger.embedded.maxMemoryMiB", "ledger.maxmemory_mib"),
    ],
)
def test_chart_defaults_match_everlift(value: str, setting: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert at(values, value) == at(settings.to_dict(Config()), setting)


@pytest.mark.parametrize("name", VALUES)
def test_chart_settings_load_as_a_config(rendered: dict[str, Rendered], name: str) -> None:
    application = rendered[name].application
    assert application["import_path"] == f"{build.__name__}:{build.application.__name__}"
    assert (application["name"], application["route_prefix"]) == (deployments.APPLICATION, None)
    release = rendered[name]
    # Settings of deployments must not be args as well.
    assert build._divided(application["args"])[1] == []
    config = load(None, {}, options=release.settings)
    build.check_shown(config)
    assert config.num_routers == release.group("routers")["replicas"]
    for workers in config.groups:
        scaling = workers.autoscale
        first = scaling.min_workers if scaling.is_on else workers.num_workers
        groups = [each for each in release.worker_groups if component(each) == workers.label]
        pods = sum(group["replicas"] for group in groups)
        # With several groups all start at 0, and Ray's autoscaler chooses among them.
        assert pods in (first * workers.nodes_per_worker, 0)
        if len(groups) == 1:
            most = workers.most_workers * workers.nodes_per_worker
            # Ray's autoscaler creates as many pods as Serve requests.
            assert groups[0]["maxReplicas"] in (most, NO_BOUND)
    assert config.ledger.url == EMBEDDED


def component(group: Object) -> str:
    found: str = group["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
    return found


def test_chart_models_have_their_own_settings(rendered: dict[str, Rendered]) -> None:
    release = rendered["several models"]
    config = load(None, {}, options=release.settings)
    big, one, small = config.groups
    assert [group.model for group in config.groups] == ["org/big", "org/one", "small"]
    assert (one.worker.model_revision, small.worker.model) == ("v2", "/models/small.gguf")
    sizes = [(it.worker.tensor_parallel, it.nodes_per_worker) for it in (big, one, small)]
    assert sizes == [(4, 2), (4, 1), (1, 1)]
    assert [it.worker.num_threads for it in (big, one, small)] == [2, 2, 3]
    assert [it.most_workers for it in (big, one, small)] == [2, 1, 3]
    assert (small.autoscale.min_workers, small.autoscale.drain_target) == (2, 5)
    assert {it.autoscale.ttft_target for it in (big, one, small)} == {3}
    assert [it.tool_format for it in config.router.models] == ["hermes"] * 3
    assert config.router.more_models[1].served_model_names == ("s",)
    bounds = release.deployments["worker-small"]["autoscaling_config"]
    # The leader reports the load of the model under this name.
    assert bounds["policy"]["policy_kwargs"]["model"] == small.model


def test_chart_models_have_their_own_pods(rendered: dict[str, Rendered]) -> None:
    release = rendered["several models"]
    names = [group["groupName"] for group in release.worker_groups]
    assert names == ["workers", "workers-one", "spot", "on-demand"]
    big, one, spot = (release.group(name) for name in ("workers", "workers-one", "spot"))
    assert [component(each) for each in (big, one, spot)] == [
        "worker",
        "worker-one",
        "worker-small",
    ]
    assert [each["rayStartParams"]["num-gpus"] for each in (big, one, spot)] == ["2", "4", "1"]
    assert [each["rayStartParams"]["num-cpus"] for each in (big, one, spot)] == ["4", "8", "3"]
    selectors = [pod(release, name)["nodeSelector"] for name in ("workers", "workers-one", "spot")]
    assert selectors == [{"gpu": "h200"}, {"gpu": "h200"}, {"gpu": "l4"}]
    assert container(one)["resources"]["limits"] == {"memory": "32Gi", "mig": 4}
    assert (one["maxReplicas"], spot["maxReplicas"]) == (NO_BOUND, 1)


def test_chart_workers_stay_on_pods_of_their_model(rendered: dict[str, Rendered]) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _get_ray_resources_from_group_spec as resources,
    )

    release = rendered["several models"]
    for workers in load(None, {}, options=release.settings).groups:
        for group in release.worker_groups:
            found = resources(group, False).get(workers.worker_resource, 0)
            ranks = workers.worker.tensor_parallel // workers.nodes_per_worker
            assert found == (ranks if component(group) == workers.label else 0)


def test_chart_models_have_disruption_budgets(rendered: dict[str, Rendered]) -> None:
    release = rendered["several models"]
    # The two workers of the first model have two pods each.
    for name, label, available in (
        ("-workers", "worker", 3),
        ("-workers-small", "worker-small", 1),
    ):
        budget = release.the("PodDisruptionBudget", name)["spec"]
        assert budget["minAvailable"] == available
        selector = budget["selector"]["matchLabels"]
        selected = {
            component(each) for each in release.groups if selects(selector, each["template"])
        }
        assert selected == {label}
    budgets = [each for each in release.objects if each["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == 3


def test_chart_merges_user_settings(rendered: dict[str, Rendered]) -> None:
    config = settings.load(Config, rendered["own names and settings"].settings)
    assert (config.log_level, config.worker.max_num_seqs) == ("debug", 64)
    assert (config.router.drain, config.router.on_ledger_loss) == (9.5, "strict")
    assert config.router.cors_origins == ("https://chat.example",)
    assert config.router.max_body_bytes == 1 << 20
    assert (config.ledger.retention, config.autoscale.ttft_target) == (60, 1)
    # The settings of the chart itself are in the same sections.
    assert (config.router.host, config.worker.device) == ("0.0.0.0", "cuda")


@pytest.mark.parametrize(
    "other",
    [
        {"models": {"a": {"name": "org/a", "workers": {"max": 6}}}},
        {
            "models": {
                "a": {
                    "name": "org/a",
                    "workers": {"max": 4},
                    "config": {"autoscale": {"ttft_target": 9}},
                }
            }
        },
        {"routers": {"replicas": 5}},
        {"workers": {"min": 3, "max": 7}},
        {"config": {"log_level": "debug"}},
        {"config": {"router": {"order": "shortest", "max_queued": 9}}},
        {"config": {"autoscale": {"ttft_target": 9}}},
    ],
)
@pytest.mark.filterwarnings("ignore")  # warnings of Serve
def test_chart_run_time_settings_keep_the_code_version(helm: Helm, other: Object) -> None:
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeApplicationSchema

    shape = {"workers": {"max": 4}, "models": {"a": {"name": "org/a", "workers": {"max": 4}}}}
    before, after = (
        ServeApplicationSchema.model_validate(helm.render(values).application)
        for values in (shape, shape | other)
    )
    assert before != after
    assert get_app_code_version(before) == get_app_code_version(after)


def test_chart_renders_large_numbers_as_integers(helm: Helm) -> None:
    """Helm's numbers are floating point, and print as 2.097152e+06."""
    release = helm.render(
        {
            "ledger": {
                "embedded": {"maxMemoryMiB": 2 << 20, "resources": {"limits": {"memory": "4Ti"}}}
            },
            "config": {"router": {"max_queued": 10_000_000}},
        }
    )
    assert "maxmemory 2097152mb\n" in release.the("ConfigMap")["data"]["valkey.conf"]
    assert settings.load(Config, release.settings).router.max_queued == 10_000_000
    release = helm.render(
        {
            "upgrade": {"deletionDelaySeconds": 1_000_000},
            "autoscaler": {"idleTimeoutSeconds": 2_000_000},
            "routers": {"replicas": 3_000_000},
            "workers": {"min": 1_000_000, "max": 4_000_000, "tensorParallel": 1 << 20},
        }
    )
    assert release.the("RayService")["spec"]["rayClusterDeletionDelaySeconds"] == 1_000_000
    assert release.ray["autoscalerOptions"]["idleTimeoutSeconds"] == 2_000_000
    routers, workers = release.group("routers"), release.group("workers")
    replicas = ("replicas", "minReplicas", "maxReplicas")
    assert (routers["replicas"], workers["replicas"]) == (3_000_000, 1_000_000)
    assert release.settings["autoscale"]["max_workers"] == 4_000_000
    fixed = helm.render({"workers": {"min": 1_000_000, "max": 1_000_000}}).group("workers")
    assert [fixed[name] for name in replicas] == [1_000_000] * 3
    assert fixed["template"]["metadata"]["annotations"]["everlift/replicas"] == "1000000"
    assert workers["rayStartParams"]["num-gpus"] == "1048576"
    budget = release.the("PodDisruptionBudget", "-routers")["spec"]
    assert budget["minAvailable"] == 2_999_999


#: Texts that YAML does not read as strings without quotes.
NO_STRINGS = ["42", "on", "1e3", "null"]
#: Fields that must be strings in objects of Kubernetes and other projects.
TEXTS = {
    "name",
    "key",
    "secretName",
    "claimName",
    "mountPath",
    "storageClassName",
    "ingressClassName",
    "interval",
    "storage",
    "sizeLimit",
}


@pytest.mark.parametrize("text", NO_STRINGS)
def test_chart_quotes_strings_of_other_types(helm: Helm, text: str) -> None:
    """The texts are the name of the release, and the names in its values."""
    secret = {"existingSecret": text, "key": text}
    release = {"nameOverride": text, "image": {"tag": text}}
    inside = {
        "model": {
            "name": text,
            "volume": {"persistentVolumeClaim": text, "mountPath": text},
            "hub": secret,
        },
        "access": {"mode": "file", **secret, "test": secret},
        "tls": {
            "clients": {"existingSecret": text, "mutual": True, "testSecret": text},
            "internal": {"existingSecret": text, "name": text},
        },
        "workers": {"sharedMemory": text},
        "ledger": {
            "embedded": {
                "existingSecret": text,
                "persistence": {"size": text, "storageClassName": text},
            }
        },
        "monitoring": {"serviceMonitor": {"enabled": True, "interval": text}},
        "rayAuth": {"existingSecret": text},
        "ingress": {"enabled": True, "className": text, "host": text, "tlsSecret": text},
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": text}],
            "hostnames": ["a.example"],
            "http": {"enabled": True, "hostnames": ["b.example"]},
        },
    }
    elsewhere = {
        "fullnameOverride": text,
        "ledger": {
            "embedded": {"enabled": False},
            "external": secret,
            "tls": {"existingSecret": text},
        },
        "gcsFaultTolerance": {
            "redisAddress": text,
            "existingSecret": text,
            "passwordKey": text,
            "usernameKey": text,
        },
    }
    for values in (release, inside, elsewhere):
        for each in helm.render(values, release=text).objects:
            assert not [*_no_strings(each, "")], each["kind"]


def test_chart_quotes_a_numeric_digest(helm: Helm) -> None:
    values = {"ledger": {"embedded": {"maxMemoryMiB": 856}}}
    # The digest has sixteen hexadecimal digits, which here include no letter.
    assert _digest(helm.render(values, release="chat")) == "1990706499710654"


def _digest(release: Rendered) -> Any:
    template = release.the("StatefulSet")["spec"]["template"]
    return template["metadata"]["annotations"]["everlift/configuration"]


def _no_strings(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of labels, annotations and names in ``value`` that are not strings."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _no_strings(each, f"{path}[{index}]")
    elif isinstance(value, dict):
        of_texts = path.endswith(("abels", "nnotations", "rayStartParams"))
        for name, each in value.items():
            if (of_texts or name in TEXTS) and not isinstance(each, str | dict | list):
                yield f"{path}.{name}"
            yield from _no_strings(each, f"{path}.{name}")


def test_chart_workers_request_gpus(rendered: dict[str, Rendered]) -> None:
    release = rendered["tensor parallel"]
    group = release.group("workers")
    spec, resources = group["template"]["spec"], container(group)["resources"]
    assert resources["limits"] == {"memory": "32Gi", "nvidia.com/gpu": 4}
    assert resources["requests"] == {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": 4}
    assert group["rayStartParams"]["num-cpus"] == "4"
    worker = release.settings["worker"]
    assert (worker["device"], worker["tensor_parallel"]) == ("cuda", 4)
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert group["template"]["metadata"]["annotations"]["note"] == "ours"
    [memory] = (each for each in spec["volumes"] if each["name"] == "shared-memory")
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    other = rendered["other accelerators"].group("workers")
    assert container(other)["resources"]["limits"] == {
        "memory": "32Gi",
        "nvidia.com/mig-3g.40gb": 1,
    }
    assert other["rayStartParams"]["num-gpus"] == "1"


def test_chart_cpu_workers_request_no_gpu(rendered: dict[str, Rendered]) -> None:
    release = rendered["cpu"]
    worker = container(release.group("workers"))
    assert worker["resources"]["limits"] == {"memory": "32Gi"}
    assert "num-gpus" not in release.group("workers")["rayStartParams"]
    assert release.settings["worker"]["device"] == "cpu"
    assert worker["image"] == "everlift:0.1.0-cpu"
    assert container(rendered["defaults"].group("workers"))["image"] == "everlift:0.1.0"


@pytest.mark.parametrize(
    ("name", "group", "autoscale"),
    [
        ("defaults", (1, 1, 1), None),
        ("fixed workers", (3, 3, 3), None),
        ("autoscaling", (2, 0, NO_BOUND), {"min_workers": 2, "max_workers": 8}),
        ("from no worker", (0, 0, NO_BOUND), {"min_workers": 0, "max_workers": 3}),
    ],
)
def test_chart_worker_pods_follow_the_worker_bounds(
    rendered: dict[str, Rendered], name: str, group: tuple[int, int, int], autoscale: object
) -> None:
    release = rendered[name]
    workers = release.group("workers")
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == group
    assert release.settings.get("autoscale") == autoscale
    assert release.ray.get("enableInTreeAutoscaling", False) is (autoscale is not None)
    # Ray's autoscaler, in the pod of the head, is the only client of the Kubernetes API.
    tokens = [each["template"]["spec"]["automountServiceAccountToken"] for each in release.groups]
    assert tokens == [autoscale is not None, False, False]


@pytest.mark.parametrize(
    "other",
    [
        {"routers": {"replicas": 4}},
        {"workers": {"min": 2, "max": 2}},
        {"workers": {"min": 2, "max": 5}},
        {"workers": {"min": 1, "max": 1}},
    ],
)
def test_chart_pod_count_change_makes_a_new_ray_cluster(helm: Helm, other: Object) -> None:
    """Changed pod counts must also change the pods.

    KubeRay compares Ray clusters without the sizes of their groups, and changes no size in a
    running one (RayServiceReconciler).
    """
    before = helm.render({"workers": {"min": 3, "max": 3}})
    after = helm.render({"workers": {"min": 3, "max": 3}} | other)
    assert _as_compared(before) != _as_compared(after)


@pytest.mark.parametrize(
    "other",
    [
        {"routers": {"replicas": 4}},
        {"workers": {"min": 1, "max": 9}},
        {"workers": {"min": 0, "max": 8}},
    ],
)
def test_chart_autoscaling_bounds_reach_the_running_cluster(helm: Helm, other: Object) -> None:
    before = helm.render({"workers": {"min": 1, "max": 8}})
    after = helm.render({"workers": {"min": 1, "max": 8}} | other)
    assert before.settings != after.settings
    assert _as_compared(before) == _as_compared(after)
    # The Ray cluster must therefore contain no bounds: they would stay the old ones.
    for group in before.groups[1:]:
        assert (group["minReplicas"], group["maxReplicas"]) == (0, NO_BOUND)


def _as_compared(release: Rendered) -> Object:
    """Return the part of a release that KubeRay compares."""
    spec = deepcopy(release.ray)
    for group in spec["workerGroupSpecs"]:
        for name in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(name, None)
    return spec


def test_chart_autoscaled_pods_never_restart(rendered: dict[str, Rendered]) -> None:
    """A restarted container would start Ray again, and the pod would never be released."""

    def policies(name: str) -> list[str]:
        groups = rendered[name].groups
        return [each["template"]["spec"].get("restartPolicy", "Always") for each in groups]

    assert policies("autoscaling") == ["Always", "Never", "Never"]
    assert policies("fixed workers") == ["Always", "Always", "Always"]


def test_chart_node_resources_are_read_by_ray(rendered: dict[str, Rendered]) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _get_ray_resources_from_group_spec as resources,
    )

    release = rendered["own names and settings"]
    head, routers, workers = release.groups
    assert resources(head, True)["CPU"] == 0
    assert {**resources(routers, False), "memory": 0} == {
        "CPU": 0,
        "memory": 0,
        release.settings["router_resource"]: 1,
    }
    assert (resources(workers, False)["CPU"], resources(workers, False)["GPU"]) == (3, 1)


def test_chart_groups_have_their_own_probes(rendered: dict[str, Rendered]) -> None:
    head, router, worker = map(container, rendered["exposed"].groups)
    assert router["readinessProbe"]["httpGet"] == {"path": READY, "port": "router-metrics"}
    ray = {"path": "/api/local_raylet_healthz", "port": 52365}
    assert head["readinessProbe"]["httpGet"] == {"path": "/api/gcs_healthz", "port": "dashboard"}
    for each in (head, router, worker):
        assert each["livenessProbe"]["httpGet"] == ray


def covers(hostname: str, other: str) -> bool:
    """Return whether a route's hostname, which may begin with a wildcard, matches another one."""
    return hostname == other or (hostname.startswith("*.") and other.endswith(hostname[1:]))


def share_a_listener(one: Object, other: Object) -> bool:
    return (one["name"], one.get("namespace")) == (other["name"], other.get("namespace")) and all(
        key not in one or key not in other or one[key] == other[key]
        for key in ("sectionName", "port")
    )


def share_a_hostname(one: list[str], other: list[str]) -> bool:
    pairs = [(a, b) for a in one for b in other]
    return not one or not other or any(covers(a, b) or covers(b, a) for a, b in pairs)


@pytest.mark.parametrize("name", VALUES)
def test_chart_gateway_routes_share_no_hostname_and_listener(
    rendered: dict[str, Rendered], name: str
) -> None:
    """A shared hostname would make the Gateway refuse one route (GRPCRoute.spec.hostnames)."""
    release = rendered[name]
    if not {"GRPCRoute", "HTTPRoute"} <= release.kinds:
        return
    grpc, http = release.the("GRPCRoute")["spec"], release.the("HTTPRoute")["spec"]
    pairs = [(a, b) for a in grpc["parentRefs"] for b in http["parentRefs"]]
    if any(share_a_listener(a, b) for a, b in pairs):
        assert not share_a_hostname(grpc.get("hostnames", []), http.get("hostnames", []))


def test_chart_service_selects_only_routers(rendered: dict[str, Rendered]) -> None:
    release = rendered["exposed"]
    service = release.the("Service", "ev-everlift")["spec"]
    assert [selects(service["selector"], pod) for pod in release.pods] == [
        pod["metadata"]["labels"]["app.kubernetes.io/component"] == "router" for pod in release.pods
    ]
    port, http = service["ports"]
    assert (service["type"], port["port"], port["targetPort"]) == ("LoadBalancer", 443, "serve")
    assert (http["port"], http["targetPort"]) == (8000, "http")
    assert named_port(release.group("routers"), "http") == 8000
    assert release.settings["router"]["http_port"] == 8000
    # A process without root must not listen on 443.
    assert named_port(release.group("routers"), "serve") == 50051
    assert release.settings["router"]["port"] == 50051
    # KubeRay would prefer a port of that name of the head.
    assert named_port(release.group("head"), "serve") is None
    [serve] = release.the("RayService")["spec"]["serveService"]["spec"]["ports"]
    assert serve == {"name": "serve", "port": 50051}


def selects(selector: Object, pod: Object) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def named_port(group: Object, name: str) -> int | None:
    ports = {each["name"]: each["containerPort"] for each in container(group).get("ports", [])}
    return ports.get(name)


#: Services and paths of a router that are exposed to external clients.
KSERVE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
SERVICES = {"everlift.v1.Inference", KSERVE, "grpc.health.v1.Health"}
PATHS = {
    "/v1",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/health",
    "/ping",
    "/version",
    "/openapi.json",
}


def test_chart_grpc_routes_expose_only_inference(rendered: dict[str, Rendered]) -> None:
    release = rendered["exposed"]
    [rule] = release.the("GRPCRoute")["spec"]["rules"]
    assert {match["method"]["service"] for match in rule["matches"]} == SERVICES
    assert rule["backendRefs"] == [{"name": "ev-everlift", "port": 443}]
    ingress = release.the("Ingress", "ev-everlift")
    assert leads_to(ingress) == {f"/{name}": "grpc" for name in SERVICES}
    assert ingress["metadata"]["annotations"] == {
        "nginx.ingress.kubernetes.io/backend-protocol": "GRPC"
    }
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example"], "secretName": "cert"}]


def test_chart_http_routes_expose_the_openai_api_only(rendered: dict[str, Rendered]) -> None:
    route = rendered["exposed"].the("HTTPRoute")["spec"]
    assert (route["parentRefs"], route["hostnames"]) == ([{"name": "gw"}], ["web.example"])
    [rule] = route["rules"]
    assert {match["path"]["value"] for match in rule["matches"]} == PATHS
    assert rule["backendRefs"] == [{"name": "ev-everlift", "port": 8000}]
    # Streams have no time limit.
    assert rule["timeouts"] == {"request": "0s"}
    ingress = rendered["exposed"].the("Ingress", "-http")
    assert leads_to(ingress) == dict.fromkeys(PATHS, "http")
    assert ingress["metadata"]["annotations"] == {
        "nginx.ingress.kubernetes.io/proxy-buffering": "off"
    }
    assert ingress["spec"]["rules"][0]["host"] == "web.example"


def test_chart_exposed_paths_are_served() -> None:
    served = {re.sub("^/v1/.*", "/v1", path) for path in [*openapi.document()["paths"]]}
    assert PATHS - {"/openapi.json"} == served - {"/metrics", "/ready", "/load"}


def test_chart_exposes_nothing_by_default(rendered: dict[str, Rendered]) -> None:
    assert not {"Ingress", "GRPCRoute", "HTTPRoute"} & rendered["defaults"].kinds
    assert rendered["defaults"].the("Service", "everlift")["spec"]["type"] == "ClusterIP"


def leads_to(ingress: Object) -> dict[str, str]:
    """Return the Service's port for each path."""
    [rule] = ingress["spec"]["rules"]
    paths = rule["http"]["paths"]
    return {path["path"]: path["backend"]["service"]["port"]["name"] for path in paths}


def test_chart_mounts_models_in_routers_and_workers(rendered: dict[str, Rendered]) -> None:
    claim, image = rendered["model on a claim"], rendered["model in an image"]
    sources = [
        [volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "models"]
        for group in claim.groups
    ]
    pvc = {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    assert sources == [[], [pvc], [pvc]]
    assert claim.settings["model"] == "/models/llama"
    for group in image.groups[1:]:
        mounts = {each["name"]: each for each in container(group)["volumeMounts"]}
        assert mounts["models"] == {"name": "models", "mountPath": "/llm", "readOnly": True}
        [volume] = (v for v in group["template"]["spec"]["volumes"] if v["name"] == "models")
        assert volume["image"]["reference"] == "example/llama:1"
    hub = rendered["model of a hub"]
    assert (hub.settings["model"], hub.settings["model_revision"]) == ("org/name", "v2")
    assert environment(hub.group("workers"))["HF_TOKEN"] == secret("hub", "token")


def environment(group: Object) -> Object:
    return {
        each["name"]: each.get("value", each.get("valueFrom")) for each in container(group)["env"]
    }


def secret(name: str, key: str) -> Object:
    return {"secretKeyRef": {"name": name, "key": key}}


def test_chart_ledger_url_comes_from_a_secret(rendered: dict[str, Rendered]) -> None:
    for group in rendered["durable"].groups:
        assert environment(group)["LEDGER_PASSWORD"] == secret("passwords", "everlift")
        url = environment(group)["EVERLIFT_LEDGER__URL"]
        assert url == f"redis://everlift:$(LEDGER_PASSWORD)@ev-everlift-ledger.{NAMESPACE}.svc:6379"
        # Kubernetes expands only variables that precede the reference.
        assert [*environment(group)].index("LEDGER_PASSWORD") == 0
    for group in rendered["ledger elsewhere"].groups:
        assert environment(group)["EVERLIFT_LEDGER__URL"] == secret("their-redis", "uri")
    assert "StatefulSet" not in rendered["ledger elsewhere"].kinds


def test_chart_configures_tracing(rendered: dict[str, Rendered]) -> None:
    release = rendered["traced"]
    router = settings.load(Config, release.settings).router
    assert (router.trace_endpoint, router.trace_sample) == ("https://otel.example:4317", 0.1)
    for group in release.groups:
        assert environment(group)["OTEL_EXPORTER_OTLP_HEADERS"] == secret("otel", "headers")
        assert environment(group)["OTEL_SERVICE_NAME"] == "chat"
        assert "EVERLIFT_LEDGER__URL" in environment(group)


def test_chart_objects_contain_no_secret(rendered: dict[str, Rendered]) -> None:
    for release in rendered.values():
        assert "Secret" not in release.kinds
        for pod in release.pods:
            for each in pod["spec"]["containers"]:
                for variable in each.get("env", []):
                    if re.search("PASSWORD|TOKEN", variable["name"]):
                        assert "secretKeyRef" in variable["valueFrom"]
        assert not re.search(r"://\w*:(?!\$\()[^/\s@]+@", release.text)
        assert "url" not in release.settings["ledger"]


def test_chart_mounts_ledger_tls_files(rendered: dict[str, Rendered]) -> None:
    release = rendered["all elsewhere, over TLS"]
    ledger = settings.load(Config, release.settings).ledger
    directory = "/etc/everlift/ledger-tls"
    assert ledger.tls_ca == f"{directory}/ca.crt"
    assert (ledger.tls_cert, ledger.tls_key) == (f"{directory}/tls.crt", f"{directory}/tls.key")
    for group in release.groups:
        mounts = {each["name"]: each for each in container(group)["volumeMounts"]}
        assert mounts["ledger-tls"]["mountPath"] == directory


def test_chart_mounts_client_and_internal_certificates(rendered: dict[str, Rendered]) -> None:
    config = settings.load(Config, rendered["TLS"].settings)
    tls, internal = config.router.tls, config.internal_tls
    assert tls == Tls(cert=f"{CLIENTS_TLS}/tls.crt", key=f"{CLIENTS_TLS}/tls.key")
    assert internal == InternalTls(
        f"{INTERNAL_TLS}/ca.crt", f"{INTERNAL_TLS}/tls.crt", f"{INTERNAL_TLS}/tls.key"
    )
    assert [secrets_at(group) for group in rendered["TLS"].groups] == [
        {},
        {CLIENTS_TLS: "clients", INTERNAL_TLS: "inside"},
        {INTERNAL_TLS: "inside"},
    ]
    mutual = settings.load(Config, rendered["mutual TLS"].settings)
    assert mutual.router.tls == replace(tls, ca=f"{CLIENTS_TLS}/ca.crt")
    assert not mutual.internal_tls.is_on


CLIENTS_TLS, INTERNAL_TLS = "/etc/everlift/clients-tls", "/etc/everlift/internal-tls"


def secrets_at(group: Object) -> dict[str, str]:
    """Return the names of the mounted secrets by directory."""
    volumes = group["template"]["spec"]["volumes"]
    secrets = {each["name"]: each["secret"]["secretName"] for each in volumes if "secret" in each}
    mounts = container(group)["volumeMounts"]
    return {each["mountPath"]: secrets[each["name"]] for each in mounts if each["name"] in secrets}


def test_chart_test_pod_uses_client_tls(helm: Helm, rendered: dict[str, Rendered]) -> None:
    assert tls_variables(rendered["defaults"].the("Pod")) == {}
    assert tls_variables(rendered["TLS"].the("Pod")) == {"CA": "/etc/everlift/tls/ca.crt"}
    pod = rendered["mutual TLS"].the("Pod")
    assert tls_variables(pod) == {
        "CA": "/etc/everlift/tls/ca.crt",
        "CERT": "/etc/everlift/client-tls/tls.crt",
        "KEY": "/etc/everlift/client-tls/tls.key",
    }
    # The test pod must not get the private key of the routers.
    [trusted] = (each["secret"] for each in pod["spec"]["volumes"] if each["name"] == "tls")
    assert trusted == {"secretName": "clients", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    untested = helm.render({"tls": {"clients": {"existingSecret": "clients", "mutual": True}}})
    assert "Pod" not in untested.kinds
    assert "helm test" not in untested.notes


def tls_variables(pod: Object) -> dict[str, str]:
    """Return the TLS variables of a pod with one container, by their names without the prefix."""
    [only] = pod["spec"]["containers"]
    found = {each["name"]: each["value"] for each in only["env"]}
    prefix = "EVERLIFT_TLS_"
    names = {name.removeprefix(prefix): name for name in found if name.startswith(prefix)}
    assert set(names.values()) <= set(TLS_VARIABLES.values())
    return {short: found[name] for short, name in names.items()}


def test_chart_service_app_protocol_follows_tls(rendered: dict[str, Rendered]) -> None:
    protocols = [
        rendered[name].the("Service", "ev-everlift")["spec"]["ports"][0]["appProtocol"]
        for name in ("defaults", "TLS")
    ]
    assert protocols == ["kubernetes.io/h2c", "https"]


def test_chart_mounts_access_keys_in_routers_only(rendered: dict[str, Rendered]) -> None:
    with_keys = rendered["keys in a Secret"]
    settings = with_keys.settings["router"]
    assert (settings["access"], settings["access_file"]) == (
        "file",
        "/etc/everlift/access/who.yaml",
    )
    for group in with_keys.groups:
        spec = group["template"]["spec"]
        mounts = {each["name"]: each for each in container(group)["volumeMounts"]}
        volumes = {each["name"]: each for each in spec["volumes"]}
        is_router = group.get("groupName") == "routers"
        assert ("access" in mounts, "access" in volumes) == (is_router, is_router)
        if is_router:
            # The mount of a single file would not follow changes of its Secret.
            assert mounts["access"]["mountPath"] == "/etc/everlift/access"
            assert "subPath" not in mounts["access"]
            assert volumes["access"]["secret"] == {"secretName": "who", "defaultMode": 0o440}
    [test] = with_keys.the("Pod")["spec"]["containers"]
    assert {
        "name": "EVERLIFT_API_KEY",
        "valueFrom": {"secretKeyRef": {"name": "probe", "key": "it"}},
    } in test["env"]
    assert "access" not in rendered["defaults"].settings["router"]


def test_chart_notes_create_the_first_key_in_the_ledger(
    rendered: dict[str, Rendered],
) -> None:
    with_keys = rendered["keys in the ledger"]
    [line] = (each for each in with_keys.notes.splitlines() if "--set router.access" in each)
    options = dict(re.findall(r"--set ([a-z_.]+)=([^ )]+)", line))
    ledger = with_keys.settings["ledger"]
    # Client keys are stored independently of it.
    del ledger["active_key"]
    assert options.pop("router.access") == with_keys.settings["router"]["access"] == "ledger"
    assert options == {f"ledger.{name}": str(value) for name, value in ledger.items()}
    assert ledger.keys() == {"key_prefix", "durability_class", "shards", "tls_ca"}


def test_chart_gcs_fault_tolerance_uses_redis(rendered: dict[str, Rendered]) -> None:
    own = rendered["defaults"].ray["gcsFaultToleranceOptions"]
    assert own == {
        "redisAddress": f"redis://ev-everlift-ledger.{NAMESPACE}.svc:6379",
        "redisUsername": {"value": "ray"},
        "redisPassword": {"valueFrom": secret("ev-everlift-ledger", "ray")},
    }
    theirs = rendered["all elsewhere, over TLS"].ray["gcsFaultToleranceOptions"]
    assert theirs == {
        "redisAddress": "redis.example:6379",
        "redisUsername": {"valueFrom": secret("their-redis", "user")},
        "redisPassword": {"valueFrom": secret("their-redis", "secret")},
    }
    assert "gcsFaultToleranceOptions" not in rendered["ledger elsewhere"].ray


def test_chart_ray_requires_a_token_by_default(rendered: dict[str, Rendered]) -> None:
    assert rendered["defaults"].ray["authOptions"] == {"mode": "token"}
    own = rendered["own names and settings"].ray["authOptions"]
    assert own == {"mode": "token", "secretName": "token"}
    assert rendered["open"].ray["authOptions"] == {"mode": "disabled"}


@pytest.mark.parametrize("name", VALUES)
def test_chart_containers_are_confined(rendered: dict[str, Rendered], name: str) -> None:
    release = rendered[name]
    for pod in release.pods:
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        # Service links would add EVERLIFT_ variables, which would be read as settings.
        assert pod["spec"]["enableServiceLinks"] is False
        for each in pod["spec"]["containers"]:
            confined(each["securityContext"])
            assert set(each["resources"]) == {"requests", "limits"}
    if "autoscalerOptions" in release.ray:
        confined(release.ray["autoscalerOptions"]["securityContext"])


def confined(context: Object) -> None:
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_chart_writable_paths_are_volumes(rendered: dict[str, Rendered]) -> None:
    release = rendered["defaults"]
    for group in release.groups:
        volumes = {each["name"]: each for each in group["template"]["spec"]["volumes"]}
        writable = {
            mount["mountPath"]
            for mount in container(group)["volumeMounts"]
            if "emptyDir" in volumes[mount["name"]]
        }
        # Ray writes to /tmp.
        assert writable == {"/home/everlift", "/tmp", "/dev/shm"}
        assert environment(group)["HOME"] in writable
        assert release.settings["state_dir"].startswith("/home/everlift/")


def test_chart_network_policy_allows_pods_of_the_release(
    rendered: dict[str, Rendered],
) -> None:
    release = rendered["closed"]
    policy = release.the("NetworkPolicy", "ev-everlift")["spec"]
    [rule] = policy["ingress"]
    [peer] = rule["from"]
    # Pods with the shared labels admit each other.
    assert peer["podSelector"] == policy["podSelector"]
    assert [allowed(policy["podSelector"], pod) for pod in release.pods] == [
        True,
        True,
        True,
        False,
        False,
    ]


def allowed(selector: Object, pod: Object) -> bool:
    labels = pod["metadata"]["labels"]
    matches = {
        "Exists": lambda each: each["key"] in labels,
        "NotIn": lambda each: labels.get(each["key"]) not in each["values"],
    }
    return selects(selector["matchLabels"], pod) and all(
        matches[each["operator"]](each) for each in selector["matchExpressions"]
    )


def test_chart_network_policy_allows_workers_of_a_removed_model(
    rendered: dict[str, Rendered],
) -> None:
    """The old cluster serves the model until the new cluster replaces it."""
    selector = rendered["closed"].the("NetworkPolicy", "ev-everlift")["spec"]["podSelector"]
    old = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: allowed(selector, pod)
        for pod in rendered["several models"].pods
    }
    workers = {"worker": True, "worker-small": True, "worker-one": True}
    assert old == {"head": True, "router": True, **workers, "ledger": False, "test": False}
    # A pod without a component label does not belong to Ray.
    assert not allowed(selector, {"metadata": {"labels": selector["matchLabels"]}})


def test_chart_network_policies_admit_configured_peers(rendered: dict[str, Rendered]) -> None:
    given = VALUES["closed"]["networkPolicy"]
    routers = rendered["closed"].the("NetworkPolicy", "-routers")["spec"]["ingress"]
    clients, metrics = routers
    assert clients["ports"] == [{"port": "serve"}, {"port": "http"}]
    # `helm test` is a client too.
    *peers, test = clients["from"]
    assert peers == given["clients"]
    assert selects(test["podSelector"]["matchLabels"], rendered["closed"].the("Pod"))
    assert metrics == {"ports": [{"port": "router-metrics"}], "from": given["monitoring"]}
    operator, ray = rendered["closed"].the("NetworkPolicy", "-head")["spec"]["ingress"]
    assert operator == {"ports": [{"port": "dashboard"}], "from": given["operator"]}
    assert ray == {"ports": [{"port": "metrics"}], "from": given["monitoring"]}
    anybody, _ = rendered["defaults"].the("NetworkPolicy", "-routers")["spec"]["ingress"]
    assert "from" not in anybody
    assert "NetworkPolicy" not in rendered["open"].kinds


def test_chart_disruption_budgets_and_spread_select_groups(rendered: dict[str, Rendered]) -> None:
    release = rendered["autoscaling"]
    for component, group in (("router", "routers"), ("worker", "workers")):
        budget = release.the("PodDisruptionBudget", f"-{group}")["spec"]
        labels = release.group(group)["template"]["metadata"]["labels"]
        # One of two pods; with maxUnavailable Kubernetes allows no disruption if it finds no scale.
        assert (budget["minAvailable"], budget.get("maxUnavailable")) == (1, None)
        assert budget["selector"]["matchLabels"] == labels
        assert labels["app.kubernetes.io/component"] == component
        for each in release.group(group)["template"]["spec"]["topologySpreadConstraints"]:
            assert each["labelSelector"] == {"matchLabels": labels}
    assert "PodDisruptionBudget" not in rendered["open"].kinds


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"routers": 1}),
        ({"routers": {"replicas": 1}}, {}),
        ({"routers": {"replicas": 3}}, {"routers": 2}),
        ({"workers": {"min": 4, "max": 4}}, {"routers": 1, "workers": 3}),
        ({"workers": {"min": 2, "max": 8}}, {"routers": 1, "workers": 1}),
        ({"workers": {"min": 0, "max": 8}}, {"routers": 1}),
        # One of eight pods: without it, the other three pods of its worker are not ready.
        (
            {"workers": {"min": 2, "max": 2, "tensorParallel": 8, "nodesPerWorker": 4}},
            {"routers": 1, "workers": 7},
        ),
        ({"workers": {"tensorParallel": 8, "nodesPerWorker": 4}}, {"routers": 1}),
    ],
)
def test_chart_disruption_budgets_keep_all_pods_but_one(
    helm: Helm, values: Object, expected: dict[str, int]
) -> None:
    found = {
        each["metadata"]["name"].rpartition("-")[2]: each["spec"]["minAvailable"]
        for each in helm.render(values).objects
        if each["kind"] == "PodDisruptionBudget"
    }
    assert found == expected


def test_chart_worker_readiness_follows_ready_files(
    rendered: dict[str, Rendered], tmp_path: Path
) -> None:
    release = rendered["defaults"]
    *shell, script = container(release.group("workers"))["readinessProbe"]["exec"]["command"]
    assert release.settings["worker"]["ready_dir"] in script
    directory = tmp_path / "ready"

    def is_ready() -> bool:
        here = script.replace(release.settings["worker"]["ready_dir"], str(directory))
        return subprocess.run([*shell, here], capture_output=True, check=False).returncode == 0

    assert not is_ready()
    file = ReadyFile(str(directory))
    file.create()
    assert is_ready()
    with subprocess.Popen(["sleep", "0"]) as ended:
        pass
    file.remove()
    (directory / str(ended.pid)).touch()
    assert not is_ready()


def test_chart_service_monitor_selects_routers(rendered: dict[str, Rendered]) -> None:
    release = rendered["watched"]
    service, monitor = release.the("Service", "-metrics"), release.the("ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    [endpoint], [port] = monitor["spec"]["endpoints"], service["spec"]["ports"]
    assert endpoint["port"] == port["name"] == port["targetPort"]
    assert named_port(release.group("routers"), port["targetPort"]) == 9999
    assert release.settings["router"]["metrics_port"] == 9999
    assert selects(service["spec"]["selector"], release.group("routers")["template"])
    assert monitor["metadata"]["labels"]["team"] == "ml"
    # The monitor must select no other Service of the release.
    assert not selects(
        monitor["spec"]["selector"]["matchLabels"], release.the("Service", "-everlift")
    )


def test_chart_service_monitor_selects_the_head(helm: Helm) -> None:
    """Ray exports the gauges of the autoscaler on the head, which runs Serve's controller."""
    monitoring = {"monitoring": VALUES["watched"]["monitoring"]}
    release = helm.render({"workers": {"min": 1, "max": 4}} | monitoring)
    service, monitor = release.the("Service", "-ray-metrics"), release.the("ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    [port], head = service["spec"]["ports"], release.group("head")
    assert port["name"] in [each["port"] for each in monitor["spec"]["endpoints"]]
    # The default of KubeRay applies, because nothing overrides it.
    assert named_port(head, port["targetPort"]) == 8080
    assert "metrics-export-port" not in head["rayStartParams"]
    assert selects(service["spec"]["selector"], head["template"])
    policy = release.the("NetworkPolicy", "-head")["spec"]
    assert {"ports": [{"port": port["targetPort"]}]} in policy["ingress"]


def test_chart_metrics_job_includes_the_namespace(rendered: dict[str, Rendered]) -> None:
    """Alerts select by job, whose default is the name of the Service."""
    for endpoint in rendered["watched"].the("ServiceMonitor")["spec"]["endpoints"]:
        [relabeling] = endpoint["relabelings"]
        assert relabeling == {"targetLabel": "job", "replacement": f"{NAMESPACE}/ev-everlift"}


def prefix(helm: Helm, release: str = "ev", **values: Any) -> str:
    found: str = helm.render(values, release).settings["ledger"]["key_prefix"]
    return found


def test_chart_key_prefix_is_shared_by_compatible_clusters(helm: Helm) -> None:
    same = prefix(helm)
    assert re.fullmatch("ev-everlift-[0-9a-f]{8}", same)
    assert same == prefix(helm, workers={"max": 9, "tensorParallel": 2}, routers={"replicas": 5})
    assert same == prefix(helm, config={"worker": {"max_num_seqs": 3}, "log_level": "debug"})
    # An explicit default changes nothing.
    assert same == prefix(helm, config={"worker": {"dtype": "auto", "max_model_len": None}})


def test_chart_key_prefix_differs_by_model(helm: Helm) -> None:
    volumes = [{"image": "llama:1"}, {"image": "llama:2"}, {"persistentVolumeClaim": "llama:2"}]
    values: list[dict[str, Any]] = [
        {},
        {"model": {"name": "org/name"}},
        {"model": {"name": "org/name", "revision": "v2"}},
        *({"model": {"name": "/models/llama", "volume": volume}} for volume in volumes),
        {"config": {"worker": {"dtype": "float32"}}},
        {"config": {"worker": {"load_format": "dummy"}}},
        {"config": {"worker": {"max_model_len": 1024}}},
        {"models": {"a": {"name": "org/a"}}},
        {"release": "other"},
    ]
    assert len({prefix(helm, **each) for each in values}) == len(values)


def test_chart_active_key_is_one_per_release(helm: Helm) -> None:
    def key(release: str = "ev", **values: Any) -> str:
        ledger = helm.render(values, release).settings["ledger"]
        found: str = ledger["active_key"]
        assert found != ledger["key_prefix"]
        return found

    # The ACL of the ledger user permits keys with this prefix.
    assert key().startswith("ev-everlift-")
    assert key() == key(model={"name": "org/name"}, routers={"replicas": 5})
    assert key() != key(release="other")


def test_chart_model_change_makes_a_new_ray_cluster(helm: Helm) -> None:
    """The pods must differ: otherwise Serve would change the running cluster replica by replica."""
    one, other = helm.render(), helm.render({"model": {"name": "/models/llama"}})
    same = helm.render({"config": {"worker": {"max_num_seqs": 3}}})
    assert one.ray != other.ray
    assert one.ray == same.ray


# Names of Helm releases have at most 53 characters.
@pytest.mark.parametrize("release", ["ev", "everlift", "name" * 13 + "x"])
def test_chart_names_stay_within_kubernetes_limits(helm: Helm, release: str) -> None:
    rendered = helm.render(release=release)
    # KubeRay's limit for names.
    assert len(rendered.the("RayService")["metadata"]["name"]) <= 47
    for each in rendered.objects:
        assert len(each["metadata"]["name"]) <= 63


def test_chart_notes_and_test_hook_send_a_request(rendered: dict[str, Rendered]) -> None:
    release = rendered["exposed"]
    assert "create secret generic ev-everlift-ledger" in release.notes
    assert "create secret" not in rendered["durable"].notes
    # Port 443 needs root on the reader's machine as well.
    assert "port-forward service/ev-everlift 50051:443 &" in release.notes
    assert "everlift generate --address 127.0.0.1:50051" in release.notes
    pod = release.the("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    [test] = pod["spec"]["containers"]
    assert test["command"][:2] == ["everlift", "generate"]
    assert {"name": "EVERLIFT_ADDRESS", "value": f"ev-everlift.{NAMESPACE}.svc:443"} in test["env"]


def test_kubernetes_guide_shows_the_rendered_notes(helm: Helm) -> None:
    guide = (CHART.parent / "deploy" / "guides" / "kubernetes.md").read_text()
    [values] = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    [notes] = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    rendered = helm.render(yaml.safe_load(values), "chat", "llm")
    assert rendered.notes.endswith(notes.rstrip() + "\n")


def test_chart_notes_mention_helm_test_only_with_a_key(helm: Helm) -> None:
    keys = {"mode": "ledger"}
    assert "helm test" in helm.render().notes
    assert "helm test" not in helm.render({"access": keys}).notes
    with_key = keys | {"test": {"existingSecret": "probe"}}
    assert "helm test" in helm.render({"access": with_key}).notes


ROUTER, RANK = "ray::ServeReplica:everlift:router.wait", "ray::RankActor.wait"


@contextmanager
def processes(*titles: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run processes with these names; each reports SIGUSR1, and ends when its input is closed."""
    script = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print("signalled", flush=True))
print("ready", flush=True)
sys.stdin.read()
"""
    command = ("-c", script)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([title, *command], executable=sys.executable, **pipes)  # type: ignore[call-overload]
        for title in titles
    ]
    try:
        assert [read_line(each) for each in started] == ["ready"] * len(titles)
        yield started
    finally:
        for each in started:
            each.kill()
            each.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def leave(
    release: Rendered, group: str, directory: Path, pod: list[subprocess.Popen[str]], *times: int
) -> subprocess.Popen[bytes]:
    """Run the pre-stop hook of a pod with the processes ``pod``; ``times`` override its own."""
    directory.mkdir(exist_ok=True)
    for process in pod:
        (directory / str(process.pid)).symlink_to(f"/proc/{process.pid}")
    *command, script, name, before, at_most = hook(release.group(group))
    script = script.replace("/proc/", f"{directory}/")
    return subprocess.Popen([*command, script, name, *map(str, times or (before, at_most))])


def hook(group: Object) -> list[str]:
    found: list[str] = container(group)["lifecycle"]["preStop"]["exec"]["command"]
    return found


def test_worker_pre_stop_hook_signals_its_ranks(
    rendered: dict[str, Rendered], tmp_path: Path
) -> None:
    """The hook signals ranks only and waits over 1 s; all processes keep running."""
    with processes(RANK, RANK, "ray::ServeReplica:everlift:worker", "raylet") as pod:
        since = time.monotonic()
        leaving = leave(rendered["defaults"], "workers", tmp_path, pod)
        assert [read_line(rank) for rank in pod[:2]] == ["signalled"] * 2
        assert leaving.wait() == 0
        assert 1.0 < time.monotonic() - since < 10.0
        assert [process.poll() for process in pod] == [None] * 4
        assert [process.communicate()[0] for process in pod] == [""] * 4


def test_router_pre_stop_hook_waits_for_the_router(
    rendered: dict[str, Rendered], tmp_path: Path
) -> None:
    with processes(ROUTER, "ray::ServeReplica:everlift:worker") as [router, other]:
        leaving = leave(rendered["defaults"], "routers", tmp_path, [router, other], 0, 60)
        assert read_line(router) == "signalled"
        with pytest.raises(subprocess.TimeoutExpired):
            leaving.wait(0.5)
        router.communicate()
        assert leaving.wait(10.0) == 0
        assert other.communicate()[0] == ""


def test_router_pre_stop_hook_stops_waiting_at_its_limit(
    rendered: dict[str, Rendered], tmp_path: Path
) -> None:
    with processes(ROUTER) as [router]:
        assert leave(rendered["defaults"], "routers", tmp_path, [router], 0, 2).wait(20.0) == 0
        assert (read_line(router), router.poll()) == ("signalled", None)


def test_router_pre_stop_hook_returns_without_a_router(
    rendered: dict[str, Rendered], tmp_path: Path
) -> None:
    assert leave(rendered["defaults"], "routers", tmp_path, [], 0, 60).wait(10.0) == 0


@pytest.mark.parametrize(
    ("config", "drain"),
    [
        ({}, RouterConfig().drain),
        ({"router": {"drain": 9.5}}, 9.5),
        ({"router": {"drain": 600}}, 600),
        ({"router": {"drain": 0}}, 0),
        ({"router": {"heartbeat": 0.2}}, RouterConfig().drain),
    ],
)
def test_chart_router_grace_period_covers_the_drain(
    helm: Helm, config: Object, drain: float
) -> None:
    """The grace period also covers the hook, and leaves 10 s to Ray."""
    release = helm.render({"config": config})
    assert settings.load(Config, release.settings).router.drain == drain
    group = release.group("routers")
    before, at_most = map(int, hook(group)[-2:])
    # Serve waits 5 s longer than the drain as well.
    assert at_most >= drain + 5
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= before + at_most + 10


def test_chart_readme_discloses_untested_live_clusters() -> None:
    assert "never applied to a live cluster in CI" in (CHART / "README.md").read_text()
