"""Masks of a grammar's allowed next tokens, 32 per word, for the sampler.

Word i has a bit for each of the tokens 32 * i to 32 * i + 31; the lowest bit is for the first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# ``forbidden`` reads a word's bytes in the order of memory.
assert sys.byteorder == "little"


class TokenMask(Protocol):
    """State of one sequence in its grammar."""

    def is_ready(self) -> bool:
        """Return whether a step should sample this sequence now; False if ``mask`` would take long.

        A sequence that is not ready is left out of the step, unless no other sequence can run.
        ``mask`` is assumed to be called without drafts.
        """
        ...

    def mask(self, drafts: Sequence[int], into: Tensor, waiting_since: float) -> int:
        """Fill ``into`` with masks of the tokens allowed after the output and after each draft.

        ``into`` is int32 [1 + len(drafts), mask_words(vocab)], on the CPU. Returns the number of
        leading drafts that may be accepted. It is at most the number that the grammar allows, and
        may be less to avoid a wait. With the result n, rows after index n are undefined.

        ``waiting_since`` is the monotonic time at which the step began to wait for masks. The
        timeout begins at that time, so that it limits the wait for all masks of the step together.
        Raises EverliftError if the sequence cannot continue.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by the sampled ``tokens``.

        If this fails, the next ``mask`` raises the error, because the other ranks have already
        received these tokens.
        """
        ...


class CompiledGrammar(Protocol):
    """Interface of ``Admission.grammar`` on the rank that samples."""

    def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> TokenMask:
        """Return the grammar's state after ``output``, the tokens that a sequence has so far.

        Raises EverliftError if it is already known that the grammar does not allow ``output``, or
        if the grammar has failed.
        """
        ...


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def forbidden(mask: Tensor, vocab_size: int) -> Tensor:
    """Return for each token whether ``mask`` forbids it, as bool [n, vocab_size].

    ``mask`` is int32 [n, mask_words(vocab_size)]; the result is on its device.
    """
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    allowed = mask.view(torch.uint8).unsqueeze(-1).bitwise_and(bits)
    return allowed.flatten(1)[:, :vocab_size] == 0
