"""Conversion of a sequence's parameters to those of a request of vLLM."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar

from everlift.errors import InvalidGrammar, InvalidRequest, OutOfRange
from everlift.sampling import Grammar
from worker.engine.limits import Limits
from worker.engine.sequence import Sequence
from worker.grammar.lark import lark_of_grammar

#: Key of the output so far in the extra arguments of a request.
KNOWN = "everlift_known"
#: Largest number of allowed token ids in vLLM's model runner for GPUs, which fails beyond it.
MAX_GPU_ALLOWED_TOKENS = 1024
#: Odd constant by which the seeds of a request's choices differ.
_CHOICE_FACTOR = 0xD1B54A32D192ED03
#: vLLM's seeds are signed.
_SEED_MASK = (1 << 63) - 1


def sampling_params(sequence: Sequence, limits: Limits, *, on_gpu: bool) -> SamplingParams:
    """Return the parameters with which vLLM runs a sequence.

    ``on_gpu`` selects vLLM's model runner: the one for GPUs, or the one for CPUs. Raises
    InvalidRequest if the grammar is invalid or vLLM rejects the parameters. Raises OutOfRange, a
    subclass of InvalidRequest, if the sequence has more allowed tokens than the runner for GPUs can
    hold; the one for CPUs has no such limit.
    """
    sampling = sequence.sampling
    num_allowed = len(sampling.allowed_token_ids)
    if on_gpu and num_allowed > MAX_GPU_ALLOWED_TOKENS:
        raise OutOfRange(
            f"allowed_token_ids has {num_allowed} tokens; vLLM takes at most "
            f"{MAX_GPU_ALLOWED_TOKENS} on GPUs",
            field="allowed_token_ids",
        )
    room = limits.max_model_len - sequence.num_prompt - sequence.num_image_tokens
    max_tokens = min(sequence.max_tokens, room)
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        # vLLM's noise depends only on seed and position, and choices must differ.
        "seed": (sampling.seed + sequence.key.choice * _CHOICE_FACTOR) & _SEED_MASK,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": min(sampling.min_tokens, max_tokens),
        "max_tokens": max_tokens,
        "stop_token_ids": sorted(sequence.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "structured_outputs": _structured(sampling.grammar),
        "extra_args": {KNOWN: sequence.tokens[sequence.num_prompt :]},
    }
    try:
        params = SamplingParams(**fields)
    except (ValueError, VLLMValidationError) as error:
        raise InvalidRequest(f"vLLM rejects the request: {error}") from None
    if params.structured_outputs is not None:
        try:
            # In a thread, because this thread's stack may be too small for the compiler (VllmCore).
            with ThreadPoolExecutor(1) as executor:
                executor.submit(validate_guidance_grammar, params).result()
        except (ValueError, VLLMValidationError) as error:
            raise _invalid(error) from None
    if sampling.banned_sequences:
        params._bad_words_token_ids = [list(each) for each in sampling.banned_sequences]
    return params


def _structured(grammar: Grammar | None) -> StructuredOutputsParams | None:
    if grammar is None:
        return None
    try:
        # The client's own text means something else to vLLM than to Everlift's engine.
        params = StructuredOutputsParams(grammar=lark_of_grammar(grammar.kind, grammar.texts))
    except ValueError as error:
        raise _invalid(error) from None
    # llguidance, which Everlift's own engine uses as well.
    params._backend = "guidance"
    return params


def _invalid(error: Exception) -> InvalidGrammar:
    return InvalidGrammar(f"the grammar is invalid: {error}", field="grammar")
