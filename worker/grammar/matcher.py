"""Compiled grammar, and the state of a sequence in it, for the engine's thread."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import torch
from torch import Tensor

from everlift.errors import EverliftError
from worker.grammar.channel import Channel
from worker.grammar.messages import Request


class CompiledGrammar:
    """Compiled grammar on the rank that samples.

    Its grammar process lives until the grammar and all its matchers are gone. ``eos_token_ids`` are
    the model's own end tokens; ``num_bytes`` is the memory of the grammar in its process.
    """

    def __init__(self, channel: Channel, eos_token_ids: tuple[int, ...], num_bytes: int) -> None:
        self.eos_token_ids = eos_token_ids
        self.num_bytes = num_bytes
        self._channel = channel
        self._matchers = count(1)

    @property
    def is_lost(self) -> bool:
        """Return whether the grammar process has ended."""
        return self._channel.is_lost

    def fail_sequences(self) -> None:
        """End the grammar process, so that the sequences of this grammar fail."""
        self._channel.close()

    def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> Matcher:
        """Return the matcher of a sequence whose tokens so far are ``output``.

        ``stop_token_ids`` are allowed only where the grammar is complete. Raises EverliftError if
        the grammar process has ended. If the grammar does not allow ``output``, Matcher.mask raises
        EverliftError.
        """
        return Matcher(self._channel, next(self._matchers), stop_token_ids, output)


class Matcher:
    """State of a sequence in its grammar.

    The mask of the next token is requested on creation and after each ``accept``. If the sequence
    cannot continue, the next call of ``mask`` raises EverliftError.
    """

    def __init__(
        self, channel: Channel, number: int, stop_token_ids: frozenset[int], output: Sequence[int]
    ) -> None:
        self._channel = channel
        self._number = number
        self._next: bytes | None = None
        #: whether the mask of the next token was returned and the sampled token is not known yet
        self._is_sampling = False
        self._send(
            {
                "do": "open",
                "matcher": number,
                "stops": sorted(stop_token_ids),
                "tokens": list(output),
            }
        )
        weakref.finalize(self, channel.drop_matcher, number)

    def is_ready(self) -> bool:
        """Return whether ``mask`` would return or raise without a long wait.

        The result is True whenever all grammar processes together have little work. Otherwise it is
        True only if the mask of the next token, or an error, has arrived. The result is then False
        between ``mask`` and ``accept``, because the token to sample is not known yet.
        """
        if not self._channel.is_busy:
            return True
        if self._is_sampling:
            return False
        return self._next is not None or self._channel.has_reply(self._number)

    def mask(self, drafts: Sequence[int], into: Tensor, waiting_since: float) -> int:
        """Fill ``into`` with bit masks of allowed tokens, and return the number of allowed drafts.

        ``into`` is int32 [1 + len(drafts), words], on the CPU; ``words`` is the number of 32-bit
        words of a mask, which has one bit per token. The rows are the masks after the output and
        after each allowed draft; further rows are 0. A stop token is never an allowed draft. No
        drafts are allowed while the grammar processes are busy, because their masks would have to
        wait for all queued requests. ``waiting_since`` is the monotonic time at which the step
        began to wait for masks. Raises EverliftError if the sequence cannot continue.
        """
        into.zero_()
        _fill(into[:1], self._mask_of_next(waiting_since))
        self._expect_token()
        if not drafts or self._channel.is_busy:
            return 0
        self._send({"do": "drafts", "matcher": self._number, "tokens": list(drafts)})
        masks = self._channel.take_reply(self._number, waiting_since)
        num_allowed = len(masks) // (into.shape[1] * into.element_size())
        _fill(into[1 : 1 + num_allowed], masks)
        return num_allowed

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by the sampled ``tokens``, and request the mask of the token after them.

        No error is raised here; the next call of ``mask`` raises it.
        """
        with suppress(EverliftError):
            self._mask_of_next(time.monotonic())
            self._expect_token()
            self._next, self._is_sampling = None, False
            self._channel.send({"do": "accept", "matcher": self._number, "tokens": list(tokens)})

    def _expect_token(self) -> None:
        if not self._is_sampling:
            self._is_sampling = True
            self._channel.expect(self._number)

    def _send(self, request: Request) -> None:
        self._channel.expect(self._number)
        self._channel.send(request)

    def _mask_of_next(self, waiting_since: float) -> bytes:
        if self._next is None:
            self._next = self._channel.take_reply(self._number, waiting_since)
        return self._next


def _fill(rows: Tensor, masks: bytes) -> None:
    if masks:
        rows.copy_(torch.frombuffer(bytearray(masks), dtype=torch.int32).view(rows.shape))
