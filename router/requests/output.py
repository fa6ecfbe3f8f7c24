"""Output of one choice: tokens, the text that each of them released, their log probabilities.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from everlift.messages import Request
from everlift.sampling import TokenLogprobs
from everlift.text import Stops, TextState, Tokenizer


class Output:
    """Tokens and text of one choice.

    The text after token k depends on tokens 0..k alone, so a reader can continue at any offset.
    ``logprobs`` are those of the tokens, or empty if the request does not ask for them.
    """

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer) -> Self:
        """Return the output of one choice of ``request`` before its first token."""
        stops = Stops(
            request.stop,
            frozenset(request.stop_token_ids),
            request.sampling.min_tokens,
            request.include_stop,
            frozenset(request.eos_token_ids),
        )
        return cls(TextState(tokenizer, stops))

    def __init__(self, text: TextState) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        #: a stop string is complete: nothing may follow
        self.stopped = False
        self._text = text
        self._released: list[str] = []
        self._tail = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Adds tokens up to the one that completes a stop string."""
        start = len(self)
        for token in tokens:
            if self.stopped:
                break
            self.tokens.append(token)
            self._released.append(self._text.push(token))
            self.stopped = self._text.stopped
        if logprobs:
            self.logprobs.extend(logprobs[: len(self) - start])

    def finish(self) -> None:
        """No token follows: releases the text that was held back."""
        self._tail = self._text.finish()

    def text(self, start: int, stop: int) -> str:
        """Text released by the tokens from ``start`` to before ``stop``."""
        return "".join(self._released[start:stop])

    @property
    def stop_reason(self) -> str | int | None:
        """Return the stop that the client named and that ended the text, as TextState does."""
        return self._text.stop_reason

    @property
    def tail(self) -> str:
        """Text released by the finish."""
        return self._tail
