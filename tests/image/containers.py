"""Images built by buildah, and containers isolated as Kubernetes isolates those of the chart."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "image"
BASE = "localhost/everlift-base"
TOOLS = ("buildah", "debootstrap", "bwrap", "setpriv", "ip")
VALUES = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text())
_STORAGE = ("--root", str(BUILD / "storage"), "--runroot", str(BUILD / "run"))


def buildah(*arguments: str) -> str:
    command = ("buildah", *_STORAGE, "--storage-driver", "vfs", *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


def check_tools() -> None:
    missing = [name for name in TOOLS if shutil.which(name) is None]
    assert not missing, (
        f"apt-get install buildah debootstrap bubblewrap iproute2: {missing} are missing"
    )
    assert os.geteuid() == 0, "a base image is made by root"


def make_base() -> None:
    """Make the base image from Debian's Python packages, if it does not exist."""
    if "everlift-base" in buildah("images", "--format", "{{.Name}}"):
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    directory = BUILD / "base"
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([ROOT / "tests" / "image" / "base.sh", directory], check=True)
    container = buildah("from", "scratch")
    buildah("add", container, str(directory), "/")
    buildah("config", "--cmd", "python3", container)
    buildah("commit", container, BASE)
    buildah("rm", container)
    shutil.rmtree(directory)


def build(tag: str) -> None:
    """Build the image for CPUs from the package index in this machine's pip configuration."""
    buildah(
        *("build", "--format", "docker", "--isolation", "chroot", "--network", "host"),
        *(f"--volume={path}:{path}:ro" for path in _pip_paths()),
        *(f"--volume={_pip_configuration()}:/etc/pip.conf:ro",),
        *("--build-arg", f"BASE={BASE}", "--build-arg", "VARIANT=cpu"),
        *("--build-arg", "TORCH_INDEX=", "--build-arg", "REVISION=test"),
        *("--file", "deploy/Dockerfile", "--tag", tag, "."),
    )


def _pip_settings() -> dict[str, str]:
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True).stdout
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2].strip(":")
        if name in ("cert", "index-url", "find-links"):
            settings[name] = value.strip("'\"").replace("\\n", " ")
    return settings


def _pip_configuration() -> Path:
    lines = (f"{name} = {value}\n" for name, value in _pip_settings().items())
    path = BUILD / "pip.conf"
    path.write_text("[global]\n" + "".join(lines))
    return path


def _pip_paths() -> set[str]:
    """Return the files and directories of this machine that the pip settings name."""
    words = " ".join(_pip_settings().values()).split()
    paths = {word.removeprefix("file://") for word in words}
    return {path for path in paths if path.startswith("/") and Path(path).exists()}


def gigabytes(tag: str) -> float:
    """Return the size of an image, including its base, in GB."""
    root = mounted(tag)
    size = subprocess.run(["du", "-sb", root], capture_output=True, text=True, check=True).stdout
    return int(size.split()[0]) / 1e9


def mounted(tag: str) -> str:
    """Mount an image, and return its root directory, which must not be written to."""
    name = f"{tag.replace(':', '-').rpartition('/')[2]}-mounted"
    if name not in buildah("containers", "--format", "{{.ContainerName}}").split():
        buildah("from", "--name", name, tag)
    return buildah("mount", name)


def clean_up() -> None:
    """Remove all but the base and the image: this storage has a full copy for each layer."""
    buildah("rm", "--all")
    buildah("rmi", "--prune")


class Container:
    """First process of a container: an unprivileged user without capabilities.

    The file system is read-only except for the home directory, /tmp and /dev/shm.
    """

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def pid(self) -> int:
        """Process id on the host."""
        deadline = time.monotonic() + 30.0
        own = self._process.pid
        while not (children := Path(f"/proc/{own}/task/{own}/children").read_text().split()):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return int(children[0])

    def file(self, path: str) -> Path:
        """Return the path on the host of a file in the container."""
        return Path(f"/proc/{self.pid}/root{path}")

    def until(self, text: str, seconds: float = 120.0) -> None:
        """Wait until the container's output has ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def stop(self, grace_s: float) -> float:
        """Send SIGTERM; return the seconds until the end, which must come within ``grace_s``."""
        began = time.monotonic()
        os.kill(self.pid, signal.SIGTERM)
        self._process.wait(grace_s)
        return time.monotonic() - began

    def kill(self) -> None:
        """Kill the first process of the container; the kernel then kills the others."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def network() -> Iterator[Sequence[str]]:
    """Make a network namespace with loopback only; yield the prefix of commands to run in it."""
    name = f"everlift-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield "ip", "netns", "exec", name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@contextmanager
def container(
    root: str,
    command: Sequence[str],
    output: Path,
    environment: Mapping[str, str] | None = None,
    network: Sequence[str] = (),
    shared: Path | None = None,
) -> Iterator[Container]:
    """Run a command in a container, in the host's network or in ``network``.

    A ``shared`` directory has the same path in the container.
    """
    security = VALUES["podSecurityContext"]
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/home/everlift",
        "PYTHONUNBUFFERED": "1",
        **(environment or {}),
    }
    writable = ("/tmp", "/home/everlift", "/dev/shm")
    isolated = (
        *("bwrap", "--ro-bind", root, "/", "--proc", "/proc", "--dev", "/dev"),
        *(word for path in writable for word in ("--perms", "1777", "--tmpfs", path)),
        *(("--bind", str(shared), str(shared)) if shared is not None else ()),
        *("--unshare-pid", "--unshare-ipc", "--die-with-parent", "--as-pid-1", "--clearenv"),
        *(word for name, value in variables.items() for word in ("--setenv", name, value)),
        *("--chdir", "/home/everlift"),
        *("setpriv", "--reuid", str(security["runAsUser"]), "--regid", str(security["runAsGroup"])),
        *("--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"),
    )
    with output.open("w") as file:
        process = subprocess.Popen(
            [*network, *isolated, *command], stdout=file, stderr=subprocess.STDOUT, text=True
        )
    started = Container(process, output)
    try:
        yield started
    finally:
        started.kill()
