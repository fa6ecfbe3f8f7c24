"""Random Llama checkpoints and transformers' results on them, the oracle of the torch runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from everlift.sampling import SamplingParams
from worker.runner.uniform import uniform

logging.disable_progress_bar()

#: Two runs may differ where the reference's margin is below this, because rounding may decide.
NEAR = 1e-3
#: GQA, heads narrower or wider than hidden size / heads, and a vocabulary that no number of ranks
#: divides.
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 5,
    "tie_word_embeddings": False,
}


def save_llama(directory: Path, *, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Save a random model whose logits are spread wide enough to make near ties rare."""
    torch.manual_seed(20)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(std=0.2 if is_norm else 0.3).add_(is_norm)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def load_llama(directory: Path) -> LlamaForCausalLM:
    """Load the checkpoint with transformers, in fp32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


@dataclass(frozen=True)
class Reference:
    """Expected tokens; ``margins`` are the distances by which each token was selected."""

    tokens: list[int]
    margins: list[float]

    def near_ties(self, tokens: Sequence[int]) -> int:
        """Return 0 if ``tokens`` are the same, or 1 if they first differ at a near tie.

        Other differences raise AssertionError. This is the definition of identity of design.md 7.
        """
        for i, (got, expected) in enumerate(zip(tokens, self.tokens, strict=False)):
            if got != expected:
                assert self.margins[i] < NEAR, f"token {i} is {got}, not {expected}"
                return 1
        assert len(tokens) == len(self.tokens)
        return 0


def generate(model: LlamaForCausalLM, prompt: Sequence[int], max_tokens: int) -> Reference:
    """Decode greedily with transformers; a margin is the gap between the two largest logits."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best, second = torch.cat(result.logits).topk(2).values.unbind(-1)
    return Reference(result.sequences[0, len(prompt) :].tolist(), (best - second).tolist())


@torch.inference_mode()
def redraw(
    model: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Reference:
    """Sample each token of ``output`` again, with transformers' logits and filters.

    A margin is the distance of the uniform number to the nearest edge between tokens.
    """
    logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    edges = warped(logits, params).double().softmax(-1).cumsum(-1)
    positions = np.arange(len(output), dtype=np.uint64)
    points = np.full_like(positions, params.seed), np.zeros_like(positions), positions
    numbers = torch.from_numpy(uniform(*points))[:, None]
    margins = (edges - numbers).abs().min(-1).values
    tokens = torch.searchsorted(edges, numbers, right=True)[:, 0]
    return Reference(tokens.tolist(), margins.tolist())


def warped(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return ``scores`` [n, vocab] after transformers' filters; -inf is removed."""
    ids = torch.zeros(len(scores), 1, dtype=torch.int64)
    warpers = [TemperatureLogitsWarper(params.temperature)]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    for warper in warpers:
        scores = warper(ids, scores)
    return scores
