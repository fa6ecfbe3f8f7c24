"""transformers for bench-engine: static batches, or its continuous batching.

With the setting ``batch_size``, batches are static, and formed in an ``order``: "arrival", or the
longest "prompt" or "output" first. A server could not know the latter. Without it, the settings are
those of ContinuousBatchingConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.modeling_utils import PreTrainedModel

from benchmarks.engine_system import Job, Request, System, main

_PAD = 0
_NO_TOKEN = -1
#: Sort keys of requests, by name of the order.
_LENGTHS: dict[str, Callable[[Request], tuple[int, ...]]] = {
    "arrival": lambda request: (),
    "prompt": lambda request: (-len(request.prompt),),
    "output": lambda request: (-request.max_tokens, -len(request.prompt)),
}


class Static:
    """Static, left-padded batches; each runs as long as its longest request."""

    def __init__(self, model: PreTrainedModel, batch_size: int, order: str) -> None:
        self._model = model
        self._batch_size = batch_size
        self._length_of = _LENGTHS[order]

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in requests]
        for batch in self._batches(requests):
            tokens = self._generate([requests[i] for i in batch])
            for i, row in zip(batch, tokens, strict=True):
                outputs[i] = row[: requests[i].max_tokens]
        return outputs

    def _batches(self, requests: Sequence[Request]) -> Iterator[Sequence[int]]:
        order = sorted(range(len(requests)), key=lambda i: self._length_of(requests[i]))
        for first in range(0, len(requests), self._batch_size):
            yield order[first : first + self._batch_size]

    def _generate(self, requests: Sequence[Request]) -> list[list[int]]:
        width = max(len(request.prompt) for request in requests)
        prompts, mask = torch.full((2, len(requests), width), _PAD)
        for i, request in enumerate(requests):
            prompts[i, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[i, width - len(request.prompt) :] = 1
        longest = max(request.max_tokens for request in requests)
        device = self._model.device
        output = self._model.generate(
            prompts.to(device),
            attention_mask=mask.to(device),
            generation_config=_greedy(longest),
        )
        rows: list[list[int]] = output[:, width:].tolist()
        return rows

    def close(self) -> None:
        pass


class Continuous:
    def __init__(self, model: PreTrainedModel, longest: int, config: ContinuousBatchingConfig):
        self._model = model
        self._manager = model.init_continuous_batching(
            generation_config=_greedy(longest), continuous_batching_config=config
        )
        if model.device.type == "cuda":
            # Capture CUDA graphs before the first request, as generate_batch does.
            self._manager.warmup()
        self._manager.start()

    @property
    def attention(self) -> str:
        """Name of the attention in use; call it before ``close``, which resets the model."""
        return str(self._model.config._attn_implementation)

    @property
    def graphs(self) -> str:
        """Pair of booleans, as text: prefill and decoding are captured as CUDA graphs.

        The manager writes it to its own copy of the configuration.
        """
        return str(self._manager.continuous_batching_config.use_cuda_graph)

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        keys = [
            self._manager.add_request(
                request.prompt, max_new_tokens=request.max_tokens, eos_token_id=_NO_TOKEN
            )
            for request in requests
        ]
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(requests):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("continuous batching has ended")
            if result is not None and result.error:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[key] for key in keys]

    def close(self) -> None:
        self._manager.stop(block=True)


def _greedy(max_new_tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=_PAD)


def load(job: Job) -> System:
    torch.set_num_threads(job.threads)
    settings = job.settings
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16).eval()
    # No request ends before its length.
    model.generation_config.eos_token_id = None
    if "batch_size" in settings:
        return Static(model, settings["batch_size"], settings["order"])
    longest = max(request.max_tokens for request in job.batch)
    return Continuous(model, longest, ContinuousBatchingConfig(**settings))


if __name__ == "__main__":
    main(load)
