"""Image for CPUs, built on a base of Debian's packages, and run as the chart runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from router.ledger.config import URL_VARIABLE, LedgerConfig
from router.ledger.embedded.embedded import EmbeddedLedger
from tests.image import containers
from tests.image.containers import ROOT, Container, container
from tests.support.chart import Rendered, running_helm
from tests.support.free_port import free_port

pytestmark = [pytest.mark.image, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]

TAG = "everlift:test-cpu"
#: Limit with the base of Debian's packages; 2.0 with python:3.11-slim, which is 70 MB smaller.
MOST_GIGABYTES = 2.5
PROMPT = {"messages": [{"role": "user", "content": "count from 17 to 30:"}], "temperature": 0}
COUNTED = "17 18 19 20 21 22 23 24 25 26 27 28 29 30"
_TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    yield found
    path = ROOT / "build" / "image.json"
    path.write_text(json.dumps({name: round(value, 2) for name, value in found.items()}, indent=2))
    print(f"\n{path}: {path.read_text()}")


@pytest.fixture(scope="module")
def root(figures: dict[str, float]) -> Iterator[str]:
    containers.check_tools()
    containers.make_base()
    began = time.monotonic()
    containers.build(TAG)
    figures["build_seconds"] = time.monotonic() - began
    yield containers.mounted(TAG)
    containers.clean_up()


@pytest.fixture(scope="module")
def chart() -> Rendered:
    values = {
        "routers": {"replicas": 1},
        "workers": {"device": "cpu", "min": 1, "max": 1},
        "config": {"worker": {"num_threads": 1}},
    }
    with running_helm() as helm:
        return helm.render(values)


def answer(url: str, network: Sequence[str] = ()) -> str:
    """Wait until the router answers; return the model's output."""
    deadline = time.monotonic() + _TIMEOUT_S
    command = ["curl", "-sf", f"{url}/v1/chat/completions", "-d", json.dumps(PROMPT)]
    header = ["-H", "content-type: application/json"]
    while (done := subprocess.run([*network, *command, *header], capture_output=True)).returncode:
        assert time.monotonic() < deadline, done
        time.sleep(0.1)
    return str(json.loads(done.stdout)["choices"][0]["message"]["content"]).strip()


def serve_status(api: str, network: Sequence[str], body: object = None) -> Any:
    """Return the status from Serve's REST API; if there is a ``body``, put it there instead."""
    put = () if body is None else ("-X", "PUT", "-H", "content-type: application/json", "-d", "@-")
    data = None if body is None else json.dumps(body).encode()
    done = subprocess.run(
        [*network, "curl", "-sf", *put, api], input=data, capture_output=True, check=True
    )
    return json.loads(done.stdout) if done.stdout else None


def run(root: str, directory: Path, *command: str) -> str:
    """Run a command in a container, check that it succeeds, and return its output."""
    with container(root, command, directory / "output") as started:
        assert started._process.wait(_TIMEOUT_S) == 0, started.output
        return started.output


def test_image_is_small_without_triton_or_compiler(root: str, figures: dict[str, float]) -> None:
    figures["gigabytes"] = containers.gigabytes(TAG)
    assert figures["gigabytes"] <= MOST_GIGABYTES
    found = Path(root).glob("usr/local/lib/python3*/*-packages/*")
    packages = [path.name.lower() for path in found]
    assert "torch" in packages
    assert not [name for name in packages if name.startswith(("triton", "nvidia"))]
    assert not [name for name in ("gcc", "g++", "cc") if Path(root, "usr/bin", name).exists()]


def test_image_has_labels_and_sbom(root: str) -> None:
    labels = json.loads(containers.buildah("inspect", "--type", "image", TAG))["OCIv1"]["config"][
        "Labels"
    ]
    named = {name.removeprefix("org.opencontainers.image.") for name in labels}
    assert named >= {"title", "description", "version", "revision", "created"}
    assert labels["org.opencontainers.image.revision"] == "test"
    bom = json.loads(Path(root, "usr/local/share/sbom/everlift.cdx.json").read_text())
    components = {component["name"].lower(): component for component in bom["components"]}
    assert bom["bomFormat"] == "CycloneDX"
    assert {"everlift", "torch", "ray", "grpcio"} <= components.keys()
    assert components["ray"]["version"] == "2.60.0"


def test_image_runs_unprivileged_and_read_only(root: str, tmp_path: Path) -> None:
    script = "id -u; grep CapEff /proc/self/status; touch /usr/x 2>&1; touch ~/x && echo written"
    lines = run(root, tmp_path, "sh", "-c", script).splitlines()
    assert lines[0] == "1000"
    assert lines[1].split()[1] == "0" * 16
    assert "Read-only file system" in lines[2]
    assert lines[3] == "written"


def test_image_passes_doctor(root: str, tmp_path: Path) -> None:
    said = json.loads(
        run(
            *(root, tmp_path, "everlift", "doctor", "--json"),
            *("--set", "router.port=0", "--set", "router.http_port=0"),
        )
    )
    assert said


def test_image_serves_until_stopped(root: str, figures: dict[str, float], tmp_path: Path) -> None:
    port, began = free_port(), time.monotonic()
    ports = (f"router.http_port={port}", "router.port=0", "router.metrics_port=0")
    sets = [word for port in ports for word in ("--set", port)]
    with container(root, ["everlift", "up", "--no-ray", *sets], tmp_path / "up") as up:
        up.until("Ctrl-C stops it")
        figures["start_seconds"] = time.monotonic() - began
        assert answer(f"http://127.0.0.1:{port}") == COUNTED
        figures["first_answer_seconds"] = time.monotonic() - began
        logs = up.file("/home/everlift/.local/state/everlift/logs")
        written = "".join(path.read_text() for path in logs.glob("*.log"))
        # The kernels are compiled in the build of the image.
        assert "slower code is used" not in written
        assert up.stop(30.0) < 30.0
    assert up._process.returncode == 0, up.output


def environment(chart: Rendered, group: str) -> dict[str, str]:
    """Return the environment variables of a group's container that are not secrets."""
    [first, *_] = chart.group(group)["template"]["spec"]["containers"]
    return {it["name"]: it["value"] for it in first["env"] if "value" in it}


def grace_s(chart: Rendered, group: str) -> float:
    return float(chart.group(group)["template"]["spec"]["terminationGracePeriodSeconds"])


def ray_start(*arguments: str) -> list[str]:
    """Return the command of a Ray container, as KubeRay writes it."""
    words = " ".join(("ray", "start", "--block", *arguments))
    return ["/bin/bash", "-c", "--", f"ulimit -n 65536; {words}"]


def test_image_serves_under_ray_and_ends_within_grace(
    root: str, figures: dict[str, float], chart: Rendered, tmp_path: Path
) -> None:
    gcs, dashboard, http = (free_port() for _ in range(3))
    # A short path, because paths of Unix sockets are limited in length.
    ledger = Path(tempfile.mkdtemp(prefix="ledger-"))
    server = EmbeddedLedger(LedgerConfig())
    own = {URL_VARIABLE: server.start(ledger)}
    # All users may connect, because the containers' user may be any user of this machine.
    for path in (ledger, *ledger.rglob("*")):
        path.chmod(0o777)
    memory = "--memory=2000000000 --object-store-memory=104857600 --node-ip-address=127.0.0.1"

    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ledger)
        stack.callback(server.stop)
        network = stack.enter_context(containers.network())

        def started(group: str, *arguments: str) -> Container:
            variables = environment(chart, group) | own
            agent = f"--dashboard-agent-listen-port={free_port()}"
            command = ray_start(*arguments, memory, agent, f"--metrics-export-port={free_port()}")
            output = tmp_path / group
            return stack.enter_context(
                container(root, command, output, variables, network, shared=ledger)
            )

        head = started(
            *("head", "--head", f"--port={gcs}", "--num-cpus=0"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        )
        head.until("will now block")
        resources = """--resources='{"everlift_router": 1, "everlift_worker": 1}'"""
        node = started("workers", f"--address=127.0.0.1:{gcs}", "--num-cpus=2", resources)
        node.until("will now block")

        application = chart.application
        application["args"]["router"] |= {"port": 0, "http_port": http, "metrics_port": 0}
        for listener in ("host", "http_host", "metrics_host"):
            application["args"]["router"][listener] = "127.0.0.1"
        api = f"http://127.0.0.1:{dashboard}/api/serve/applications/"
        serve_status(api, network, {"proxy_location": "Disabled", "applications": [application]})
        deadline = time.monotonic() + _TIMEOUT_S
        while (status := serve_status(api, network)["applications"]["everlift"])[
            "status"
        ] != "RUNNING":
            assert status["status"] != "DEPLOY_FAILED", json.dumps(status, indent=1)
            assert time.monotonic() < deadline, status
            time.sleep(0.5)
        assert answer(f"http://127.0.0.1:{http}", network) == COUNTED
        figures["worker_exit_seconds"] = node.stop(grace_s(chart, "workers"))
        figures["head_exit_seconds"] = head.stop(grace_s(chart, "head"))


def test_dockerfile_base_image_is_an_argument() -> None:
    """The tested image and `make image` use one Dockerfile, with different bases."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "ARG BASE=python:3.11" in text and "@sha256:" in text
    lines = subprocess.run(
        ["sh", "-n", ROOT / "tools" / "build_image.sh"], capture_output=True, text=True
    )
    assert lines.returncode == 0, lines.stderr
