"""Check of an engine's greedy tokens against the logits of transformers in fp32.

Models with random weights have near ties, which bfloat16 may decide either way, and after one the
sequences differ. Therefore each token is judged given the engine's own tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks import checkpoints
from benchmarks.engine_system import Request

#: Largest shortfall of a token that rounding may cause, in standard deviations of the logits. The
#: largest of 32,000 logits is some four above the mean, so a wrong KV cache exceeds this limit.
TOLERANCE = 0.5


@dataclass(frozen=True)
class Judgement:
    """Agreement of tokens with a model.

    ``best`` is the share of tokens with the largest logit. ``shortfall`` is the largest difference
    of a token's logit to the largest one, in standard deviations of the logits at its position.
    """

    best: float
    shortfall: float

    @property
    def is_right(self) -> bool:
        return self.shortfall <= TOLERANCE


@torch.inference_mode()
def judge(
    model: Path, requests: Sequence[Request], outputs: dict[str, list[list[int]]]
) -> dict[str, Judgement]:
    """Return the judgement of each system; its first ``outputs`` are those of ``requests``.

    A quantised model is judged by its dequantised weights.
    """
    reference = _reference(model)
    judgements = {}
    for system, tokens in outputs.items():
        lacking: list[float] = []
        for request, output in zip(requests, tokens, strict=False):
            text = torch.tensor([request.prompt + output])
            logits = reference(text, logits_to_keep=len(output) + 1).logits[0, :-1]
            chosen = logits.gather(1, text[0, len(request.prompt) :, None])[:, 0]
            lacking += ((logits.amax(1) - chosen) / logits.std(1)).tolist()
        best = sum(each == 0 for each in lacking) / len(lacking)
        judgements[system] = Judgement(best, max(lacking))
    return judgements


def _reference(model: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model)
    if not hasattr(config, "quantization_config"):
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return loaded
    del config.quantization_config
    dense: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # A tied LM head is not stored.
    dense.load_state_dict(checkpoints.dequantised(model), strict=not config.tie_word_embeddings)
    return dense.eval()


def equal_share(one: Iterable[Sequence[int]], other: Iterable[Sequence[int]]) -> float:
    """Return the share of sequences that are equal in full."""
    same = [a == b for a, b in zip(one, other, strict=True)]
    return sum(same) / len(same)
