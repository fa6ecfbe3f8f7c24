"""Patch of torch that makes vLLM use its AVX2 build on a CPU with AVX-512.

Python imports this module at its start if the folder is on PYTHONPATH.
"""

import torch

for _name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported"):
    if hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, lambda: False)
