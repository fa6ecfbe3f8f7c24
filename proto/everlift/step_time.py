"""Models of the time of an engine's step as a function of its size. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class StepSize(NamedTuple):
    """Size of an engine's step. A row is the part of one sequence in the step."""

    num_rows: float
    #: tokens of all rows that are computed in this step
    num_tokens: float
    #: tokens of all rows, from the first up to this step's, whose keys and values are read
    kv_tokens: float
    #: pairs of a computed token and a token that it attends to
    num_pairs: float


class StepTime(Protocol):
    def seconds(self, size: StepSize) -> float: ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline model of the time of a step.

    The weights are read while the tokens are multiplied with them, so that the longer of the two
    times counts. Keys and values are read after that.

        overhead_s + max(weights_s, num_tokens * token_s) + kv_tokens * kv_token_s
                   + num_pairs * pair_s + num_rows * row_s
    """

    overhead_s: float
    #: seconds to read the weights once
    weights_s: float
    #: seconds to multiply one token with all weights
    token_s: float
    #: seconds to read one token's keys and values
    kv_token_s: float
    #: seconds to compute one token's attention to one other token
    pair_s: float = 0.0
    #: seconds to determine one row's next token
    row_s: float = 0.0

    def seconds(self, size: StepSize) -> float:
        products_s = max(self.weights_s, size.num_tokens * self.token_s)
        attention_s = size.kv_tokens * self.kv_token_s + size.num_pairs * self.pair_s
        return self.overhead_s + products_s + attention_s + size.num_rows * self.row_s
