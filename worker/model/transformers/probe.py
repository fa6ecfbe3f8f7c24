"""Trial at start: paged attention must give the results of the model's own attention.

A short random prompt goes through the model's own attention in one piece. It also goes through
paged attention, in two chunks followed by single tokens, each in one flat batch with tokens of
another sequence:

    step 1   | other ... | prompt[0:20] ............ |
    step 2   | other | prompt[20:37] ............... |
    step 3   | other | prompt[37] |                      and so on

The other sequence has positions at the end of the longest context, although its cache holds only
the few tokens of the trial. This must not change any result of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from worker.attention.backend import AttentionBackend
from worker.device.kv_cache import KVCache
from worker.engine.plan import Ints, Row, Rows
from worker.model.layers import Placement
from worker.model.transformers.decoder import TransformersDecoder
from worker.model.transformers.survey import Unservable

#: Bounds of the steps in the prompt and in the other sequence; the prompt's chunks end at _CHUNKS.
_CUTS = (0, 20, 37, 38, 39, 40)
_OTHER_CUTS = (0, 5, 6, 7, 8, 9)
_CHUNKS = (20, 37)
_PROMPT_TABLE = (2, 0)
_OTHER_TABLE = (1,)
_NUM_BLOCKS = 3
#: Largest error of a result vector relative to its norm, as the median over the tokens of a chunk.
#: The median is used because rounding can change the experts that a router chooses for a few
#: tokens. A fault changes most tokens, by tenths of their norm.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.2}
#: Seeds of the prompts. If one prompt fails, the next one is tried, because a different choice of
#: experts early in a prompt can change all later tokens.
_SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class _Step:
    """Step of the probe.

    The last of ``rows`` has the tokens of the prompt. ``positions`` [T] has the position of every
    token of the step, including those of the other sequence.
    """

    rows: Rows
    positions: list[int]


class Probe:
    """Trial of paged attention in ``decoder``, with a small KV cache of its own.

    ``build_attention`` creates the attention backend over a KV cache.
    """

    def __init__(
        self,
        decoder: TransformersDecoder,
        build_attention: Callable[[KVCache], AttentionBackend],
        place: Placement,
    ) -> None:
        cache = KVCache(_NUM_BLOCKS, *decoder.layers.kv_shape, place.dtype, place.device)
        self._decoder = decoder
        self._attention = build_attention(cache)
        self._place = place

    def verify(self, max_model_len: int) -> None:
        """Raise Unservable unless paged attention gives the results of the model's own attention.

        Compares the hidden states and logits of a short prompt, which is computed in a batch with a
        sequence whose last positions are just below ``max_model_len``.
        """
        length = _CUTS[-1]
        if any(self._agrees(seed, max(length, max_model_len)) for seed in _SEEDS):
            return
        if any(self._agrees(seed, length) for seed in _SEEDS):
            raise Unservable(
                f"results differ in a batch with a sequence of {max_model_len} tokens; a "
                "smaller max_model_len may work"
            )
        raise Unservable("results differ from those of the model's own attention")

    @torch.inference_mode()
    def _agrees(self, seed: int, longest: int) -> bool:
        random = torch.Generator().manual_seed(seed)
        prompt = torch.randint(self._decoder.vocab_size, (_CUTS[-1],), generator=random)
        expected = self._decoder.forward_with_own_attention(prompt.to(self._place.device))
        hidden = self._paged(prompt.tolist(), longest)
        logits = self._decoder.logits(expected.hidden)
        return self._same(hidden, expected.hidden) and self._same(logits, expected.logits)

    def _paged(self, prompt: Sequence[int], longest: int) -> Tensor:
        return torch.cat([self._forward(step) for step in _steps(prompt, longest)])

    def _forward(self, step: _Step) -> Tensor:
        attention = self._attention.prepare(step.rows)
        hidden = self._decoder.forward(
            self._tensor(step.rows.tokens), self._tensor(step.positions), attention
        )
        return hidden[step.rows.firsts[-1] :]

    def _same(self, actual: Tensor, expected: Tensor) -> bool:
        errors = (actual - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
        tolerance = _TOLERANCE[self._place.dtype]
        return all(part.median() <= tolerance for part in errors.tensor_split(_CHUNKS))

    def _tensor(self, values: Sequence[int] | Ints) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._place.device)


def _steps(prompt: Sequence[int], longest: int) -> Iterator[_Step]:
    shift = longest - _OTHER_CUTS[-1]
    for (start, end), (first, last) in zip(pairwise(_CUTS), pairwise(_OTHER_CUTS), strict=True):
        other = Row(1, tuple(prompt[first:last]), first, _OTHER_TABLE, samples=False)
        row = Row(0, tuple(prompt[start:end]), start, _PROMPT_TABLE, samples=False)
        positions = [*range(first + shift, last + shift), *range(start, end)]
        yield _Step(Rows.of([other, row]), positions)
