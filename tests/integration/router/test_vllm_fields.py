"""Request fields of vLLM and SGLang over HTTP: prompts, special tokens and token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.in_process import Cluster
from tests.support.router.chat_support import HERMES
from tests.support.router.http_client import ask
from tests.support.scripted import SAY, scripted_cluster

USER = {"role": "user", "content": "count"}
ASSISTANT = {"role": "assistant", "content": "From 17"}
#: Shows documents and the variables of reasoning_effort.
SHOWING = """\
{% for it in documents or [] %}{{ it.title }}: {{ it.text }}; {% endfor %}
{{- reasoning_effort }} {{ enable_thinking }} {{ messages[-1].content }}<|im_end|>"""


async def tokens(parts: Cluster, **body: Any) -> list[int]:
    answer = await ask(parts.routers[0].http_address, "/tokenize", body)
    assert answer.status == 200, answer.json
    found: list[int] = answer.json["tokens"]
    return found


async def complete(parts: Cluster, **body: Any) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = await ask(parts.routers[0].http_address, path, body)
    assert answer.status == 200, answer.json
    return answer.json


async def test_continued_message_is_the_end_of_the_prompt(tmp_path: Path) -> None:
    messages = [USER, ASSISTANT]
    prompt = "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\nFrom 17"
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        whole = await tokens(parts, prompt=prompt)
        assert await tokens(parts, messages=messages, continue_final_message=True) == whole
        answer = await complete(parts, messages=messages, continue_final_message=True, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == len(whole)
        answer = await ask(
            parts.routers[0].http_address,
            "/v1/chat/completions",
            {"messages": messages, "continue_final_message": True, "add_generation_prompt": True},
        )
        assert (answer.status, answer.error) == (400, ("invalid_request", "continue_final_message"))


async def test_template_receives_documents_and_effort(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "m", SHOWING) as parts:
        answer = await complete(
            parts,
            messages=[USER],
            documents=[{"title": "a", "text": f"{SAY}four"}],
            reasoning_effort="none",
            max_tokens=20,
        )
    assert answer["choices"][0]["message"]["content"] == "four; none False count"


async def test_special_tokens_are_in_the_text_on_request(tmp_path: Path) -> None:
    body = {"prompt": f"{SAY}four<|im_end|>", "include_stop_str_in_output": True}
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        texts = [
            (await complete(parts, **body, **fields))["choices"][0]["text"]
            for fields in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False})
        ]
        messages = [{"role": "user", "content": f"{SAY}four"}]
        [choice] = (
            await complete(
                parts,
                messages=messages,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
            )
        )["choices"]
    assert texts == ["four", "four", "four<|endoftext|>"]
    assert choice["message"]["content"] == "four<|endoftext|>"
