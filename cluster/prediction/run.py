"""Training of a predictor: read examples from files or a ledger, and write a file for routers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster.config import Config
from cluster.connection import connected_ledger, with_ledger
from cluster.prediction.examples import Example, from_ledger, from_lines
from cluster.prediction.report import Report
from cluster.prediction.training import trained
from everlift import model_files
from everlift.errors import SettingsError
from router.requests.tokenizer import ServedModel


async def train(
    config: Config,
    out: Path,
    examples_out: Path | None,
    files: Sequence[Path],
    ledger_url: str | None,
    limit: int,
) -> Report:
    """Train a predictor, write it to ``out`` and return the report on its accuracy.

    Args:
        config: Configuration of the cluster; names the model and the ledger.
        out: File of the predictor.
        examples_out: File to which the examples are written without prompts; None for no such file.
        files: Files of examples; if empty, the examples are read from the ledger.
        ledger_url: URL of the ledger if it is not the configured one.
        limit: Maximum number of requests to read from the ledger, the newest.

    Raises:
        SettingsError: The URL or an example in ``files`` is invalid.
        ClusterFailed: LightGBM or the embedded ledger is missing, or there are too few examples.
        ModelUnavailable, UnknownModel: The model's tokenizer cannot be loaded.
        LedgerSetupError, LedgerUnavailable: The ledger cannot be used or does not answer.
        OSError: A file cannot be read or written.
    """
    model, found = await _load_examples(config, files, ledger_url, limit)
    if examples_out is not None:
        _write(examples_out, "".join(f"{each.line()}\n" for each in found))
    text, report = trained(model.name, found)
    _write(out, text)
    return report


async def _load_examples(
    config: Config, files: Sequence[Path], ledger_url: str | None, limit: int
) -> tuple[ServedModel, list[Example]]:
    await model_files.fetch(config.model, config.model_revision, weights=False)
    model = ServedModel.load(
        config.model,
        config.model_revision,
        sampling_defaults=config.router.sampling_defaults,
    )
    if files:
        found = [each for file in files for each in _of_file(file, model)]
    else:
        async with connected_ledger(with_ledger(config, ledger_url)) as ledger:
            found = await from_ledger(ledger, model, limit)
    return model, sorted(found, key=lambda each: each.features.arrived)


def _of_file(file: Path, model: ServedModel) -> list[Example]:
    try:
        with file.open(encoding="utf-8") as lines:
            return from_lines(lines, model)
    except UnicodeDecodeError:
        raise SettingsError(f"{file} is not UTF-8") from None
    except SettingsError as error:
        raise SettingsError(f"{file}: {error}") from None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp lets only the owner read the file, but routers may be processes of another user.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
