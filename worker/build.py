"""From a configuration to a runner: model, KV cache and attention of one rank."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from everlift import logs, model_files
from everlift.progress import told, untold
from worker.attention.backend import AttentionBackend
from worker.attention.choice import choose_attention
from worker.config import WorkerConfig
from worker.decode_buckets import decode_buckets
from worker.decode_graphs import CudaGraphs, DecodeGraphs, DecodingBackend
from worker.device import choose_device, choose_dtype, use_threads
from worker.kv_cache import KVCache, block_bytes
from worker.last_tokens import LastTokens
from worker.limits import blocks_for
from worker.model import dummy, weights
from worker.model.compiled_pointwise import choose_pointwise
from worker.model.decoder import Decoder
from worker.model.layers import Placement
from worker.model.packing import choose_packing
from worker.model.sharing import local_kv_heads
from worker.model.spec import ModelSpec, UnsupportedArchitecture, UnsupportedModel
from worker.model.stack import choose_stack
from worker.parallel import Group
from worker.precompile import precompile
from worker.runner import Model, TorchRunner
from worker.step_times import STOPPED, Stopwatch
from worker.swap import build_host_cache

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A rank's model, and what its KV cache holds of a token: num_layers, kv_heads, head_dim."""

    model: Model
    vocab_size: int
    max_model_len: int
    kv_shape: tuple[int, int, int]
    parameter_bytes: int


def build_runner(config: WorkerConfig, group: Group, stopwatch: Stopwatch = STOPPED) -> TorchRunner:
    """Loads the rank's share of ``config.model`` and allocates its KV cache.

    Raises ModelUnavailable, UnsupportedModel, BadCheckpoint, or ValueError for a device that is not
    there. Sets torch's number of threads for the process.
    """
    use_threads(config.num_threads)
    device = choose_device(config.device)
    place = Placement(group, choose_dtype(config.dtype, device), device)
    directory = model_files.locate(
        config.model, config.model_revision, weights=config.reads_weights
    )
    loaded = _load(config, directory, place)
    cache = _build_cache(config, loaded.kv_shape, place)
    attention = choose_attention(cache)
    log.info(
        "model loaded",
        model=config.name,
        revision=config.model_revision,
        rank=group.rank,
        device=str(device),
        dtype=str(place.dtype),
        attention=type(attention).__name__,
        parameter_mib=loaded.parameter_bytes >> 20,
        kv_blocks=cache.num_blocks,
        kv_cache_mib=cache.tensor.nbytes >> 20,
    )
    build = partial(
        TorchRunner,
        loaded.vocab_size,
        loaded.max_model_len,
        loaded.model,
        cache,
        attention,
        place,
    )
    host_cache = build_host_cache(config, cache, group, build())
    if device.type != "cuda":
        return build(host_cache, stopwatch)
    last_tokens = LastTokens(config.max_num_seqs, device)
    graphs = _capture(config, loaded, cache, attention, last_tokens)
    return build(host_cache, stopwatch, last_tokens, graphs)


def _capture(
    config: WorkerConfig,
    loaded: _Loaded,
    cache: KVCache,
    attention: AttentionBackend,
    last_tokens: LastTokens,
) -> DecodeGraphs | None:
    """What others' modules compute, or torch's attention, may not be capturable."""
    if not isinstance(loaded.model, Decoder) or not isinstance(attention, DecodingBackend):
        return None
    buckets = decode_buckets(config.max_num_seqs)
    most = min(blocks_for(loaded.max_model_len), cache.num_blocks)
    device = cache.tensor.device
    graphs = DecodeGraphs(loaded.model, attention, last_tokens, buckets, most, device, CudaGraphs())
    log.info("decoding captured", buckets=buckets)
    return graphs


def spec_of(config: WorkerConfig, directory: Path) -> ModelSpec | None:
    """What the decoder of our own would run; None where transformers' modules are tried.

    Raises UnsupportedModel for what neither runs, as far as a model's files tell.
    """
    try:
        spec = ModelSpec.from_hf(directory)
    except UnsupportedArchitecture:
        # Seconds to import, and most models do without.
        from worker.model.transformers_loading import check_config

        check_config(directory, config.tensor_parallel)
        return None
    _max_model_len(config, spec.max_position)
    return spec


def try_modules(config: WorkerConfig, directory: Path) -> None:
    """Builds a model that transformers' modules would run, on the CPU and with random weights,
    which take its memory. Raises UnsupportedModel where a start would."""
    place = Placement(Group.single(), torch.float32, torch.device("cpu"))
    _load_with_transformers(replace(config, load_format="dummy"), directory, place)


def _load(config: WorkerConfig, directory: Path, place: Placement) -> _Loaded:
    """Whichever can: the decoder of our own, or transformers' modules."""
    spec = spec_of(config, directory)
    if spec is None:
        return _load_with_transformers(config, directory, place)
    max_model_len = _max_model_len(config, spec.max_position)
    precompile(spec.head_dim, place.dtype, place.device, place.group.size)
    place = replace(place, pointwise=choose_pointwise(place.dtype, place.device))
    decoder = Decoder(spec, max_model_len, place)
    parameter_bytes = _fill(decoder, directory, config, place.group.rank)
    if place.device.type == "cpu":
        make_fast(decoder, spec, place.dtype)
    kv_shape = (
        spec.num_layers,
        local_kv_heads(spec.num_kv_heads, place.group.size),
        spec.head_dim,
    )
    return _Loaded(decoder, spec.vocab_size, max_model_len, kv_shape, parameter_bytes)


def make_fast(decoder: Decoder, spec: ModelSpec, dtype: torch.dtype) -> None:
    """What a filled decoder is on a CPU. It cannot be filled again."""
    decoder.pack(choose_packing(dtype))
    decoder.stack = choose_stack(decoder.layer_by_layer, spec.head_dim)
    log.info("layers", stack=type(decoder.stack).__name__)


def _load_with_transformers(config: WorkerConfig, directory: Path, place: Placement) -> _Loaded:
    from worker.model.transformers_loading import load_decoder

    decoder = load_decoder(
        directory, place, not config.reads_weights, config.max_model_len, choose_attention
    )
    max_model_len = _max_model_len(config, decoder.max_position)
    kv_shape = decoder.layers.kv_shape
    return _Loaded(decoder, decoder.vocab_size, max_model_len, kv_shape, decoder.parameter_bytes)


def _fill(decoder: Decoder, directory: Path, config: WorkerConfig, rank: int) -> int:
    """The bytes of the parameters. Rank 0 tells how it goes on."""
    with nullcontext(untold) if rank else told("weights loading") as progress:
        if config.reads_weights:
            return weights.load(decoder, directory, progress, config.weight_readers)
        return dummy.fill(decoder, progress)


def _max_model_len(config: WorkerConfig, max_position: int) -> int:
    if config.max_model_len is None:
        return max_position
    if config.max_model_len > max_position:
        raise UnsupportedModel(
            f"max_model_len {config.max_model_len} is more than the model's {max_position}"
        )
    return config.max_model_len


def _build_cache(config: WorkerConfig, kv_shape: tuple[int, int, int], place: Placement) -> KVCache:
    """``config.num_blocks`` blocks, or as many as its MiB, shared out evenly, hold on each rank."""
    num_blocks = config.num_blocks
    if num_blocks is None:
        size = block_bytes(*kv_shape, place.dtype)
        num_blocks = (config.kv_cache_mib << 20) // place.group.size // size
    if num_blocks < 1:
        raise ValueError(f"kv_cache_mib {config.kv_cache_mib} holds not one block of this model")
    cache = KVCache(num_blocks, *kv_shape, place.dtype, place.device)
    if place.device.type == "cpu":
        cache.take_memory()
    return cache
