"""On PYTHONPATH it makes vLLM use its AVX2 build on a CPU that has AVX-512."""

import torch

for _name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported"):
    if hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, lambda: False)
