"""Small model that reads images: Idefics3 with random weights and the demo model's tokenizer.

vLLM's modules of Llava, Qwen-VL and most other families need torchvision, which is missing in the
environment of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path

DEMO_MODEL = Path(__file__).parents[2] / "cluster" / "demo_model"
PLACEHOLDER = "<image>"
_ADDED = (
    PLACEHOLDER,
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
#: Token of the placeholder, which follows the 512 tokens of the demo model.
PLACEHOLDER_ID = 512
CONTEXT = 512
#: Width and height of the tiles into which an image of up to twice this size is divided.
TILE = 32
_PATCH, _SCALE = 8, 2
#: Tokens of a tile, without the tokens around it.
TILE_TOKENS = (TILE // _PATCH // _SCALE) ** 2
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_idefics(directory: Path) -> Path:
    """Write the checkpoint, with processor and chat template, and return ``directory``."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": _PATCH,
        # Larger than usual, so that different images give different outputs.
        "initializer_range": 0.2,
    }
    text = {
        "model_type": "llama",
        "vocab_size": 576,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=PLACEHOLDER_ID,
        scale_factor=_SCALE,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    directory.mkdir(parents=True, exist_ok=True)
    Idefics3ForConditionalGeneration(config).save_pretrained(directory)
    _write_tokenizer(directory)
    _write_processor(directory)
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    return directory


def _write_tokenizer(directory: Path) -> None:
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    [first] = tokenizer["added_tokens"]
    tokenizer["added_tokens"] += [
        {**first, "id": number, "content": text}
        for number, text in enumerate(_ADDED, PLACEHOLDER_ID)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_processor(directory: Path) -> None:
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": 2 * TILE},
        "max_image_size": {"longest_edge": TILE},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": TILE_TOKENS}
    (directory / "processor_config.json").write_text(json.dumps(processor))
