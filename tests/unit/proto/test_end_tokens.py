"""End tokens of checkpoints that name them in different files."""

import json
from pathlib import Path
from typing import Any

import pytest

from everlift.end_tokens import end_token_ids
from everlift.errors import UnknownModel

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADDED = {"<|endoftext|>": 1, "<|im_start|>": 2, "<|im_end|>": 3}


def checkpoint(directory: Path, added: dict[str, int] = ADDED, **files: Any) -> Path:
    """Write JSON files by their names without suffix, and a Jinja file for ``template``."""
    if (template := files.pop("template", None)) is not None:
        (directory / "chat_template.jinja").write_text(template)
    tokens = [{"id": i, "content": text, "special": True} for text, i in added.items()]
    files.setdefault("tokenizer", {"added_tokens": tokens, "model": {"vocab": {"</s>": 9}}})
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 7}}, (7,)),
        ({"config": {"eos_token_id": [7, 8, 7]}}, (7, 8)),
        ({"config": {"text_config": {"eos_token_id": 7}}}, (7,)),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": 7}}}, (7,)),
        ({"config": {"eos_token_id": 8, "text_config": {"eos_token_id": 7}}}, (8,)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [5, 6]}}, (5, 6)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": 0}}, (0,)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": None}}, (7,)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": []}}, (7,)),
        ({"config": {"eos_token_id": 7}, "generation_config": {}}, (7,)),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (3,)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, (3,)),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (9,)),
        ({"tokenizer_config": {"eos_token": "no such token"}}, ()),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, (3,)),
        (
            {"special_tokens_map": {"eos_token": "</s>"}, "tokenizer_config": {"eos_token": None}},
            (9,),
        ),
        (
            {"config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "<|im_end|>"}},
            (1, 3),
        ),
        (
            {
                "config": {"eos_token_id": None},
                "generation_config": {"eos_token_id": None},
                "tokenizer_config": {"eos_token": "<|im_end|>"},
            },
            (3,),
        ),
        ({"template": CHATML}, (3,)),
        ({"config": {"eos_token_id": 1}, "template": CHATML}, (1, 3)),
        ({"tokenizer_config": {"chat_template": CHATML}}, (3,)),
        ({"config": {"eos_token_id": 3}, "template": CHATML}, (3,)),
        ({"template": "{{ messages[0].content }}"}, ()),
        (
            {
                "tokenizer": {"model": {"vocab": [["a", 0.0], ["</s>", -1.0]]}},
                "tokenizer_config": {"eos_token": "</s>"},
            },
            (1,),
        ),
        ({}, ()),
    ],
)
def test_end_token_ids_sources(
    files: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert end_token_ids(checkpoint(tmp_path, **files)) == expected


@pytest.mark.parametrize(
    ("opens", "closes"),
    [
        ("<|im_start|>", "<|im_end|>"),
        ("<|start_header_id|>", "<|eot_id|>"),
        ("<|header_start|>", "<|eot|>"),
        ("<start_of_turn>", "<end_of_turn>"),
        ("<|assistant|>", "<|end|>"),
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|start_of_role|>", "<|end_of_text|>"),
        ("<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        ("[|assistant|]", "[|endofturn|]"),
        ("[INST]", "</s>"),
        ("<|end_of_role|>", "<|endoftext|>"),
        ("</think>", "<|im_end|>"),
    ],
)
def test_end_token_ids_of_templates(opens: str, closes: str, tmp_path: Path) -> None:
    template = f"{opens}{{{{ messages[0].content }}}}{closes}"
    files = checkpoint(tmp_path, {opens: 4, closes: 5, "<|eom_id|>": 6}, template=template)
    assert end_token_ids(files) == (5,)


def test_end_token_ids_gpt_oss_message_end(tmp_path: Path) -> None:
    added = {"<|start|>": 1, "<|end|>": 2, "<|return|>": 3}
    template = "<|start|>{{ messages[0].content }}<|end|>{{ messages[1].content }}<|return|>"
    assert end_token_ids(checkpoint(tmp_path, added, template=template)) == (3,)


@pytest.mark.parametrize("eos", ["</s>", -1, [1, None], True, 1.0, [[1]], 2**32])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_end_token_ids_refuses_malformed_ids(eos: Any, file: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=rf"{file}\.json: eos_token_id must be a token id"):
        end_token_ids(checkpoint(tmp_path, **{file: {"eos_token_id": eos}}))


@pytest.mark.parametrize("file", ["config", "generation_config", "tokenizer_config", "tokenizer"])
def test_end_token_ids_refuses_malformed_files(file: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=rf"{file}\.json is not a JSON object"):
        end_token_ids(checkpoint(tmp_path, **{file: ["eos_token_id"]}))
