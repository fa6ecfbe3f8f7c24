"""Check of a LoRA adapter that an operator wants to load at run time, without torch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

from everlift import model_files
from everlift.adapters import AdapterSource
from everlift.v1 import session_pb2
from worker.config import WorkerConfig
from worker.model.adapters import NO_ADAPTERS, BadAdapter, adapted_linears, read_adapter
from worker.model.huggingface.families import read_spec
from worker.model.spec import UnsupportedArchitecture


async def check_adapter(config: WorkerConfig, text: str) -> session_pb2.CheckAdapterResponse:
    """Check whether a worker of ``config`` can load an adapter; return its digest or the error.

    ``text`` describes the adapter in the form of AdapterSource.parse: NAME=DIRECTORY, NAME=ID or
    NAME=ID@REVISION. Missing files of a hub id are downloaded. The response has either an error, or
    the digest of the adapter's files and their source. The source names the commit of a hub id, or
    the directory with its links resolved.
    """
    try:
        source = AdapterSource.parse(text)
        _check_allowed(config, source)
        source = await model_files.pin_adapter(source)
        await model_files.fetch_adapter(source)
        return await asyncio.to_thread(partial(_check_files, config, source))
    except (ValueError, OSError) as error:
        return session_pb2.CheckAdapterResponse(error=str(error))


def _check_allowed(config: WorkerConfig, source: AdapterSource) -> None:
    """Raise BadAdapter if the worker loads no adapters, or none from this directory."""
    if config.engine != "everlift":
        raise BadAdapter(f"the engine {config.engine} loads adapters only at its start")
    if not config.num_adapter_slots:
        raise BadAdapter("worker.max_loaded_adapters is not set: workers load no adapters")
    if source.is_hub_id:
        return
    if not config.adapter_dir:
        raise BadAdapter("worker.adapter_dir is not set: only hub ids are loaded at run time")
    root = Path(config.adapter_dir).expanduser().resolve()
    if not Path(source.location).is_absolute() or root not in _resolved(source).parents:
        raise BadAdapter(f"the directory of an adapter must be an absolute path below {root}")


def _resolved(source: AdapterSource) -> Path:
    return Path(source.location).resolve()


def _check_files(config: WorkerConfig, source: AdapterSource) -> session_pb2.CheckAdapterResponse:
    if not source.is_hub_id:
        source = replace(source, location=str(_resolved(source)))
    directory = model_files.locate(config.model, config.model_revision, weights=False)
    adapter = read_adapter(source, directory)
    try:
        adapted_linears(adapter, read_spec(directory))
    except UnsupportedArchitecture:
        raise BadAdapter(NO_ADAPTERS) from None
    if adapter.rank > config.max_adapter_rank:
        raise BadAdapter(
            f"adapter {adapter.name!r}: rank {adapter.rank} is above worker.max_adapter_rank "
            f"{config.max_adapter_rank}"
        )
    return session_pb2.CheckAdapterResponse(source=str(source), digest=adapter.digest)
