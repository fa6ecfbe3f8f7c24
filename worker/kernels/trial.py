"""Whether the kernels can be used here: Triton may be missing, or the C compiler that it needs."""

from __future__ import annotations

from functools import cache

import torch

from everlift import logs

log = logs.get(__name__)


@cache
def kernels_work(device: torch.device) -> bool:
    """Tries one on ``device``; where it does not, the log says why, once."""
    try:
        return _add_works(device)
    except Exception as error:
        log.warning("no kernels in Triton here: torch computes, slower", cause=repr(error))
        return False


def _add_works(device: torch.device) -> bool:
    # Imported for a GPU alone.
    from worker.model.kernel_pointwise import KernelPointwise

    x, ones = torch.ones(2, 16, device=device), torch.ones(2, 16, device=device)
    normed = KernelPointwise().norm(x, ones[0], 0.0, False, added=ones)
    return bool((normed == 1).all()) and bool((x == 2).all())
