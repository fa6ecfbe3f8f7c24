"""By slot, the token that was drawn last, on the device: a step that decodes it may be launched
before the host knows it."""

from __future__ import annotations

import torch
from torch import Tensor


class LastTokens:
    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def put(self, slots: Tensor, tokens: Tensor) -> None:
        """``tokens`` int64 [n] were drawn in ``slots`` int64 [n]. A mark, of a row from which none
        could be drawn, becomes some token: what follows it is thrown away."""
        self._tokens.index_copy_(0, slots, tokens.clamp(min=0))

    def fill_in(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """``tokens`` int64 [T] of ``slots`` int64 [T], where UNKNOWN the one drawn last."""
        return torch.where(tokens < 0, self._tokens[slots], tokens)
