"""Suggestions for misspelt names."""

import pytest

from cluster.batch.local import _OPTIONS
from everlift.typos import did_you_mean
from router.api.openai.fields import ChatFields, CompletionFields, TokenizeFields

#: Fields of other servers and of OpenAI's API that Everlift does not have; none is a misspelling.
FOREIGN = """
allowed_token_ids bad_words bad_words_token_ids guided_json guided_regex guided_choice
guided_grammar guided_decoding_backend guided_whitespace_pattern prompt_logprobs
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens use_beam_search
length_penalty early_stopping continue_final_message documents chat_template mm_processor_kwargs
return_tokens_as_token_ids return_token_ids request_id logits_processors kv_transfer_params
vllm_xargs detokenize output_kind flat_logprobs thinking_token_budget
stop_regex no_stop_trim regex ebnf json_schema min_new_tokens max_new_tokens
min_completion_tokens lora_path session_params separate_reasoning stream_reasoning
custom_logit_processor custom_params return_hidden_states rid bootstrap_host bootstrap_port
sampling_seed input_ids top_a tfs typical_p epsilon_cutoff mirostat_mode dry_multiplier
repeat_penalty num_ctx num_predict keep_alive n_predict n_probs cache_prompt
max_min_tokens unignore_eos exclude_stop_str_in_output on_connect
instructions input include background truncation previous_response_id reasoning text
max_output_tokens max_tool_calls conversation audio functions web_search_options moderation
""".split()


@pytest.mark.parametrize("name", FOREIGN)
def test_did_you_mean_suggests_no_other_field(name: str) -> None:
    for known in (ChatFields.names(), CompletionFields.names(), TokenizeFields.names(), _OPTIONS):
        if name not in known:
            assert did_you_mean(name, known) == ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_token", "max_tokens"),
        ("max_tokenss", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("Max_Tokens", "max_tokens"),
        ("temperatur", "temperature"),
        ("temparature", "temperature"),
        ("tempearture", "temperature"),
        ("topK", "top_k"),
        ("topp", "top_p"),
        ("stops", "stop"),
        ("tool", "tools"),
        ("mesages", "messages"),
        ("logprob", "logprobs"),
    ],
)
def test_did_you_mean_finds_one_typing_error(name: str, expected: str) -> None:
    assert did_you_mean(name, ChatFields.names()) == f"; did you mean {expected!r}?"


@pytest.mark.parametrize("name", ["", "_", "x", "sto", "top_q", "t" * 100_000, "maxx_tokenss"])
def test_did_you_mean_does_not_guess(name: str) -> None:
    assert did_you_mean(name, ChatFields.names()) == ""
