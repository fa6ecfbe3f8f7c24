"""The model of a cluster: one commit of it for all routers and workers, whatever their nodes."""

from __future__ import annotations

from cluster.config import Config
from everlift import logs, model_files
from everlift.progress import told
from worker.config import FAKE

log = logs.get(__name__)


async def pinned(config: Config) -> Config:
    """``config`` with the commit that its model's revision is now. Raises ModelUnavailable."""
    commit = await model_files.pin(config.model, config.model_revision)
    if commit == config.model_revision:
        return config
    log.info("model chosen", model=config.model, revision=config.model_revision, commit=commit)
    return config.at_commit(commit)


async def fetched(config: Config) -> Config:
    """``pinned``, with all files of that model on this machine. Raises ModelUnavailable."""
    config = await pinned(config)
    with told(f"downloading {config.model}") as progress:
        await model_files.fetch(
            config.model,
            config.model_revision,
            weights=config.worker.reads_weights,
            progress=progress,
        )
    if config.model != FAKE:
        model_files.locate(config.model, config.model_revision, weights=False)
    return config
