"""Trial of the Triton kernels, because Triton or its C compiler may be missing."""

from __future__ import annotations

from functools import cache

import torch

from everlift import logs

log = logs.get_logger(__name__)


def kernels_work(device: torch.device) -> bool:
    return not why_no_kernels(device)


@cache
def why_no_kernels(device: torch.device) -> str:
    """Return why Triton kernels fail on ``device``, or an empty string if they work.

    One kernel is tried. The cause of a failure is logged once.
    """
    try:
        cause = "" if _norm_works(device) else "the result of a kernel differs from torch's"
    except Exception as error:
        cause = repr(error)
    if cause:
        log.warning("Triton kernels unavailable: using torch, which is much slower", cause=cause)
    return cause


def _norm_works(device: torch.device) -> bool:
    # Imported only for a GPU, because Triton may not be installed elsewhere.
    from worker.model.kernel_pointwise import KernelPointwise

    x, ones = torch.ones(2, 16, device=device), torch.ones(2, 16, device=device)
    normed = KernelPointwise().norm(x, ones[0], 0.0, False, added=ones)
    # A GPU's square root and quotient may differ in the last bit.
    return torch.allclose(normed, ones, rtol=1e-5) and bool((x == 2).all())
