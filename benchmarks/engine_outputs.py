"""Whether an engine's greedy tokens are the model's: transformers, in fp32, reads them.

Random weights make near ties, which bfloat16 decides one way or the other, and after the first the
sequences go their own ways. So a token is judged by the text before it as the engine wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine_system import Request

#: In standard deviations of a token's logits, of which the likeliest of 32,000 is some four above
#: the mean: what rounding may cost, and a wrong cache does not stay within.
TOLERANCE = 0.5


@dataclass(frozen=True)
class Judgement:
    """``best`` is the share of tokens that are the likeliest ones. ``shortfall`` is the most that
    any lacks to it, in standard deviations of the logits there."""

    best: float
    shortfall: float

    @property
    def is_right(self) -> bool:
        return self.shortfall <= TOLERANCE


@torch.inference_mode()
def judge(
    model: Path, requests: Sequence[Request], outputs: dict[str, list[list[int]]]
) -> dict[str, Judgement]:
    """By system, of whose ``outputs`` the first ones are those of ``requests``."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
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


def equal_share(one: Iterable[Sequence[int]], other: Iterable[Sequence[int]]) -> float:
    """Of sequences that are the same to their end."""
    same = [a == b for a, b in zip(one, other, strict=True)]
    return sum(same) / len(same)
