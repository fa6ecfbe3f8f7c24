"""Time of an engine's step, as a function of its size. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class StepSize(NamedTuple):
    """Size of a step. A row is one sequence's part of it."""

    num_rows: float
    #: computed in this step, of all rows
    num_tokens: float
    #: known tokens of all rows, whose keys and values are read
    kv_tokens: float
    #: of a computed token and one that it attends to
    num_pairs: float


class StepTime(Protocol):
    def seconds(self, size: StepSize) -> float: ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline of a step: weights while tokens are multiplied, then keys and values.

    the weights are read while the tokens are multiplied with them, the longer of the two counts;
    keys and values are read after that.

        overhead_s + max(weights_s, num_tokens * token_s) + kv_tokens * kv_token_s
                   + num_pairs * pair_s + num_rows * row_s
    """

    overhead_s: float
    #: to read the weights once
    weights_s: float
    #: to multiply one token with all of them
    token_s: float
    #: to read one token's keys and values
    kv_token_s: float
    #: to compute one token's attention to another one
    pair_s: float = 0.0
    #: to find one row's next token
    row_s: float = 0.0

    def seconds(self, size: StepSize) -> float:
        products_s = max(self.weights_s, size.num_tokens * self.token_s)
        attention_s = size.kv_tokens * self.kv_token_s + size.num_pairs * self.pair_s
        return self.overhead_s + products_s + attention_s + size.num_rows * self.row_s
