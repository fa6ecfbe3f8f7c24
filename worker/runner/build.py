"""Builder of a runner from a configuration: model, KV cache and attention of one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from everlift import logs, model_files
from everlift.hashes import BLOCK_SIZE
from everlift.progress import ignore_progress, show_progress
from worker.attention.choice import check_cache_dtype, choose_attention
from worker.config import WorkerConfig
from worker.device.device import choose_device, choose_dtype, kind_of, use_threads
from worker.engine.step_times import STOPPED, Stopwatch
from worker.kernels.trial import kernels_work, why_no_kernels
from worker.model import dummy, weights
from worker.model.adapter_weights import load_adapters
from worker.model.adapters import NO_ADAPTERS
from worker.model.compiled_pointwise import choose_pointwise
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.layers import Placement
from worker.model.mixture import Mixture
from worker.model.onednn import bound_caches
from worker.model.panels import panel_packing
from worker.model.precompile import choose_packing, describe_kernels, precompile
from worker.model.sharing import local_kv_heads
from worker.model.spec import ModelSpec, UnsupportedArchitecture, UnsupportedModel
from worker.model.stack import choose_stack
from worker.model.weight_format import WeightFormat
from worker.native import native
from worker.parallel.group import Group
from worker.runner.assembly import Assembly, LoadedModel
from worker.runner.decode_buckets import decode_buckets
from worker.runner.decoder_adapters import DecoderAdapters
from worker.runner.kv_blocks import configured_blocks, kv_blocks
from worker.runner.runner import TorchRunner
from worker.runner.swap import build_host_cache
from worker.runner.warm_up import warm_up_plans

if TYPE_CHECKING:
    from worker.model.kernel_linear import KernelPacking

log = logs.get_logger(__name__)

#: Least compute capability of GPUs that multiply numbers of e4m3.
_FP8_CAPABILITY = (8, 9)


def build_runner(config: WorkerConfig, group: Group, stopwatch: Stopwatch = STOPPED) -> TorchRunner:
    """Load the rank's share of ``config.model``, allocate its KV cache, and return its runner.

    A collective: all ranks must call it. Sets torch's number of threads. Raises ModelUnavailable if
    files of the model or of an adapter cannot be obtained, and UnsupportedModel, BadCheckpoint or
    BadAdapter if they cannot be run or read. Raises ValueError if the device does not exist, has
    too little memory, or does not support the configured quantization.
    """
    use_threads(config.num_threads)
    bound_caches()
    device = choose_device(config.device)
    place = Placement(group, choose_dtype(config.dtype, device, config.quantization), device)
    directory = model_files.locate(
        config.model, config.model_revision, weights=config.reads_weights
    )
    with _explain_out_of_memory("the weights", "increase tensor_parallel or use a larger GPU"):
        loaded = _load(config, directory, place)
    check_cache_dtype(config, device, place.dtype, loaded.kv_shape[-1])
    num_blocks = kv_blocks(config, loaded, place)
    with _explain_out_of_memory(
        f"a KV cache of {num_blocks} blocks", "set a smaller num_blocks or kv_cache_mib"
    ):
        parts = Assembly.of(config, loaded, place, num_blocks)
    if device.type == "cpu":
        parts.cache.prefault()
    _log_loaded(config, loaded, place, parts)
    host_cache = build_host_cache(config, parts.cache, group, parts.runner())
    graphs = parts.capture()
    if graphs is not None:
        log.info("decode steps captured", buckets=decode_buckets(config.max_num_seqs))
    if device.type == "cuda":
        _warm_up(parts.runner(), config)
    return parts.runner(host_cache, stopwatch, graphs)


def _log_loaded(
    config: WorkerConfig, loaded: LoadedModel, place: Placement, parts: Assembly
) -> None:
    log.info(
        "model loaded",
        model=config.name,
        revision=config.model_revision,
        rank=place.group.rank,
        device=str(place.device),
        dtype=str(place.dtype),
        attention=parts.attention.name,
        parameter_mib=loaded.parameter_bytes >> 20,
        kv_blocks=parts.cache.num_blocks,
        kv_cache_mib=parts.cache.tensor.nbytes >> 20,
        max_num_batched_tokens=config.batched_tokens(kind_of(place.device)),
    )


@contextmanager
def _explain_out_of_memory(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"too little GPU memory for {what}: {error} ({advice})") from error


def _warm_up(runner: TorchRunner, config: WorkerConfig) -> None:
    began = time.perf_counter()
    batched = config.batched_tokens(kind_of(runner.device))
    for plan in warm_up_plans(config.max_num_seqs, batched, runner.max_model_len):
        runner.execute(plan)
    log.info("warmed up", seconds=round(time.perf_counter() - began, 1))


def spec_of(config: WorkerConfig, directory: Path) -> ModelSpec | None:
    """Return the spec for Everlift's decoder; None if transformers' modules must run the model.

    Only the model's configuration is read. Everlift's decoder is chosen if it knows the
    architecture, and transformers' modules otherwise. Raises UnsupportedModel if the model's
    configuration is missing or malformed, or shows that the chosen code cannot run the model.
    UnsupportedModel is also raised if the decoder is chosen, but does not support the configured
    quantization or a context as long as ``config.max_model_len``.
    """
    try:
        spec = read_spec(directory)
    except UnsupportedArchitecture:
        # Imported late, because the import takes seconds and most models do not need it.
        from worker.model.transformers.loading import check_config

        check_config(directory, config.tensor_parallel)
        return None
    _max_model_len(config, spec.max_position)
    if spec.has_experts and config.quantization != "none":
        raise UnsupportedModel(
            f"quantization {config.quantization} is not supported for mixtures of experts: "
            "set quantization to none"
        )
    if spec.weight_format is not None and config.quantization != "none":
        raise UnsupportedModel(
            f"quantization {config.quantization} is not supported for a checkpoint that is "
            f"quantised ({spec.weight_format.title}): set quantization to none"
        )
    return spec


def try_modules(config: WorkerConfig, directory: Path) -> None:
    """Build the model from transformers' modules on the CPU, with random weights, as a trial.

    Raises UnsupportedModel if a worker of this configuration could not run the model. The number of
    ranks is not checked; ``spec_of`` checks it.
    """
    place = Placement(Group.single(), torch.float32, torch.device("cpu"))
    _load_with_transformers(replace(config, load_format="dummy"), directory, place)


def _load(config: WorkerConfig, directory: Path, place: Placement) -> LoadedModel:
    spec = spec_of(config, directory)
    if spec is None:
        return _load_with_transformers(config, directory, place)
    kv_heads = local_kv_heads(spec.num_kv_heads, place.group.size)
    kv_shape = (spec.num_layers, kv_heads, spec.head_dim)
    max_model_len = context = _max_model_len(config, spec.max_position)
    if (num_blocks := configured_blocks(config, kv_shape, place)) is not None:
        max_model_len = min(max_model_len, num_blocks * BLOCK_SIZE)
    codes = None
    if spec.weight_format is not None:
        check_device(spec.weight_format, place.dtype, place.device)
        codes = spec.weight_format.codes
    spec = weights.with_stored_scales(spec, directory, config.reads_weights)
    stored = weights_dtype(config, directory, place.dtype, place.device)
    packed = quantised_dtype(config, place.dtype, place.device) or stored
    num_slots = config.num_adapter_slots
    has_adapters = num_slots > 0
    precompile(spec.head_dim, place.dtype, packed, place.device, codes, has_adapters)
    pointwise = choose_pointwise(place.dtype, place.device)
    place = replace(place, weights=stored, pointwise=pointwise)
    # The rope must not depend on the size of the KV cache, which differs between workers.
    decoder = Decoder(spec, max_model_len, place, context)
    parameter_bytes = _fill(decoder, directory, config, place.group.rank)
    adapters = load_adapters(decoder, spec, config.adapters, directory, place, num_slots)
    if place.device.type == "cpu":
        optimize_for_cpu(decoder, spec, place.dtype, packed)
    else:
        optimize_for_gpu(decoder, place.device)
    loaded = (
        DecoderAdapters(decoder, spec, directory, place.group, adapters, num_slots)
        if num_slots
        else None
    )
    return LoadedModel(decoder, spec.vocab_size, max_model_len, kv_shape, parameter_bytes, loaded)


def check_device(format: WeightFormat, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedModel if ``device`` cannot multiply weights of ``format``.

    ``dtype`` is the type of inputs and outputs.
    """
    if device.type == "cpu":
        return
    cause = why_no_kernels(device) or _kernel_packing(device).why_not(format, dtype, device)
    if cause:
        raise UnsupportedModel(
            f"{format.title} weights are not supported on cuda without Triton's kernels: {cause}"
        )


def weights_dtype(
    config: WorkerConfig, directory: Path, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the dtype in which the weights are held in memory, before any quantisation.

    On a CPU, weights that are stored in bfloat16 stay in bfloat16 if the kernels can use them: this
    takes half the bytes of fp32 and gives the same products. All other weights have ``dtype``.
    Raises BadCheckpoint if the checkpoint is missing or malformed.
    """
    if device.type != "cpu":
        return dtype
    stored = weights.stored_dtype(directory, config.reads_weights)
    keeps = stored == torch.bfloat16 and panel_packing(dtype, stored) is not None
    return torch.bfloat16 if keeps else dtype


def quantised_dtype(
    config: WorkerConfig, dtype: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """Return the dtype to which weights are quantised; None if they are not quantised.

    Raises ValueError if this machine does not support the configured quantization.
    """
    if config.quantization == "none":
        return None
    if device.type != "cpu":
        raise ValueError("quantization int8 is for CPUs: set quantization to none")
    if panel_packing(dtype, torch.int8) is None:
        cause = native.why_no_code() or f"it does not work with dtype {dtype}"
        raise ValueError(f"quantization int8 is not available: {cause}")
    return torch.int8


def optimize_for_cpu(
    decoder: Decoder, spec: ModelSpec, dtype: torch.dtype, packed: torch.dtype | None = None
) -> None:
    """Pack the loaded weights of ``decoder`` for a CPU, and choose the fastest code for its layers.

    The weights are packed as dtype ``packed``, or in their own dtype if ``packed`` is None. They
    cannot be loaded again afterwards. ``dtype`` is the type of inputs and outputs.
    """
    packed = packed or decoder.layer_by_layer.head.weight.dtype
    codes = None if spec.weight_format is None else spec.weight_format.codes
    decoder.pack(choose_packing(dtype, packed, codes))
    decoder.stack = choose_stack(decoder.layer_by_layer, spec.head_dim, codes)
    log.info(
        "layers packed",
        stack=type(decoder.stack).__name__,
        kernels=describe_kernels(dtype, packed, torch.get_num_threads(), codes),
    )


def optimize_for_gpu(decoder: Decoder, device: torch.device) -> None:
    """Pack the loaded weights of ``decoder`` for a GPU; they cannot be loaded again afterwards."""
    if not kernels_work(device):
        return
    decoder.pack(_kernel_packing(device))
    mlps = [layer.mlp for layer in decoder.layer_by_layer.layers]
    mixtures = [mlp for mlp in mlps if isinstance(mlp, Mixture)]
    if mixtures and (cause := mixtures[0].why_no_kernels()):
        log.warning("experts are computed in a loop, which is slower", cause=cause)
        for mixture in mixtures:
            mixture.kernels = None


def _kernel_packing(device: torch.device) -> KernelPacking:
    # Imported only for a GPU, because Triton may not be installed elsewhere.
    from worker.model.kernel_linear import KernelPacking

    facts = torch.cuda.get_device_properties(device)
    has_fp8 = (facts.major, facts.minor) >= _FP8_CAPABILITY
    return KernelPacking(facts.multi_processor_count, has_fp8)


def _load_with_transformers(config: WorkerConfig, directory: Path, place: Placement) -> LoadedModel:
    from worker.model.transformers.loading import load_decoder

    if config.num_adapter_slots:
        raise UnsupportedModel(NO_ADAPTERS)
    if config.quantization != "none":
        raise UnsupportedModel("quantization int8 is not supported for transformers' modules")
    decoder = load_decoder(
        directory, place, not config.reads_weights, config.max_model_len, choose_attention
    )
    max_model_len = _max_model_len(config, decoder.max_position)
    kv_shape = decoder.layers.kv_shape
    return LoadedModel(
        decoder, decoder.vocab_size, max_model_len, kv_shape, decoder.parameter_bytes
    )


def _fill(decoder: Decoder, directory: Path, config: WorkerConfig, rank: int) -> int:
    with nullcontext(ignore_progress) if rank else show_progress("weights loading") as progress:
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
