"""Loading and trial of a decoder-only transformers model from a Hugging Face directory.

Code that comes with a model is not run, and weights are read only from safetensors files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from worker.attention.backend import AttentionBackend
from worker.device.kv_cache import KVCache
from worker.model.checkpoint import BadCheckpoint, some
from worker.model.huggingface.config import HfConfig
from worker.model.huggingface.families import ARCHITECTURES
from worker.model.layers import Placement
from worker.model.spec import UnsupportedModel
from worker.model.transformers.decoder import TransformersDecoder
from worker.model.transformers.probe import Probe
from worker.model.transformers.survey import Unservable, survey

_ALSO_SUPPORTED = (
    "and on one rank any causal language model of transformers that computes all of its attention "
    "through AttentionInterface"
)
#: Exceptions of a model that lacks the usual arguments, or gives them another meaning.
_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_DUMMY_SEED = 0


def load_decoder(
    directory: Path,
    place: Placement,
    dummy: bool,
    max_model_len: int | None,
    build_attention: Callable[[KVCache], AttentionBackend],
) -> TransformersDecoder:
    """Return the decoder of the model in ``directory``; with ``dummy`` its weights are random.

    A Probe first verifies the decoder's results in a batch with another sequence, whose few tokens
    have the last positions below ``max_model_len``. This length is limited to the model's own
    maximum, which is also the default. ``build_attention`` creates the attention backend over a KV
    cache. Raises UnsupportedModel if ``place`` has several ranks, the model does not run with paged
    attention, or no maximum length is known. Raises BadCheckpoint if the weights cannot be loaded.
    """
    with _refusing(directory) as architecture:
        config = _known_config(directory, architecture, place.group.size)
        model = _random(config, place) if dummy else _load(directory, config, place)
        return _verified(model, place, max_model_len, build_attention)


def check_config(directory: Path, num_ranks: int) -> None:
    """Raise UnsupportedModel if a model's config shows that it cannot run on ``num_ranks`` ranks.

    The model is not built, so obstacles that the config does not show are not found.
    """
    with _refusing(directory) as architecture:
        _known_config(directory, architecture, num_ranks)


@contextmanager
def _refusing(directory: Path) -> Iterator[str]:
    architecture = (HfConfig.read(directory / "config.json").strings("architectures") or ("",))[0]
    try:
        yield architecture
    except Unservable as why:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"architecture {architecture} is not supported: {why}; "
            f"supported: {supported}, {_ALSO_SUPPORTED}"
        ) from why


def _known_config(directory: Path, architecture: str, num_ranks: int) -> PreTrainedConfig:
    if num_ranks > 1:
        raise Unservable(f"the model cannot run on {num_ranks} ranks")
    return _read_config(directory, architecture)


def _read_config(directory: Path, architecture: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        cause = str(error).partition("\n")[0].rstrip(".")
        raise Unservable(f"transformers cannot read its config: {cause}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise Unservable("the weights are quantized")
    if config.is_encoder_decoder:
        raise Unservable("the model has an encoder")
    if config.get_text_config() is not config:
        raise Unservable("the language model is a part of another model")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    if known.lower() != architecture.lower():
        raise Unservable("transformers has no causal language model of that name")
    return config


def _verified(
    model: PreTrainedModel,
    place: Placement,
    max_model_len: int | None,
    build_attention: Callable[[KVCache], AttentionBackend],
) -> TransformersDecoder:
    try:
        found = survey(model)
        max_position = _max_position(model.config, max_model_len)
        decoder = TransformersDecoder(model, found, max_position)
        longest = min(max_model_len or max_position, max_position)
        Probe(decoder, build_attention, place).verify(longest)
    except (Unservable, torch.OutOfMemoryError):
        raise
    except _FAILURES as error:
        raise Unservable(f"the model does not run with paged attention: {error!r}") from error
    return decoder


def _max_position(config: PreTrainedConfig, otherwise: int | None) -> int:
    longest: int | None = getattr(config, "max_position_embeddings", otherwise)
    if longest is None:
        raise Unservable("the config has no context length; set max_model_len")
    return longest


def _class_for(config: PreTrainedConfig) -> type[PreTrainedModel]:
    if config.model_type == "falcon":
        from worker.model.transformers.falcon import InterfacedFalcon

        return InterfacedFalcon
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    known: type[PreTrainedModel] = getattr(transformers, name)
    return known


def _load(directory: Path, config: PreTrainedConfig, place: Placement) -> PreTrainedModel:
    try:
        with _no_progress_bars():
            loaded: Any = _class_for(config).from_pretrained(
                directory,
                config=config,
                dtype=place.dtype,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise BadCheckpoint(f"{directory} cannot be loaded: {error}") from error
    model, report = loaded
    if missing := report["missing_keys"]:
        raise BadCheckpoint(f"{directory} lacks {some(missing)}")
    placed: PreTrainedModel = model.to(place.device)
    return placed


def _random(config: PreTrainedConfig, place: Placement) -> PreTrainedModel:
    """Return the model with random weights, which are the same in every call."""
    with torch.random.fork_rng(), torch.device(place.device):
        torch.manual_seed(_DUMMY_SEED)
        model: PreTrainedModel = _class_for(config)._from_config(
            config, dtype=place.dtype, attn_implementation="eager"
        )
    model.train(False)
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
