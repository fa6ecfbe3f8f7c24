"""From a configuration to a runner: model, KV cache and attention of one rank."""

from __future__ import annotations

from everlift import logs
from worker.attention.reference import ReferenceAttention
from worker.config import WorkerConfig
from worker.device import choose_device, choose_dtype, use_threads
from worker.kv_cache import KVCache, block_bytes
from worker.model import weights
from worker.model.decoder import Decoder
from worker.model.layers import Placement, kv_head_share
from worker.model.spec import ModelSpec, UnsupportedModel
from worker.parallel import Group
from worker.runner import TorchRunner

log = logs.get(__name__)


def build_runner(config: WorkerConfig, group: Group) -> TorchRunner:
    """Loads the rank's share of ``config.model`` and allocates its KV cache.

    Raises UnsupportedModel, BadCheckpoint, or ValueError for a device that is not there. Sets
    torch's number of threads for the process.
    """
    use_threads(config.num_threads)
    device = choose_device(config.device)
    place = Placement(group, choose_dtype(config.dtype, device), device)
    spec = ModelSpec.from_hf(config.model)
    max_model_len = _max_model_len(config, spec)
    decoder = Decoder(spec, max_model_len, place)
    parameter_bytes = weights.load(decoder, config.model)
    cache = _build_cache(config, spec, place)
    log.info(
        "model loaded",
        model=config.name,
        rank=group.rank,
        device=str(device),
        dtype=str(place.dtype),
        parameter_mib=parameter_bytes >> 20,
        kv_blocks=cache.num_blocks,
        kv_cache_mib=cache.tensor.nbytes >> 20,
    )
    return TorchRunner(spec, max_model_len, decoder, cache, ReferenceAttention(cache), place)


def _max_model_len(config: WorkerConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise UnsupportedModel(
            f"max_model_len {config.max_model_len} is more than the model's {spec.max_position}"
        )
    return config.max_model_len


def _build_cache(config: WorkerConfig, spec: ModelSpec, place: Placement) -> KVCache:
    """``config.num_blocks`` blocks, or as many as its MiB, shared out evenly, hold on each rank."""
    heads = kv_head_share(spec.num_kv_heads, place.group)
    kv_heads = heads.stop - heads.start
    num_blocks = config.num_blocks
    if num_blocks is None:
        size = block_bytes(spec.num_layers, kv_heads, spec.head_dim, place.dtype)
        num_blocks = (config.kv_cache_mib << 20) // place.group.size // size
    if num_blocks < 1:
        raise ValueError(f"kv_cache_mib {config.kv_cache_mib} holds not one block of this model")
    return KVCache(num_blocks, spec.num_layers, kv_heads, spec.head_dim, place.dtype, place.device)
