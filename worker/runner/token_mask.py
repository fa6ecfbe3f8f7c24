"""Masks of a grammar for the sampler: the allowed next tokens, 32 per word.

Word i of a mask has the tokens 32 * i to 32 * i + 31, the first in its lowest bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# A word's bytes are read as they lie in memory.
assert sys.byteorder == "little"


class TokenMask(Protocol):
    """State of one sequence in its grammar. ``mask`` raises EverliftError if it cannot continue."""

    def is_ready(self) -> bool:
        """Return whether ``mask`` without drafts answers at once, or soon enough to wait."""
        ...

    def mask(self, drafts: Sequence[int], into: Tensor, began: float) -> int:
        """Fill ``into`` with the allowed tokens after the output and after each draft.

        int32 [1 + len(drafts), mask_words(vocab)], on the CPU. How many of the drafts the grammar
        allows; what stands behind the first that it does not allow means nothing. ``began`` is when
        the step began to wait for masks, in monotonic time: from then on it waits for all of them
        together no longer than for one.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by the drawn ``tokens``.

        Where it cannot, the next mask says so: of what was drawn the other ranks have heard.
        """
        ...


class CompiledGrammar(Protocol):
    """Form of ``Admission.grammar`` on the rank that samples."""

    def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> TokenMask:
        """Return the matcher of a sequence with this ``output``.

        Raises EverliftError if the output does not match.
        """
        ...


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def forbidden(mask: Tensor, vocab_size: int) -> Tensor:
    """Return the forbidden tokens of ``mask`` int32 [n, mask_words(vocab_size)].

    bool [n, vocab_size], on its device.
    """
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    allowed = mask.view(torch.uint8).unsqueeze(-1).bitwise_and(bits)
    return allowed.flatten(1)[:, :vocab_size] == 0
