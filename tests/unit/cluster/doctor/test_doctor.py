"""Findings of the doctor on a machine, for a ledger, and between unequal nodes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from cluster.config import DEMO_MODEL, Config, load
from cluster.doctor import certificates, command, ledger, machine
from cluster.doctor.finding import Finding, Level
from cluster.doctor.nodes import NodeReport, clocks, collect_reports, compare
from cluster.groups import ModelGroup
from everlift.tls import InternalTls
from router.ledger.config import LedgerConfig
from router.ledger.embedded.embedded import EmbeddedLedger
from tests.support.free_port import free_port
from tests.support.router.authority import Authority
from tests.support.worker.lora_files import write_adapter
from tests.support.worker.other_architectures import save_config

EVERLIFT = Path(sys.executable).with_name("everlift")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    ports = [f"router.port={free_port()}", f"router.http_port={free_port()}"]
    return load(None, {}, [f"state_dir={tmp_path}", "model=fake", *ports])


def test_doctor_names_missing_weights(config: Config, tmp_path: Path) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO_MODEL / name, directory)
    odd = replace(
        config,
        model=str(directory),
        worker=replace(config.worker, model=""),
        router=replace(config.router, model=""),
    )
    finding = of(list(machine.examine(odd)), "model")
    assert finding.level is Level.ERROR
    assert finding.says == f"{directory} lacks model.safetensors"


def test_doctor_rejects_an_unsupported_model(config: Config, tmp_path: Path) -> None:
    """The causes are an unknown architecture, an unsupported feature, and too long a context."""
    directory = tmp_path / "m"
    shutil.copytree(DEMO_MODEL, directory)
    values = json.loads((DEMO_MODEL / "config.json").read_text())

    def says(max_model_len: int | None = None, **changes: object) -> tuple[Level, str]:
        (directory / "config.json").write_text(json.dumps(values | changes))
        odd = replace(
            config,
            model=str(directory),
            worker=replace(config.worker, model="", max_model_len=max_model_len),
            router=replace(config.router, model=""),
        )
        finding = of(list(machine.examine(odd)), "model")
        return finding.level, finding.says

    assert says()[0] is Level.OK
    for cause, (level, text) in {
        "OwnForCausalLM is not supported": says(architectures=["OwnForCausalLM"]),
        "hidden_act": says(hidden_act="relu"),
        "max_model_len 999999 is more": says(max_model_len=999_999),
    }.items():
        assert level is Level.ERROR and cause in text, text


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    ],
)
def test_doctor_accepts_models_of_vllm_alone(
    changes: dict[str, Any], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    directory = tmp_path / "m"
    shutil.copytree(DEMO_MODEL, directory)
    values = json.loads((DEMO_MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | changes))
    foreign = served(config, directory)
    foreign = replace(foreign, worker=replace(foreign.worker, engine="vllm"))
    findings = list(machine.examine(foreign))
    assert of(findings, "model").level is Level.OK
    assert "kernels" not in {each.subject for each in findings}


@pytest.mark.parametrize("model", ["smollm2", "m.gguf"])
def test_doctor_rejects_a_gguf_file_for_vllm(config: Config, tmp_path: Path, model: str) -> None:
    odd = served(config, tmp_path / model if "." in model else Path(model))
    odd = replace(odd, worker=replace(odd.worker, engine="vllm"))
    finding = of(list(machine.examine(odd)), "model")
    assert finding.level is Level.ERROR and "GGUF file, which vLLM does not read" in finding.says


def test_doctor_names_the_download_of_a_packaged_model(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding = of(list(machine.examine(served(config, Path("smollm2")))), "model")
    assert finding.level is Level.ERROR and finding.mend == "run everlift download smollm2"


def test_doctor_tries_small_models_of_foreign_modules(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules alone show that a layer attends more than once."""
    directory = tmp_path / "m"
    shutil.copytree(DEMO_MODEL, directory)
    save_config(directory, "diffllama", "DiffLlamaForCausalLM")
    odd = replace(
        config,
        model=str(directory),
        worker=replace(config.worker, model=""),
        router=replace(config.router, model=""),
    )
    finding = of(list(machine.examine(odd)), "model")
    assert finding.level is Level.ERROR and "attends more than once" in finding.says
    monkeypatch.setattr(machine, "_TRIED_MIB", 0)
    monkeypatch.setattr(machine, "_weights_mib", lambda config: 1)
    finding = of(list(machine.examine(odd)), "model")
    assert finding.level is Level.WARNING and "too large to test" in finding.says


def test_doctor_examines_tls_files(config: Config, tmp_path: Path) -> None:
    assert list(certificates.examine(config)) == []
    (tmp_path / "bad").write_text("no PEM")
    names = {name: str(tmp_path / "bad") for name in ("ca", "cert", "key")}
    internal = replace(
        config,
        internal_tls=InternalTls(**names),
        router=replace(config.router, internal_tls=InternalTls()),
        worker=replace(config.worker, internal_tls=InternalTls()),
    )
    [finding] = certificates.examine(internal)
    assert (finding.subject, finding.level) == ("internal TLS", Level.ERROR)
    assert finding.says == f"{tmp_path / 'bad'}: must hold certificates in PEM"
    pair = Authority(tmp_path / "ours").issue("router")
    router = replace(config.router, tls_cert=str(pair.cert), tls_key=str(pair.key))
    [finding] = certificates.examine(replace(config, router=router))
    assert (finding.subject, finding.level) == ("TLS for clients", Level.OK)


def of(findings: Sequence[Finding], subject: str) -> Finding:
    [finding] = [each for each in findings if each.subject == subject]
    return finding


def test_doctor_finds_no_error_on_this_machine(config: Config) -> None:
    findings = list(machine.examine(config))
    assert [each for each in findings if each.level is Level.ERROR] == []
    assert of(findings, "model").says == "fake: 4096 tokens of context"


def test_doctor_examines_every_model(config: Config, tmp_path: Path) -> None:
    absent = replace(config, models={"small": ModelGroup(model=str(tmp_path / "absent"))})
    findings = list(machine.examine(absent))
    assert of(findings, "model").level is Level.OK
    missing = of(findings, "model small")
    assert missing.level is Level.ERROR and str(tmp_path / "absent") in missing.says
    assert missing.mend.startswith("set models.small.model to")
    present = replace(config, models={"demo": ModelGroup(model=str(DEMO_MODEL), num_workers=3)})
    findings = list(machine.examine(present))
    assert of(findings, "model demo").says.startswith("demo_model: ")
    alone = list(machine.examine(config))
    needed = [int(of(each, "memory").says.split()[0]) for each in (alone, findings)]
    assert needed[1] > 3 * needed[0]


@pytest.mark.parametrize(
    ("text", "free_mib"),
    [
        ("MemTotal:  64 kB\nMemFree:  1024 kB\nMemAvailable:   3145728 kB\nCached: 1 kB\n", 3072),
        ("MemFree:  1024 kB\n", 2048),
        (None, 2048),
    ],
)
def test_doctor_counts_page_cache_as_free_memory(
    text: str | None,
    free_mib: int,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    pages = {"SC_AVPHYS_PAGES": 1 << 19, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert machine._memory(config.groups).says.endswith(f", {free_mib} MiB are free")


def test_doctor_findings_include_a_remedy(config: Config, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    odd = replace(
        config,
        model=str(tmp_path / "m"),
        num_workers=500,
        worker=replace(config.worker, model="", device="cuda", num_threads=64),
        router=replace(config.router, model=""),
    )
    findings = list(machine.examine(odd))
    levels = {each.subject: each.level for each in findings}
    assert levels["device"] is levels["model"] is Level.ERROR
    assert levels["threads"] is levels["memory"] is Level.WARNING
    assert all(each.mend for each in findings if each.level is not Level.OK)


@pytest.mark.parametrize(
    ("wanted", "level", "says"),
    [
        (["numpy", "ray[serve]"], Level.OK, "the versions that Everlift is tested with"),
        (["numpy==1.0", "torch"], Level.WARNING, "numpy is "),
        (["ray-of-light", "numpy==1.0"], Level.ERROR, "missing: ray-of-light"),
        (["no-such-thing; extra == 'dev'"], Level.OK, "versions"),
    ],
)
def test_doctor_reports_missing_and_other_versions(
    wanted: list[str],
    level: Level,
    says: str,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda distribution: wanted)
    finding = of(list(machine.examine(config)), "packages")
    assert finding.level is level and says in finding.says


@pytest.mark.parametrize(
    ("fields", "level", "says"),
    [
        ({}, Level.OK, "a"),
        ({"lora_alpha": None}, Level.ERROR, "adapter 'a': adapter_config.json must have a number"),
        (None, Level.ERROR, "no adapter at "),
    ],
)
def test_doctor_examines_adapters(
    fields: dict[str, object] | None, level: Level, says: str, tmp_path: Path
) -> None:
    if fields is not None:
        write_adapter(tmp_path / "a", DEMO_MODEL, seed=1, **fields)
    config = load(None, {}, [f"model={DEMO_MODEL}", f"adapters=a={tmp_path / 'a'}"])
    finding = of(list(machine.examine(config)), "adapters")
    assert finding.level is level and finding.says.startswith(says)


def test_doctor_suggests_plain_processes_without_ray(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("importlib.metadata.version", installed)
    finding = of(list(machine.examine(config)), "packages")
    assert finding.level is Level.WARNING and "--no-ray" in finding.mend


def test_doctor_warns_of_an_uninstalled_checkout(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_DISTRIBUTION", "not-installed")
    finding = of(list(machine.examine(config)), "packages")
    assert finding.level is Level.WARNING and "not installed" in finding.says


@pytest.mark.parametrize(
    ("cause", "level"), [("", Level.OK), ("Failed to find C compiler", Level.WARNING)]
)
def test_doctor_warns_of_a_gpu_without_kernels(
    config: Config, cause: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA")
    monkeypatch.setattr("worker.kernels.trial.why_no_kernels", lambda device: cause)
    finding = of(list(machine.examine(config)), "kernels")
    assert finding.level is level and cause in finding.says


def served(config: Config, directory: Path) -> Config:
    worker, router = replace(config.worker, model=""), replace(config.router, model="")
    return replace(config, model=str(directory), worker=worker, router=router)


@pytest.mark.parametrize(("cause", "level"), [("", Level.OK), ("no compiler", Level.WARNING)])
def test_doctor_reports_cpu_matrix_kernels(
    config: Config, cause: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("worker.native.native.why_no_code", lambda: cause)
    finding = of(list(machine.examine(served(config, DEMO_MODEL))), "kernels")
    assert finding.level is level and "threads" in finding.says


def test_doctor_rejects_an_unknown_cpu_level(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("EVERLIFT_CPU_LEVEL", "mmx")
    finding = of(list(machine.examine(served(config, DEMO_MODEL))), "kernels")
    assert finding.level is Level.ERROR and "mmx" in finding.says


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"quantization": "int8", "dtype": "float16"}, "float16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 is for GPUs"),
    ],
)
def test_doctor_rejects_numbers_that_a_cpu_lacks(
    settings: dict[str, Any], cause: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    odd = served(config, DEMO_MODEL)
    odd = replace(odd, worker=replace(odd.worker, **settings))
    finding = of(list(machine.examine(odd)), "kernels")
    assert finding.level is Level.ERROR and cause in finding.says


@pytest.mark.parametrize("setting", ["port", "http_port"])
def test_doctor_names_a_taken_port(config: Config, setting: str) -> None:
    port = getattr(config.router, setting)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        finding = of(list(machine.examine(config)), "port")
    assert finding.level is Level.ERROR
    assert str(port) in finding.says and finding.mend.endswith(f"router.{setting}")


async def examined(config: Config) -> list[Finding]:
    return [finding async for finding in ledger.examine(config)]


async def test_doctor_examines_a_running_embedded_ledger(config: Config) -> None:
    assert of(await examined(config), "ledger").says == "embedded; it starts with the cluster"
    server = EmbeddedLedger()
    server.start(config.state_dir)
    try:
        findings = await examined(config)
    finally:
        server.stop()
    assert "everysec" in of(findings, "ledger").says
    assert of(findings, "clock").level is Level.OK
    assert of(await examined(config), "ledger").level is Level.OK


async def test_doctor_rejects_a_weak_or_absent_ledger(config: Config, tmp_path: Path) -> None:
    server = EmbeddedLedger(LedgerConfig(durability_class="memory"))
    url = server.start(tmp_path / "other")
    try:
        [refused] = await examined(replace(config, ledger=LedgerConfig(url=url)))
    finally:
        server.stop()
    assert refused.level is Level.ERROR and "appendonly" in refused.says
    nowhere = LedgerConfig(url=f"redis://user:hidden@127.0.0.1:{free_port()}", timeout=0.2)
    [away] = await examined(replace(config, ledger=nowhere))
    assert away.level is Level.ERROR and "hidden" not in away.says + away.mend


def report(address: str, torch: str = "2.13.0", clock_s: float = 0.0) -> NodeReport:
    return NodeReport(address, {"torch": torch, "python": "3.11"}, (), clock_s)


def test_doctor_names_nodes_with_other_versions() -> None:
    reports = [report("a"), report("b", torch="2.11.0"), report("c")]
    finding = compare("versions", reports, lambda each: each.versions)
    assert finding.level is Level.ERROR
    assert finding.says == "torch 2.11.0 on b, else 2.13.0"
    assert compare("versions", reports[::2], lambda each: each.versions).level is Level.OK


def test_doctor_names_a_node_that_leaves_and_checks_others() -> None:
    def ask(node: dict[str, str]) -> NodeReport:
        if node["NodeManagerAddress"] == "b":
            raise RaySystemError("the first line\nit is gone")
        return report(node["NodeManagerAddress"])

    reports, silent = collect_reports([{"NodeManagerAddress": name} for name in "abc"], ask)
    assert [each.address for each in reports] == ["a", "c"]
    assert silent == ["b does not answer: it is gone"]


def test_doctor_warns_of_clock_skew() -> None:
    assert clocks([report("a"), report("b", clock_s=0.1)]).level is Level.OK
    finding = clocks([report("a", clock_s=-0.4), report("b", clock_s=0.4)])
    assert (finding.level, finding.says) == (Level.WARNING, "the clocks differ by at most 0.800 s")


def test_doctor_command_exits_1_on_an_error(tmp_path: Path) -> None:
    def ask(*assignments: str) -> subprocess.CompletedProcess[str]:
        settings = [
            f"--set=state_dir={tmp_path}",
            f"--set=router.port={free_port()}",
            f"--set=router.http_port={free_port()}",
        ]
        wanted = [f"--set={each}" for each in assignments]
        command = [EVERLIFT, "doctor", "--json", *settings, *wanted]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    (tmp_path / "empty").mkdir()
    well, ill = ask(), ask(f"model={tmp_path / 'empty'}")
    assert well.returncode == 0, well.stdout + well.stderr
    assert {each["subject"] for each in json.loads(well.stdout)} >= {"Python", "device", "ledger"}
    assert ill.returncode == 1
    assert [each["subject"] for each in json.loads(ill.stdout) if each["level"] == "error"] == [
        "model"
    ]


def test_doctor_reports_an_absent_ray_cluster(config: Config) -> None:
    [finding] = command._nodes(f"127.0.0.1:{free_port()}")
    assert (finding.subject, finding.level) == ("Ray", Level.ERROR)
