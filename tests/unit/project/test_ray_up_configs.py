"""Files of deploy/ray-up: clusters are valid for Ray, settings for Everlift, scripts for bash."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import Config, load
from everlift.hub import is_hub_id
from router.ledger.config import LedgerConfig

FILES = Path(__file__).parents[3] / "deploy" / "ray-up"
CLUSTERS = sorted(path for path in FILES.glob("*.yaml") if path.name != "settings.yaml")


def prepared(path: Path) -> dict[str, Any]:
    """Prepare a configuration as `ray up` does; raises for a violation of Ray's schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(path.read_text()))
    validate_config(config)
    return dict(config)


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_ray_up_clusters_are_valid_for_ray(path: Path) -> None:
    config = prepared(path)
    nodes = config["available_node_types"]
    # Clusters of existing machines have a single node type.
    assert sum(node["max_workers"] for node in nodes.values()) >= config["max_workers"] > 0
    for role in ("head", "worker"):
        [command] = config[f"{role}_start_ray_commands"]
        assert command.endswith(f"node.sh {role}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_ray_up_mounts_resolve_in_the_root_of_a_clone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FILES.relative_to(FILES.parents[1])
    shutil.copytree(FILES, tmp_path / folder, ignore=shutil.ignore_patterns("secrets"))
    secrets(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    mounts = prepared(folder / path.name)["file_mounts"]
    assert {local for local in mounts.values() if not Path(local).is_dir()} == set()
    mounted = {
        f"{remote}/{file.relative_to(local)}"
        for remote, local in mounts.items()
        for file in Path(local).rglob("*")
    }
    scripts = {f"~/everlift/{folder}/{name}" for name in ("node.sh", "settings.yaml")}
    assert scripts | {"~/everlift-secrets/auth_token"} <= mounted


def test_ray_up_containers_use_the_built_image() -> None:
    project = tomllib.loads((FILES.parents[1] / "pyproject.toml").read_text())["project"]
    # This is the tag that tools/build_image.sh sets.
    tag = f"everlift:{project['version']}"
    clusters = [yaml.safe_load(path.read_text()) for path in CLUSTERS]
    images = {cluster["docker"]["image"] for cluster in clusters if "docker" in cluster}
    assert images == {f"registry.example/{tag}"}


@pytest.mark.filterwarnings("ignore")
def test_ray_up_unknown_key_is_rejected(tmp_path: Path) -> None:
    wrong = yaml.safe_load((FILES / "aws.yaml").read_text()) | {"idle_timeout": 5}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    with pytest.raises(Exception, match="idle_timeout"):
        prepared(tmp_path / "wrong.yaml")


def test_ray_up_settings_load_and_fit_the_clusters() -> None:
    config = load(FILES / "settings.yaml", {})
    assert is_hub_id(config.model)
    assert config.autoscale.is_on
    for path in CLUSTERS:
        most = config.groups[0].most_workers
        assert yaml.safe_load(path.read_text())["max_workers"] <= most


def test_ray_up_external_access_needs_keys_and_tls() -> None:
    assert load(FILES / "settings.yaml", {}).router.access == "ledger"
    with_tls = uncommented()
    assert with_tls.router.tls is not None and with_tls.internal_tls.is_on
    home = str(Path.home() / "everlift-secrets")
    paths = [with_tls.router.tls_cert, with_tls.router.tls_client_ca, with_tls.internal_tls.ca]
    assert all(path.startswith(home) for path in paths)


def test_ray_up_settings_have_a_second_model_to_uncomment() -> None:
    first, second = uncommented().groups
    assert is_hub_id(first.model) and is_hub_id(second.model)
    assert (second.label, second.autoscale.is_on) == ("worker-small", True)


def uncommented() -> Config:
    """Return the settings after all commented examples are enabled."""
    text = (FILES / "settings.yaml").read_text()
    values = re.sub(r"^#(?= *\w+:)", "", text, flags=re.MULTILINE)
    return load(None, {}, options=yaml.safe_load(values))


@pytest.mark.parametrize("script", sorted(FILES.glob("*.sh")), ids=lambda path: path.name)
def test_ray_up_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


def test_ray_up_node_uses_a_token_and_a_loopback_dashboard() -> None:
    script = (FILES / "node.sh").read_text()
    _, _, environment = script.partition("environment() {")
    body = environment.partition("}")[0]
    assert 'export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$SECRETS/auth_token"' in body
    for role in ("head", "worker"):
        steps = script.partition(f"\n{role})\n")[2].partition(";;")[0].replace("\\\n", "")
        before, _, start = steps.partition("start_ray ")
        assert "\n    environment " in before and "start_ray " not in start
        if role == "head":
            assert " --dashboard-host=127.0.0.1 " in start


def node(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run node.sh on a node with this home directory."""
    command, environment = ["bash", FILES / "node.sh", *arguments], os.environ | {"HOME": str(home)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@contextmanager
def running(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process whose id is in the file with the id of the ledger's process."""
    program = home / "everlift"
    program.write_text("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    command = [sys.executable, program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        state = home / ".local" / "state" / "everlift"
        state.mkdir(parents=True, exist_ok=True)
        (state / "ledger.pid").write_text(f"{process.pid}\n")
        try:
            yield process
        finally:
            process.kill()


def test_ray_up_login_shell_has_the_ledger_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray exec` uses a login shell, where `everlift key create` needs the cluster's ledger."""
    home, url = tmp_path / "a home", "rediss://u:p$w@redis.example:6379"
    programs, given = home / "everlift" / ".venv" / "bin", home / "everlift-secrets"
    programs.mkdir(parents=True)
    given.mkdir()
    (programs / "ray").symlink_to("/bin/true")
    (given / "ledger.url").write_text(url)
    monkeypatch.setenv("RAY_HEAD_IP", "10.0.0.10")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 5 10.0.0.11 22")
    assert node(home, "worker").returncode == 0

    def shell_output() -> list[str]:
        asked = '. ~/.bashrc; echo "${EVERLIFT_LEDGER__URL-none}"; command -v ray'
        environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
        shell = subprocess.run(["bash", "-c", asked], env=environment, capture_output=True)
        return shell.stdout.decode().splitlines()

    assert shell_output() == [url, str(programs / "ray")]
    (given / "ledger.url").unlink()
    assert shell_output() == ["none", str(programs / "ray")]


def test_ray_up_head_deploys_with_an_external_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, given = tmp_path / "everlift" / ".venv" / "bin", tmp_path / "everlift-secrets"
    programs.mkdir(parents=True)
    given.mkdir()
    (given / "ledger.url").write_text("rediss://user:password@redis.example:6379")
    for name in ("ray", "everlift", "serve"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 5 10.0.0.10 22")
    done = node(tmp_path, "head")
    assert done.returncode == 0, done.stderr
    state = tmp_path / ".local" / "state" / "everlift"
    assert done.stdout.splitlines()[-1] == f"serve deploy {state}/serve.yaml"
    assert (state / "serve.yaml").read_text().startswith("everlift build --config ")
    assert state.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("failures", "status"), [(0, 0), (2, 0), (3, 1)])
def test_ray_up_node_retries_a_failed_ray_start(
    failures: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, secrets = tmp_path / "everlift" / ".venv" / "bin", tmp_path / "everlift-secrets"
    programs.mkdir(parents=True)
    secrets.mkdir()
    (secrets / "ledger.url").write_text("redis://redis.example:6379")
    calls = tmp_path / "calls"
    ray = programs / "ray"
    ray.write_text(
        f'#!/bin/sh\necho "$1" >>{calls}\n'
        f'[ "$1" = stop ] || [ "$(grep -c start {calls})" -gt {failures} ]\n'
    )
    ray.chmod(0o755)
    monkeypatch.setenv("RAY_HEAD_IP", "10.0.0.10")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 5 10.0.0.11 22")
    assert node(tmp_path, "worker").returncode == status
    attempts = min(failures + 1, 3)
    assert calls.read_text().split() == ["stop", "start"] * attempts


def test_ray_up_stop_ledger_ends_only_its_process(tmp_path: Path) -> None:
    assert node(tmp_path, "stop-ledger").returncode == 0
    here = f"{tmp_path}/everlift/deploy/ray-up/settings.yaml"
    for arguments in (
        ["serve"],
        ["ledger", "--listen", "h:1", "--config", "/elsewhere/deploy/ray-up/settings.yaml"],
    ):
        with running(tmp_path, *arguments) as other:
            assert node(tmp_path, "stop-ledger").returncode == 0
            assert other.poll() is None
    # The ended ledger remains a zombie until `wait`; the command does not wait for that.
    with running(tmp_path, "ledger", "--listen", "h:1", "--config", here) as ledger:
        assert node(tmp_path, "stop-ledger").returncode == 0
        assert ledger.wait() == -signal.SIGTERM


def test_ray_up_node_prints_usage_without_arguments(tmp_path: Path) -> None:
    result = node(tmp_path)
    assert result.returncode == 2
    first, *_, last = result.stderr.splitlines()
    assert first.startswith(
        "Commands that `ray up` runs on a node:  node.sh setup | head | worker;"
    )
    assert last.split() == "ledger.url URL of an existing Redis or Valkey server".split()


def secrets(directory: Path, *arguments: str) -> dict[str, str]:
    """Return the files that secrets.sh creates in a copy of the folder."""
    shutil.copy(FILES / "secrets.sh", directory)
    subprocess.run(["bash", directory / "secrets.sh", *arguments], check=True)
    made = directory / "secrets"
    assert made.stat().st_mode & 0o077 == 0
    return {path.name: path.read_text().strip() for path in made.iterdir()}


def test_ray_up_secrets_are_private_and_created_once(tmp_path: Path) -> None:
    made = secrets(tmp_path)
    assert set(made) == {"auth_token", "ledger.password"}
    assert len(set(made.values())) == 2
    assert secrets(tmp_path) == made


def test_ray_up_secrets_are_complete_after_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "bin" / "openssl"
    failing.parent.mkdir()
    failing.write_text("#!/bin/sh\nexit 127\n")
    failing.chmod(0o755)
    with monkeypatch.context() as without_openssl:
        without_openssl.setenv("PATH", str(failing.parent), prepend=os.pathsep)
        for _ in range(2):
            with pytest.raises(subprocess.CalledProcessError):
                secrets(tmp_path)
    assert all(len(secret) == 64 for secret in secrets(tmp_path).values())


def test_ray_up_secrets_of_an_external_ledger_have_its_url(tmp_path: Path) -> None:
    made = secrets(tmp_path, "rediss://user:p%40ss@redis.example:6379")
    assert set(made) == {"auth_token", "ledger.url"}
    LedgerConfig(url=made["ledger.url"])
