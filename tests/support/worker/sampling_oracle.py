"""Oracle of the sampler: results of transformers and of the published formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from everlift.sampling import TokenLogprobs
from tests.support.worker.sampling_support import Allowed
from worker.engine.plan import Admission


def shaped(scores: Tensor, this: Admission, allowed: Allowed | None = None) -> Tensor:
    """Return the next token's ``scores`` [vocab] before temperature; -inf is removed."""
    ids, output = torch.tensor([this.tokens]), this.tokens[this.num_prompt :]
    sampling, out = this.sampling, scores.clone().unsqueeze(0)
    if sampling.logit_bias:
        bias = {(token,): value for token, value in sampling.logit_bias}
        out = SequenceBiasLogitsProcessor(bias)(ids, out)
    if allowed is not None:
        possible = torch.isin(torch.arange(len(scores)), torch.tensor([*allowed(output)]))
        out = out.masked_fill(~possible, -torch.inf)
    if sampling.allowed_token_ids:
        possible = torch.isin(torch.arange(len(scores)), torch.tensor(sampling.allowed_token_ids))
        out = out.masked_fill(~possible, -torch.inf)
    if sampling.banned_sequences:
        # The padding is needed, because transformers ignores a sequence that is longer than the
        # text before.
        before = torch.tensor([[*[-1] * 8, *output]])
        banned = dict.fromkeys(sampling.banned_sequences, -torch.inf)
        out = SequenceBiasLogitsProcessor(banned)(before, out)
    if sampling.min_tokens and this.stop_token_ids:
        least, stops = sampling.min_tokens, sorted(this.stop_token_ids)
        out = MinNewTokensLengthLogitsProcessor(this.num_prompt, least, stops)(ids, out)
    if sampling.repetition_penalty != 1:
        out = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, out)
    for token, count in Counter(output).items():
        out[0, token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return out[0]


def own_logprobs(scores: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Return the log probabilities of ``token`` under ``scores`` [vocab]."""
    logprobs = scores.log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, len(scores)))
    rank = 1 + int((scores > scores[token]).sum())
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token]), rank, top)


def is_close(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> bool:
    """Return whether tokens and ranks are equal, and log probabilities within 1e-4.

    This is the tolerance of design.md 7.
    """
    if [(g.rank, [t for t, _ in g.top]) for g in got] != [
        (e.rank, [t for t, _ in e.top]) for e in expected
    ]:
        return False
    numbers = [
        torch.tensor([v for each in side for v in (each.logprob, *(lp for _, lp in each.top))])
        for side in (got, expected)
    ]
    return torch.allclose(*numbers, rtol=0, atol=1e-4)
