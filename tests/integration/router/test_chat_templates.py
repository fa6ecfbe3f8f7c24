"""Chat templates rendered in processes of their own, including hostile templates."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from everlift.errors import (
    EverliftError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    TemplateFailed,
    TemplateTimeout,
    UnknownModel,
)
from router.chat import frames, templates
from router.chat import process as renderers
from router.chat.conversation import Turn
from router.chat.messages import chat_turns
from router.chat.parsers.hermes import HERMES
from router.chat.parsers.llama3 import LLAMA3
from router.chat.templates import ChatTemplate
from router.config import RouterConfig
from tests.support.in_process import until
from tests.support.router import chat_support
from tests.support.router.chat_support import USE, chat_template

HELLO = [{"role": "user", "content": "hello"}]
#: Template whose behaviour the first message selects.
HOSTILE = """\
{%- set act = messages[0].content %}
{%- if act == 'loop' %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif act == 'number' %}{{ 7 ** (7 ** messages|length * 10 ** 8) }}
{%- elif act == 'double' %}{% set ns = namespace(x='aaaaaaaa') %}
{%- for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}
{%- elif act == 'long' %}{{ 'a' * 20000000 }}
{%- elif act == 'huge' %}{{ 'a' * 10 ** 11 }}
{%- elif act == 'recurse' %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{%- elif act == 'walk' %}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif act == 'globals' %}{{ raise_exception.__globals__['__builtins__'] }}
{%- elif act == 'format' %}{{ '{0.__class__}'.format(1) }}
{%- elif act == 'change' %}{{ messages.append(1) }}
{%- elif act == 'include' %}{% include '/etc/passwd' %}
{%- elif act == 'divide' %}{{ 1 // 0 }}
{%- elif act == 'surrogate' %}{{ '\\ud800' }}
{%- elif act == 'refuse' %}{{ raise_exception('not with me') }}
{%- else %}{{ act }} is fine{% endif %}"""
REFUSED = {
    "double": "memory",
    "huge": "memory",
    "recurse": "RecursionError",
    "walk": "unsafe",
    "globals": "unsafe",
    "change": "unsafe",
    "include": "no loader",
    "divide": "ZeroDivisionError",
    "surrogate": "UnicodeEncodeError",
    "refuse": "not with me",
}


@asynccontextmanager
async def serving(
    directory: Path, text: str, config: RouterConfig | None = None
) -> AsyncIterator[ChatTemplate]:
    template = chat_template(directory, text, config)
    try:
        yield template
    finally:
        await template.close()


def saying(content: str) -> tuple[Turn, ...]:
    return (Turn("user", (content,)),)


async def test_hermes_template_renders_tools_and_tool_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, chat_support.HERMES) as template:
        text = await template.render(
            chat_turns(
                [
                    {"role": "developer", "content": "be brief"},
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                ]
            ),
            USE.shown,
            more={"enable_thinking": False},
        )

        assert template.formats.tools is HERMES
        assert text.endswith(
            "<|im_start|>system\nbe brief<|im_end|>\n"
            "<|im_start|>user\nhello<|im_end|>\n"
            "<|im_start|>assistant\n<tool_call>\n"
            '{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>rain</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n<think></think>\n"
        )
        assert '{"name": "search", "parameters": {' in text
        assert await template.render(chat_turns(HELLO), None, add_generation_prompt=False) == (
            "<|im_start|>user\nhello<|im_end|>\n"
        )


async def test_llama3_template_renders_and_selects_tool_format(tmp_path: Path) -> None:
    async with serving(tmp_path, chat_support.LLAMA3) as template:
        assert template.formats.tools is LLAMA3
        assert await template.render(chat_turns(HELLO), None) == (
            "<s><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )


async def test_template_receives_documents_and_variables(tmp_path: Path) -> None:
    text = (
        "{% for it in documents or [] %}{{ it.title }}: {{ it.text }}; {% endfor %}"
        "{{ reasoning_effort }} {{ enable_thinking }}"
    )
    async with serving(tmp_path, text) as template:
        documents = [{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]
        variables = {"reasoning_effort": "none", "enable_thinking": False}
        assert (
            await template.render(chat_turns(HELLO), None, more=variables, documents=documents)
            == "a: b; c: d; none False"
        )
        assert await template.render(chat_turns(HELLO), None) == " "


async def test_template_of_a_request_renders_only_its_chat(tmp_path: Path) -> None:
    async with serving(tmp_path, HOSTILE, RouterConfig(template_timeout=30.0)) as template:
        for own, cause in (
            ("{{ 'a' * 10 ** 11 }}", "memory"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ):
            with pytest.raises(TemplateFailed, match=cause):
                await template.render(chat_turns(HELLO), None, chat_template=own)
            assert await template.render(chat_turns(HELLO), None, chat_template="own") == "own"
            assert await template.render(chat_turns(HELLO), None) == "hello is fine"


async def test_mistral_template_rejects_invalid_conversations(tmp_path: Path) -> None:
    async with serving(tmp_path, chat_support.MISTRAL) as template:
        assert template.formats.tools is None
        answer = {"role": "assistant", "content": "hi"}
        assert await template.render(chat_turns([*HELLO, answer, *HELLO]), None) == (
            "<s>[INST] hello [/INST] hi</s>[INST] hello [/INST]"
        )
        with pytest.raises(TemplateFailed, match="user and assistant must take turns"):
            await template.render(chat_turns([*HELLO, *HELLO]), None)
        with pytest.raises(InvalidRequest, match="system is no role here"):
            await template.render((Turn("system", ("",)),), None)
        with pytest.raises(InvalidRequest, match="may not set chat_template"):
            await template.render(chat_turns(HELLO), None, more={"chat_template": "mine"})


async def test_hostile_template_fails_only_its_own_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Elapsed time must not end a chat here, even on a slow machine.
    monkeypatch.setattr(renderers, "_ELAPSED_FACTOR", 10)
    async with serving(tmp_path, HOSTILE, RouterConfig(template_timeout=30.0)) as template:
        for act, cause in REFUSED.items():
            with pytest.raises(TemplateFailed) as caught:
                await template.render(saying(act), None)
            assert cause in str(caught.value), act
            assert len(str(caught.value)) <= 500
            assert await template.render(saying(act.upper()), None) == f"{act.upper()} is fine"
        assert await template.render(saying("format"), None) == ""
        with pytest.raises(PromptTooLong, match="20000000 characters"):
            await template.render(saying("long"), None)


async def test_endless_template_times_out_only_its_own_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CPU time, not elapsed time, must end a chat here, even on a busy machine.
    monkeypatch.setattr(renderers, "_ELAPSED_FACTOR", 60)
    async with serving(tmp_path, HOSTILE, RouterConfig(template_timeout=3.0)) as template:
        assert await template.render(chat_turns(HELLO), None) == "hello is fine"
        before = supervisor(template).pid
        for act in ("loop", "number"):
            with pytest.raises(TemplateTimeout, match="more than 3 s"):
                await template.render(saying(act), None)
            assert await template.render(saying(act.upper()), None) == f"{act.upper()} is fine"
        # The kernel enforced the limit; the supervisor, which has loaded transformers, still runs.
        assert supervisor(template).pid == before


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("{% if %}", TemplateFailed, "syntax error in line 1"),
        ("{{ 'a' * 10 ** 11 }}", TemplateFailed, "memory"),
        ("{{ 3 ** (3 ** 20) }}", TemplateTimeout, r"0\.5 s"),
        ("{{ (" * 5000, TemplateFailed, "failed|syntax error"),
    ],
)
async def test_uncompilable_template_rejects_every_chat(
    tmp_path: Path, text: str, error: type[Exception], words: str
) -> None:
    limit_s = 0.5 if error is TemplateTimeout else 30.0
    async with serving(tmp_path, text, RouterConfig(template_timeout=limit_s)) as template:
        for _ in range(2):
            with pytest.raises(error, match=words):
                await template.render(chat_turns(HELLO), None)


@pytest.mark.long
async def test_event_loop_runs_during_template_timeout(tmp_path: Path) -> None:
    config = RouterConfig(template_timeout=3.0)
    async with serving(tmp_path, HOSTILE, config) as template:
        await template.render(chat_turns(HELLO), None)
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        ticking = asyncio.create_task(tick())
        began = time.thread_time()
        with pytest.raises(TemplateTimeout):
            await template.render(saying("loop"), None)
        ticking.cancel()

        # The event loop's thread spent its CPU time on its own iterations.
        assert turns > 100 * (time.thread_time() - began)


async def test_prestarted_renderer_serves_first_chat(tmp_path: Path) -> None:
    async with serving(tmp_path, HOSTILE) as template:
        template.start()
        await until(lambda: template._processes[0]._process)
        process = supervisor(template)
        assert await template.render(chat_turns(HELLO), None) == "hello is fine"
        assert supervisor(template) is process


async def test_killed_renderer_is_restarted(tmp_path: Path) -> None:
    async with serving(tmp_path, HOSTILE) as template:
        await template.render(chat_turns(HELLO), None)
        process = supervisor(template)

        [child] = children(process.pid)
        os.kill(child, signal.SIGKILL)
        for content in ("first", "second", "third"):
            assert await template.render(saying(content), None) == f"{content} is fine"

        process = supervisor(template)
        process.kill()
        process.wait()
        assert await template.render(chat_turns(HELLO), None) == "hello is fine"


async def test_answer_to_another_chat_is_never_returned(tmp_path: Path) -> None:
    async with serving(tmp_path, "{{ messages[0].content }}") as template:
        assert await template.render(saying("first"), None) == "first"
        [process] = template._processes
        assert process._socket is not None
        other: dict[str, object] = {
            "messages": [{"role": "user", "content": "other"}],
            "tools": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "variables": {},
            "documents": None,
            "chat_template": None,
        }
        process._socket.send(bytes(frames.NUMBER_BYTES) + frames.encode(other))
        with pytest.raises(TemplateFailed, match="crashed the process"):
            await template.render(saying("second"), None)
        assert await template.render(saying("third"), None) == "third"


@pytest.mark.long
async def test_frozen_renderer_is_terminated_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, HOSTILE, RouterConfig(template_timeout=30.0)) as template:
        await template.render(chat_turns(HELLO), None)
        process = supervisor(template)
        for child in children(process.pid):
            os.kill(child, signal.SIGSTOP)

        with monkeypatch.context() as patch, pytest.raises(TemplateTimeout):
            patch.setattr(renderers, "_ELAPSED_FACTOR", 0.01)
            await template.render(chat_turns(HELLO), None)
        assert process.returncode is not None
        assert await template.render(chat_turns(HELLO), None) == "hello is fine"


async def test_renderer_start_failure_is_server_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, HOSTILE) as template:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/false")
            template.start()
            with pytest.raises(EverliftError, match="chat renderer did not start") as caught:
                await template.render(chat_turns(HELLO), None)
            assert not isinstance(caught.value, InvalidRequest)
        assert await template.render(chat_turns(HELLO), None) == "hello is fine"


async def test_renderer_queue_serializes_chats_and_rejects_excess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "_MAX_WAITING", 3)
    async with serving(tmp_path, HOSTILE) as template:
        chats = [asyncio.create_task(template.render(saying(str(i)), None)) for i in range(5)]
        given_up = chats[1]
        await asyncio.sleep(0)
        given_up.cancel()
        results = await asyncio.gather(*chats, return_exceptions=True)

        assert [type(result) for result in results[3:]] == [QueueFull, QueueFull]
        assert isinstance(results[1], asyncio.CancelledError)
        assert results[0] == "0 is fine" and results[2] == "2 is fine"
        assert template._waiting_bytes == 0


async def test_cancelled_render_frees_renderer(tmp_path: Path) -> None:
    config = RouterConfig(template_timeout=3.0)
    async with serving(tmp_path, HOSTILE, config) as template:
        await template.render(chat_turns(HELLO), None)
        gone = asyncio.create_task(template.render(saying("loop"), None))
        while not template._waiting.empty() or not gone.get_stack():
            await asyncio.sleep(0)
        gone.cancel()

        assert await template.render(chat_turns(HELLO), None) == "hello is fine"


async def test_renderer_processes_run_in_parallel(tmp_path: Path) -> None:
    config = RouterConfig(template_timeout=60, template_processes=2)
    async with serving(tmp_path, HOSTILE, config) as template:
        looping = asyncio.create_task(template.render(saying("loop"), None))
        # The other process renders meanwhile.
        assert await template.render(chat_turns(HELLO), None) == "hello is fine"
        assert not looping.done()
        await template.close()
        with pytest.raises(asyncio.CancelledError):
            await looping


async def test_renderer_process_is_sandboxed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERLIFT_SECRET", "hush")
    async with serving(tmp_path, HOSTILE) as template:
        await template.render(chat_turns(HELLO), None)
        process = supervisor(template)
        [child] = children(process.pid)
        for pid in (process.pid, child):
            assert b"hush" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        limits = Path(f"/proc/{child}/limits").read_text().splitlines()
        soft = {line[:26].strip(): line[26:].split()[0] for line in limits}
        assert soft["Max file size"] == soft["Max processes"] == soft["Max core file size"] == "0"
        assert int(soft["Max address space"]) < 1 << 30


@pytest.mark.long
def test_renderer_exits_with_killed_router(tmp_path: Path) -> None:
    """The process that started the renderer is killed while a template renders."""
    program = """
import asyncio, os, signal, sys
from pathlib import Path
from router.config import RouterConfig
from tests.support.router.chat_support import chat_template
from tests.integration.router.test_chat_templates import HOSTILE, saying

async def main():
    template = chat_template(Path(sys.argv[1]), HOSTILE, RouterConfig(template_timeout=3.0))
    await template.render(saying("hello"), None)
    asyncio.create_task(template.render(saying("loop"), None))
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)

    assert ended.returncode == -signal.SIGKILL
    # Every test checks that no process is left.


def test_chat_template_source_precedence(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None

    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "<s>", "chat_template": "from the config"}))
    assert sources(tmp_path) == ("from the config", "from the config")

    by_name = {"default": "plain", "tool_use": "with tools"}
    listed = [{"name": name, "template": text} for name, text in by_name.items()]
    config.write_text(json.dumps({"chat_template": listed}))
    assert sources(tmp_path) == ("plain", "with tools")

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of json"}))
    assert sources(tmp_path) == ("of json", "of json")

    (tmp_path / "chat_template.jinja").write_text("of jinja")
    assert sources(tmp_path) == ("of jinja", "of jinja")


@pytest.mark.parametrize(
    "config", ["{", '{"chat_template": [{"name": "rag", "template": ""}]}', '{"chat_template": 3}']
)
def test_chat_template_load_rejects_malformed_files(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)

    with pytest.raises(UnknownModel):
        ChatTemplate.load(tmp_path)


def sources(directory: Path) -> tuple[str, str]:
    template = ChatTemplate.load(directory)
    assert template is not None
    return template._templates.default, template._templates.tool_use


def supervisor(template: ChatTemplate) -> subprocess.Popen[bytes]:
    [process] = template._processes
    assert process._process is not None
    return process._process


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
