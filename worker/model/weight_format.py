"""Format of the weights of a quantised checkpoint. Does not import torch.

A weight w of a quantised linear layer is stored as a code q of few bits, with a scale for each
group of inputs and, in some formats, a zero point: w = (q - zero point) * scale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

#: Types of codes: two's complement integers, and floats with a sign, and 4 exponent and 3 mantissa
#: bits, or 2 exponent bits and 1 mantissa bit.
CodeType = Literal["int8", "int4", "e4m3", "e2m1"]
CODE_TYPES: tuple[CodeType, ...] = get_args(CodeType)
#: Arrangements of codes: one element each, [outputs, inputs]; in 32-bit words along the inputs,
#: [outputs, words]; as AWQ, [inputs, words]; as GPTQ, [words, outputs]; in bytes along the inputs,
#: together with those of all other experts of a mixture, [experts, outputs, groups, bytes].
Arrangement = Literal["elements", "words", "awq", "gptq", "stacked"]

#: Ends of the names of a layer's scales.
SCALE_NAMES = (".weight_scale", ".weight_scale_inv", ".scales")
#: End of the name of the scales of stacked experts, which are stored as exponents.
EXPONENTS_NAME = "_scales"
#: Tensors of a quantised layer that the products do not need.
_UNREAD = tuple(
    f".{name}"
    for name in (
        *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "weight_shape"),
        *("k_scale", "v_scale", "q_scale", "g_idx", "weight_g_idx"),
    )
)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format of the weights of a checkpoint's quantised linear layers.

    ``group`` is the number of inputs that share a scale, or None if all do. ``scaled_outputs`` is
    the number of outputs that share a scale, or None if all outputs of a layer do.
    """

    method: str
    codes: CodeType
    arrangement: Arrangement
    group: int | None
    scaled_outputs: int | None
    #: whether there are zero points
    has_zeros: bool = False
    #: number that is added to a stored zero point
    zero_offset: int = 0
    #: names of modules that are not quantised, or regular expressions after ``re:``
    excluded: tuple[str, ...] = ()
    #: name of the tensor of a layer's scales
    scales: str = "weight_scale"
    #: type of the scales in the files, as safetensors names it
    scale_type: str = "F32"
    #: whether inputs are quantised to e4m3 too, with scales of their own, where a device can
    fp8_activations: bool = False

    @property
    def title(self) -> str:
        """Return the name of the format for messages, such as ``awq int4``."""
        return f"{self.method} {self.codes}"

    @property
    def bits(self) -> int:
        return 4 if self.codes in ("int4", "e2m1") else 8

    def quantises(self, layer: str) -> bool:
        """Return whether the weight of the linear layer ``layer`` is quantised."""
        return not any(_names(pattern, layer) for pattern in self.excluded)

    def ignores(self, tensor: str) -> bool:
        """Return whether the matrix products do not need the checkpoint tensor named ``tensor``.

        The tensor must be one that fills no parameter. GPTQ stores a bias of zeros, which
        is not needed, for each layer that has no bias in the model.
        """
        unread = _UNREAD
        if not self.has_zeros:
            unread += (".qzeros", ".weight_zero_point")
        if self.method == "gptq":
            unread += (".bias",)
        return tensor.endswith(unread)


def _names(pattern: str, layer: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), layer) is not None
    return f".{pattern}." in f".{layer}."
