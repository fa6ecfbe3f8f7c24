"""What a worker's progress adds to a choice, each token and log probability once."""

from __future__ import annotations

from collections.abc import Sequence

from everlift.sampling import TokenLogprobs
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.requests.request import Choice, LiveRequest


def take(live: LiveRequest, choice: Choice, progress: session_pb2.Progress) -> bool:
    """Adds what is not known yet; False, with nothing added, if something before it is missing, or
    log probabilities that were asked for."""
    known = len(choice.output) - progress.offset
    if known < 0:
        return False
    if live.has_logprobs:
        return _take_scored(live, choice, progress, known)
    choice.output.extend(progress.token_ids[known:])
    return True


def note(live: LiveRequest, choice: Choice, progress: session_pb2.Progress) -> bool:
    """Note what the worker has computed of the choice and what it found in its cache. Return
    whether anything became of the choice's KV blocks."""
    choice.num_computed = max(choice.num_computed, progress.num_computed)
    # Other choices find the first one's prompt.
    if choice.index == 0 and progress.HasField("waited_s"):
        live.note_cached(progress.cached_tokens)
    live.has_stepped |= progress.HasField("waited_s") or bool(progress.token_ids)
    if not (progress.residence or progress.preemptions or progress.recomputed_tokens):
        return False
    live.preemptions += progress.preemptions
    live.recomputed_tokens += progress.recomputed_tokens
    if progress.residence:
        choice.is_preempted = progress.residence == session_pb2.RESIDENCE_PREEMPTED
    return True


def _take_scored(
    live: LiveRequest, choice: Choice, progress: session_pb2.Progress, known: int
) -> bool:
    scored = _fresh_prompt_logprobs(live, progress)
    if scored is None or not _has_logprobs(live, progress):
        return False
    if progress.token_ids and choice.index == 0 and _lacks(live, len(scored)):
        return False
    live.prompt_logprobs.extend(_parsed(scored))
    choice.output.extend(progress.token_ids[known:], _parsed(progress.logprobs[known:]))
    return True


def _fresh_prompt_logprobs(
    live: LiveRequest, progress: session_pb2.Progress
) -> Sequence[pb.TokenLogprobs] | None:
    """None if some before them are missing. The first one is of the prompt's second token."""
    if not progress.prompt_logprobs:
        return ()
    known = 1 + len(live.prompt_logprobs) - progress.prompt_offset
    fresh = progress.prompt_logprobs[max(known, 0) :]
    is_whole = _has_tops(fresh, live.request.sampling.prompt_logprobs)
    return fresh if known >= 0 and is_whole else None


def _has_logprobs(live: LiveRequest, progress: session_pb2.Progress) -> bool:
    wanted = live.request.sampling.logprobs
    num_logprobs = 0 if wanted is None else len(progress.token_ids)
    return len(progress.logprobs) == num_logprobs and _has_tops(progress.logprobs, wanted)


def _has_tops(logprobs: Sequence[pb.TokenLogprobs], wanted: int | None) -> bool:
    """The ledger keeps records of one size."""
    return all(len(it.top_ids) == len(it.top_logprobs) == wanted for it in logprobs)


def _lacks(live: LiveRequest, num_fresh: int) -> bool:
    """No token is drawn before the whole prompt is scored, if that was asked for."""
    num_known = 1 + len(live.prompt_logprobs) + num_fresh
    return live.lacks_prompt_logprobs and num_known < len(live.request.prompt_ids)


def _parsed(logprobs: Sequence[pb.TokenLogprobs]) -> list[TokenLogprobs]:
    return [TokenLogprobs.from_proto(it) for it in logprobs]
