"""Which tokens end an output of a model, whoever runs it. Knows no torch."""

from __future__ import annotations

from pathlib import Path

from worker.model.hf_config import HfConfig
from worker.model.spec import ModelSpec, UnsupportedArchitecture

_KEY = "eos_token_id"


def end_token_ids(directory: Path) -> tuple[int, ...]:
    """Raises UnsupportedModel where ``directory`` holds no model."""
    try:
        return ModelSpec.from_hf(directory).eos_token_ids
    except UnsupportedArchitecture:
        generation = directory / "generation_config.json"
        stops = HfConfig.read(generation).token_ids(_KEY) if generation.exists() else ()
        return stops or HfConfig.read(directory / "config.json").token_ids(_KEY)
