"""The tokenizer's configuration over HTTP, in vLLM's form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cluster.config import DEMO_MODEL
from router.requests.tokenizer import ServedModel
from tests.support.in_process import ROUTER, cluster
from tests.support.router import chat_support
from tests.support.router.http_client import get
from tests.support.scripted import scripted_cluster


async def test_tokenizer_info_has_the_configuration() -> None:
    config = replace(ROUTER, model=str(DEMO_MODEL))
    async with cluster(workers=0, router_config=config) as parts:
        answer = await get(parts.routers[0].http_address, "/tokenizer_info")
    written = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    template = (DEMO_MODEL / "chat_template.jinja").read_text()
    assert answer.status == 200
    assert answer.json == {**written, "chat_template": template}
    assert answer.json["eos_token"] == "<|endoftext|>"
    assert ServedModel.load(str(DEMO_MODEL)).tokenizer.encode(answer.json["eos_token"])


async def test_tokenizer_info_merges_files_without_paths(tmp_path: Path) -> None:
    def change(directory: Path) -> None:
        file = directory / "tokenizer_config.json"
        written = json.loads(file.read_text())
        written |= {"vocab_file": "/secret/vocab.json", "bos_token": {"content": "<s>"}}
        del written["tokenizer_class"]
        file.write_text(json.dumps(written))
        (directory / "special_tokens_map.json").write_text('{"unk_token": "<unk>"}')

    async with scripted_cluster(tmp_path / "model", chat_support.HERMES, change) as parts:
        info = (await get(parts.routers[0].http_address, "/tokenizer_info")).json
    assert (info["bos_token"], info["unk_token"]) == ("<s>", "<unk>")
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["chat_template"] == chat_support.HERMES
    assert "vocab_file" not in info


async def test_tokenizer_info_of_the_fake_model() -> None:
    async with cluster(workers=0) as parts:
        answer = await get(parts.routers[0].http_address, "/tokenizer_info")
    assert answer.json == {"tokenizer_class": "ByteTokenizer", "chat_template": None}
