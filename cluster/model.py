"""Resolution and download of a cluster's models, so that all nodes use the same commits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from cluster.config import Config
from cluster.errors import ClusterFailed
from everlift import logs, model_files
from everlift.adapters import parse_adapters
from everlift.progress import show_progress
from worker.config import FAKE, WorkerConfig

log = logs.get_logger(__name__)


async def pinned(config: Config) -> Config:
    """Return ``config`` with the commits of hub models and of hub adapters as their revisions.

    The configuration of other models and adapters is returned unchanged. Raises ModelUnavailable if
    a commit cannot be determined.
    """
    for group in config.groups:
        worker = group.worker
        sources = [await model_files.pin_adapter(it) for it in parse_adapters(worker.adapters)]
        commit = await model_files.pin(worker.model, worker.model_revision)
        adapters = tuple(map(str, sources))
        if (commit, adapters) != (worker.model_revision, worker.adapters):
            log.info(
                "revisions resolved",
                model=worker.model,
                revision=worker.model_revision,
                commit=commit,
                adapters=adapters,
            )
            config = config.with_sources(group.name, commit, adapters)
    return config


async def fetched(config: Config) -> Config:
    """Download the missing files of models and adapters, and return ``config`` with their commits.

    The returned configuration has the commit of a hub model as the revision, and is unchanged for
    any other model. A GGUF file is converted to a model directory in the cache, unless the cache
    has it already. Raises ModelUnavailable if files are unavailable, and ClusterFailed for a model
    or an adapter that no worker can serve.
    """
    config = await pinned(config)
    for group in config.groups:
        await _fetch(group.worker)
    return config


async def _fetch(worker: WorkerConfig) -> None:
    with show_progress(f"downloading {worker.model}") as progress:
        await model_files.fetch(
            worker.model, worker.model_revision, weights=worker.reads_weights, progress=progress
        )
    if worker.engine == "vllm":
        if model_files.is_gguf_model(worker.model):
            raise ClusterFailed(
                f"{worker.model} is a GGUF file, which vLLM does not read here: use a directory or "
                "a hub id, or leave out worker.engine"
            )
    if worker.model != FAKE:
        for source in parse_adapters(worker.adapters):
            await model_files.fetch_adapter(source)
        directory = model_files.locate(worker.model, worker.model_revision, weights=False)
        await asyncio.to_thread(_check_files, directory, worker)


def _check_files(directory: Path, worker: WorkerConfig) -> None:
    """Raise an error if workers cannot load the model in ``directory`` or one of its adapters.

    The adapters are ``worker.adapters``. The model is checked only for Everlift's own engine.
    Raises ModelUnavailable if files of an adapter are missing, and ClusterFailed otherwise.
    """
    from worker.model.adapters import BadAdapter

    if worker.engine == "everlift":
        _check_supported(directory, worker.tensor_parallel)
    try:
        check_adapters(worker.adapters, directory, worker.engine)
    except BadAdapter as error:
        raise ClusterFailed(str(error)) from None


def check_adapters(texts: Iterable[str], directory: Path, engine: str) -> None:
    """Raise an error if workers cannot load an adapter for the model in ``directory``.

    ``texts`` are adapters as in the setting ``adapters``, whose files are on this machine. Raises
    ModelUnavailable if files are missing, and BadAdapter if they are invalid, do not fit the model
    or are not supported by ``engine``. Raises UnsupportedModel if Everlift's own engine does not
    support a value in the model's configuration.
    """
    from worker.model.adapters import NO_ADAPTERS, BadAdapter, adapted_linears, read_adapters
    from worker.model.huggingface.families import read_spec
    from worker.model.spec import UnsupportedArchitecture

    for adapter in read_adapters(texts, directory):
        if engine != "everlift":
            continue  # it reads the files itself
        try:
            adapted_linears(adapter, read_spec(directory))
        except UnsupportedArchitecture:
            raise BadAdapter(NO_ADAPTERS) from None


def _check_supported(directory: Path, num_ranks: int) -> None:
    """Raise ClusterFailed if workers do not support the model in ``directory``.

    Called before routers and workers start, so that the user sees this error, and not a router's
    error about a missing tokenizer, for example.
    """
    from worker.model.huggingface.families import read_spec
    from worker.model.spec import UnsupportedArchitecture, UnsupportedModel

    try:
        try:
            read_spec(directory)
        except UnsupportedArchitecture:
            # Imported here because it takes seconds, and few models need it.
            from worker.model.transformers.loading import check_config

            check_config(directory, num_ranks)
    except UnsupportedModel as error:
        raise ClusterFailed(f"{directory}: {error}") from None
    except ValueError:
        # The configuration is invalid. The process that reads it later reports this error.
        pass
