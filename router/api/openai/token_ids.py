"""Token ids in answers, as vLLM returns them with ``return_token_ids``. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.api.http.transcript import NewOutput


class TokenIds:
    """Token ids of an answer's prompts and choices.

    ``choices_each`` is the number of choices of each prompt; those of the first prompt come first.
    """

    def __init__(self, choices_each: int) -> None:
        #: token ids of each prompt; set before any output is written
        self.prompts: Sequence[Sequence[int]] = ()
        self._choices_each = choices_each

    def prompt(self, choice: int) -> list[int]:
        """Return the token ids of the prompt of a choice."""
        return [*self.prompts[choice // self._choices_each]]

    def new(self, output: NewOutput) -> list[int]:
        """Return the token ids of new output that the client does not have yet."""
        return [*output.tokens[output.num_known :]]
