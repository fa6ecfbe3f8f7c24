"""Drawing on a GPU, by a kernel in Triton (worker.kernels.drawing): nothing is sorted, and the host
waits for nothing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.draw import Draws
from worker.kernels.drawing import draw_rows
from worker.upload import upload

#: Tokens that a program looks at in one go, 16 of them a thread.
_BLOCK, _WARPS = 8192, 16


def draw_by_kernel(logits: Tensor, draws: Draws) -> Tensor:
    """As worker.draw.draw. Weights and their sums are rounded otherwise, so that a number at the
    very edge between two tokens may draw the other one."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    columns = (draws.filters.view(np.int64), draws.keys.view(np.int64), draws.positions)
    together = upload(np.concatenate([each.reshape(-1) for each in columns]), logits.device)
    filters, keys, positions = together.split_with_sizes([each.size for each in columns])
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    draw_rows[(len(logits),)](
        tokens,
        logits,
        filters.view(torch.float64),
        keys,
        positions,
        logits.stride(0),
        VOCAB=logits.shape[1],
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return tokens
