"""Engine core of vLLM, driven step by step from the worker's loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from vllm.config import KVEventsConfig, VllmConfig
from vllm.config.lora import MaxLoRARanks
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from everlift import model_files
from everlift.errors import EngineFailed, EverliftError, InvalidRequest
from everlift.hashes import BLOCK_SIZE
from everlift.images import MAX_IMAGES
from everlift.sampling import TokenLogprobs
from worker.config import WorkerConfig
from worker.device.device_kind import DeviceKind, kind_of_gpu
from worker.engine.blocks import ChunkChanges
from worker.engine.limits import Limits
from worker.engine.outcome import SequenceKey, Stop
from worker.engine.sequence import Sequence as EngineSequence
from worker.grammar.grammar_process import COMPILE_STACK_BYTES
from worker.model.adapters import Adapter, read_adapters
from worker.vllm_engine.core import SampledTokens, ScheduledRow, ScheduledStep
from worker.vllm_engine.executor import WatchedExecutor
from worker.vllm_engine.images import VllmImages
from worker.vllm_engine.params import sampling_params
from worker.vllm_engine.prefix_cache import PrefixCache, RemovedBlocks, StoredBlocks

_SCHEDULER = "worker.vllm_engine.scheduling.ContinuingScheduler"
_CPU_WORKER = "worker.vllm_engine.cpu_worker.ContinuingCPUWorker"
_GPU_WORKER = "worker.vllm_engine.gpu_worker.EndingGPUWorker"
_STOPS = {FinishReason.STOP: Stop.EOS, FinishReason.LENGTH: Stop.LENGTH}


@dataclass(frozen=True, slots=True)
class CoreDevice:
    """Sizes and device of a started core, from which the limits of the engine follow.

    ``num_blocks`` is the number of usable KV blocks. ``adapters`` has the digests of the LoRA
    adapters by name. Blocks are not swapped to host memory, so ``num_host_blocks`` and
    ``host_load_s`` are 0.
    """

    num_blocks: int
    vocab_size: int
    max_model_len: int
    device_kind: DeviceKind
    adapters: Mapping[str, str]
    num_host_blocks: int = 0
    host_load_s: float = 0.0


class VllmCore:
    """Core of vLLM with the model and the settings of a worker."""

    def __init__(self, config: WorkerConfig, on_failure: Callable[[str], None]) -> None:
        """Load the model and start vLLM's executor.

        ``on_failure`` is called with the cause, in another thread, if a process of the executor
        ends. Raises ModelUnavailable if files of the model or of adapters are missing, or if the
        model is a GGUF file. Raises ValueError if adapters are invalid, or if vLLM chooses its
        model runner V1 on a GPU, which ignores the output that a continued sequence has. Errors of
        vLLM are raised too.
        """
        if model_files.is_gguf_model(config.model):
            raise model_files.ModelUnavailable(
                f"{config.model} is a GGUF file, which vLLM does not read: set worker.engine to "
                "everlift, or name a directory or a hub id"
            )
        directory = model_files.locate(config.model, config.model_revision, weights=True)
        adapters = read_adapters(config.adapters, directory)
        self._config = _vllm_config(config, directory, adapters)
        # For threads that compile grammars. On a smaller stack, a client's grammar with a long
        # chain of rules would end the process.
        threading.stack_size(COMPILE_STACK_BYTES)
        self._core = EngineCore(
            self._config,
            _executor_class(self._config),
            log_stats=False,
            executor_fail_callback=lambda: on_failure("a process of vLLM has ended"),
        )
        # For some models, vLLM replaces the configured size when it starts.
        self._block_size: int = self._config.cache_config.block_size
        self._scheduler: Any = self._core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._sequences: dict[str, EngineSequence] = {}
        self._prefix_cache = PrefixCache()
        # The scheduler passes the events of each step to its publisher. Routers cannot know the
        # chunks of blocks of another size.
        self._scheduler.kv_event_publisher = _Publisher(
            self._prefix_cache if self._block_size == BLOCK_SIZE else None
        )
        self._adapters = {
            adapter.name: LoRARequest(adapter.name, number, str(adapter.directory))
            for number, adapter in enumerate(adapters, 1)
        }
        for request in self._adapters.values():
            self._core.add_lora(request)
            self._core.pin_lora(request.lora_int_id)
        model = self._config.model_config
        images = VllmImages(model) if model.is_multimodal_model else None
        self.image_processor = images if images is not None and images.max_images else None
        self.limits = replace(
            Limits.of(config, self._device({it.name: it.digest for it in adapters})),
            max_images=0 if images is None else images.max_images,
        )

    def _device(self, adapters: Mapping[str, str]) -> CoreDevice:
        model = self._config.model_config
        # One block is never used: vLLM's null block.
        num_blocks = in_own_blocks(self._pool.num_gpu_blocks - 1, self._block_size)
        size = num_blocks, model.get_vocab_size(), model.max_model_len
        return CoreDevice(*size, _device_kind(), adapters)

    @property
    def num_free_blocks(self) -> int:
        return in_own_blocks(self._pool.get_num_free_blocks(), self._block_size)

    def add(self, sequence: EngineSequence) -> None:
        params = sampling_params(sequence, self.limits, on_gpu=not _is_cpu())
        name, images = _name(sequence.key), sequence.processed_images
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=(
                images.prompt_ids if images else sequence.tokens[: sequence.num_prompt]
            ),
            mm_features=cast(Any, images.features) if images else None,
            sampling_params=params,
            pooling_params=None,
            # Only the order counts.
            arrival_time=float(sequence.order),
            lora_request=self._adapters[sequence.adapter] if sequence.adapter else None,
            cache_salt=sequence.salt.hex() or None,
            data_parallel_rank=None,
            # A small number leaves vLLM's queue first.
            priority=-sequence.priority,
        )
        try:
            queued, _ = self._core.preprocess_add_request(request)
        except (ValueError, VLLMValidationError) as error:
            raise InvalidRequest(f"vLLM rejects the request: {error}") from None
        self._sequences[name] = sequence
        self._core.add_request(queued)

    def remove(self, keys: Sequence[SequenceKey]) -> None:
        names = [_name(key) for key in keys]
        for name in names:
            self._sequences.pop(name, None)
        if names:
            self._core.abort_requests(names)

    def step(self, on_scheduled: Callable[[ScheduledStep], None]) -> list[SampledTokens]:
        def scheduled(output: SchedulerOutput, preempted: Sequence[str]) -> None:
            on_scheduled(self._described(output, preempted))

        self._scheduler.on_scheduled = scheduled
        outputs, was_executed = self._core.step_fn()
        self._core.post_step(was_executed)
        return [
            self._sampled(output)
            for each in (outputs or {}).values()
            for output in each.outputs
            if output.request_id in self._sequences
        ]

    def _described(self, output: SchedulerOutput, preempted: Sequence[str]) -> ScheduledStep:
        counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        admitted = [new.req_id for new in output.scheduled_new_reqs]
        admitted += [name for name in cached.req_ids if name in cached.resumed_req_ids]
        return ScheduledStep(
            [self._sequences[name].key for name in admitted],
            [self._sequences[name].key for name in preempted if name in self._sequences],
            [
                ScheduledRow(self._sequences[name].key, starts[name], count)
                for name, count in counts.items()
            ],
        )

    def _sampled(self, output: EngineCoreOutput) -> SampledTokens:
        sequence = self._sequences[output.request_id]
        stop, error = None, None
        if output.finish_reason is not None:
            del self._sequences[output.request_id]
            stop = _STOPS.get(output.finish_reason, Stop.FAILED)
            error = _error(output) if stop is Stop.FAILED else None
        sampling = sequence.sampling
        return SampledTokens(
            sequence.key,
            tuple(output.new_token_ids),
            stop,
            error,
            tuple(_logprobs(output.new_logprobs, sampling.logprobs)),
            tuple(_logprobs(output.new_prompt_logprobs_tensors, sampling.prompt_logprobs)),
        )

    def take_chunk_changes(self) -> ChunkChanges:
        return self._prefix_cache.take_changes()

    def close(self) -> None:
        self._core.shutdown()


def in_own_blocks(count: int, block_size: int) -> int:
    """Return how many of Everlift's blocks hold what ``count`` blocks of ``block_size`` tokens do.

    The result is rounded down.
    """
    return count * block_size // BLOCK_SIZE


class _Publisher:
    """Event publisher for vLLM's scheduler that applies the events to ``prefix_cache``.

    Nothing is sent. Events of blocks with tokens of an image, and of later blocks, are ignored; all
    events are ignored if ``prefix_cache`` is None.
    """

    def __init__(self, prefix_cache: PrefixCache | None) -> None:
        self._prefix_cache = prefix_cache

    def publish(self, batch: KVEventBatch) -> None:
        if self._prefix_cache is None:
            return
        for event in batch.events:
            if isinstance(event, BlockStored):
                # Routers cannot know a block with tokens of an image, nor one after it.
                if not (count := _num_without_image(event)):
                    continue
                names = [_bytes(name) for name in event.block_hashes[:count]]
                parent = event.parent_block_hash
                before = None if parent is None else _bytes(parent)
                salt = _salt(event) if parent is None else b""
                self._prefix_cache.apply(StoredBlocks(names, before, event.token_ids, salt))
            elif isinstance(event, BlockRemoved):
                self._prefix_cache.apply(RemovedBlocks([_bytes(it) for it in event.block_hashes]))

    def shutdown(self) -> None:
        """Do nothing."""


def _num_without_image(event: BlockStored) -> int:
    """Return the number of blocks before the first one that has tokens of an image."""
    for number, keys in enumerate(event.extra_keys or ()):
        if any(isinstance(key, tuple) for key in keys or ()):
            return number
    return len(event.block_hashes)


def _salt(event: BlockStored) -> bytes:
    """Return the salt of a prefix from the event of its first block; empty if there is none.

    The block's extra keys have the name of the adapter, if any, before the salt.
    """
    keys = (event.extra_keys[0] if event.extra_keys else None) or ()
    own = keys[1:] if event.lora_name else keys
    return bytes.fromhex(own[0]) if own else b""


def _bytes(name: bytes | int) -> bytes:
    return name if isinstance(name, bytes) else name.to_bytes(8, "little")


def _error(output: EngineCoreOutput) -> EverliftError:
    return EngineFailed(f"vLLM ended the sequence: {output.stop_reason or output.finish_reason}")


def _logprobs(found: Any, num_top: int | None) -> Iterator[TokenLogprobs]:
    """Yield the log probabilities of each row of ``found``, with ``num_top`` alternatives.

    ``found`` has vLLM's lists or tensors of token ids, log probabilities and ranks. The first
    column of a row is the sampled or prompt token; the others are the most likely ones. Yields
    nothing if ``found`` or ``num_top`` is None.
    """
    if found is None or num_top is None:
        return
    # vLLM computes as many columns as the request of the batch that wants the most.
    end = 1 + num_top
    ids, logprobs, ranks, *_ = found
    rows = zip(ids[:, :end].tolist(), logprobs[:, :end].tolist(), ranks.tolist(), strict=True)
    for row_ids, row_logprobs, rank in rows:
        top = tuple(zip(row_ids[1:], row_logprobs[1:], strict=True))
        yield TokenLogprobs(row_logprobs[0], rank, top)


def _name(key: SequenceKey) -> str:
    return f"{key.epoch}:{key.choice}"


def _device_kind() -> DeviceKind:
    from vllm.platforms import current_platform

    if _is_cpu():
        return DeviceKind.CPU
    # None on other platforms than CUDA and ROCm.
    if (capability := current_platform.get_device_capability()) is None:
        return DeviceKind.GPU
    memory_bytes = current_platform.get_device_total_memory()
    return kind_of_gpu(memory_bytes, (capability.major, capability.minor))


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _backend(config: WorkerConfig) -> str:
    """Return the name of vLLM's executor: ``uni`` for one device, else ``ray`` or ``mp``.

    Ray is used if the current Ray placement group has several bundles.
    """
    if config.tensor_parallel == 1:
        return "uni"
    # Without a connection to Ray, the question for the placement group would start Ray.
    if "ray" in sys.modules and (ray := sys.modules["ray"]).is_initialized():
        group = ray.util.get_current_placement_group()
        if group is not None and group.bundle_count > 1:
            return "ray"
    return "mp"


def _executor_class(config: VllmConfig) -> type[Executor]:
    found = Executor.get_class(config)
    return WatchedExecutor if found is MultiprocExecutor else found


def _kv_cache_bytes(config: WorkerConfig, total_mib: int) -> int:
    """Return the size of one device's part of the KV cache, in bytes.

    ``total_mib`` is the size on all devices together, in MiB.
    """
    return (total_mib << 20) // config.tensor_parallel


def _vllm_config(config: WorkerConfig, directory: Path, adapters: list[Adapter]) -> VllmConfig:
    arguments: dict[str, Any] = {
        "model": str(directory),
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.batched_tokens(_device_kind()),
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": _backend(config),
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        # The router tokenizes and detokenizes.
        "skip_tokenizer_init": False,
        # The router has read the model's sampling defaults.
        "generation_config": "vllm",
        "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0, "audio": 0},
        # Several requests seldom have the same image, and tenants must not share it.
        "mm_processor_cache_gb": 0,
        "scheduler_cls": _SCHEDULER,
        "async_scheduling": False,
        "disable_log_stats": True,
    }
    if adapters:
        rank = max(adapter.rank for adapter in adapters)
        arguments["enable_lora"] = True
        # On CPUs, vLLM computes rows without an adapter with the last slot if other rows have one.
        # An additional slot, which stays empty, makes this right.
        arguments["max_loras"] = len(adapters) + _is_cpu()
        arguments["max_lora_rank"] = min(it for it in get_args(MaxLoRARanks) if it >= rank)
    # -1: the model's context, or less if the KV cache holds less.
    arguments["max_model_len"] = config.max_model_len or -1
    if config.num_blocks:
        # vLLM never uses one of its blocks.
        arguments["num_gpu_blocks_override"] = config.num_blocks + 1
    if _is_cpu():
        arguments["worker_cls"] = _CPU_WORKER
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = _kv_cache_bytes(config, config.cpu_kv_cache_mib)
    else:
        arguments["worker_cls"] = _GPU_WORKER
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        if config.kv_cache_mib:
            arguments["kv_cache_memory_bytes"] = _kv_cache_bytes(config, config.kv_cache_mib)
    found = EngineArgs(**arguments).create_engine_config()
    if not _is_cpu() and not found.use_v2_model_runner:
        # Version 1 ignores the output that a sequence has when it is queued, without an error.
        raise ValueError(
            "vLLM chose its model runner V1, which loses the output of requests that continue "
            "after the loss of a worker: vLLM's log names the reason, or "
            "VLLM_USE_V2_MODEL_RUNNER is set to 0"
        )
    return found
