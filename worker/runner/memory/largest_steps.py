"""The steps that take most memory. Pure.

Decoding reads long contexts without memory of its own, so short ones do here. In torch's attention
a long context takes some; that, and log probabilities of prompts, are not counted.
"""

from __future__ import annotations

from everlift.sampling import MAX_LOGPROBS, SamplingParams
from worker.engine.limits import blocks_for
from worker.engine.plan import Admission, Plan, Row, Rows

#: What makes the sampler compute most.
_EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=MAX_LOGPROBS,
)


def largest_steps(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int
) -> tuple[Plan, Plan]:
    """One over the prompts of all sequences, of so many tokens together, and one in which each of
    them decodes, with drafts as far as these have room. All write to the same blocks, from 0 on."""
    num_drafts = min(num_drafts, max_num_batched_tokens // max_num_seqs - 1, max_model_len - 2)
    longest = max_model_len - 1 - num_drafts
    share, more = divmod(max_num_batched_tokens, max_num_seqs)
    lengths = [min(longest, share + (slot < more)) for slot in range(max_num_seqs)]
    table = tuple(range(blocks_for(max(lengths) + 1 + num_drafts)))
    prompts = [Row(slot, (0,) * n, 0, table, samples=True) for slot, n in enumerate(lengths)]
    drafted = (0,) * (1 + num_drafts)
    decodes = [
        Row(slot, drafted, n, table, samples=True, num_drafts=num_drafts)
        for slot, n in enumerate(lengths)
    ]
    return Plan(1, Rows.of(prompts), tuple(map(_admission, prompts))), Plan(2, Rows.of(decodes))


def num_blocks(plans: tuple[Plan, ...]) -> int:
    """Of a KV cache that is large enough for ``plans``."""
    return max(int(plan.rows.tables.shape[1]) for plan in plans)


def _admission(row: Row) -> Admission:
    return Admission(row.slot, row.tokens, len(row.tokens), _EVERYTHING, frozenset(), choice=0)
