"""``everlift chat`` with piped input, and on a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from router.config import ModelConfig
from router.ledger.entry import State
from tests.support import in_process
from tests.support.in_process import ROUTER, Cluster
from tests.support.router.keyring import Keyring
from tests.support.scripted import SAY, scripted_cluster
from tests.support.worker.grammar_support import DEMO_MODEL

TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


async def chat(
    parts: Cluster, *arguments: str, stdin: int = PIPE, stdout: int = PIPE, key: str = ""
) -> Process:
    router = parts.routers[0]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli", "chat", "--address", router.address, *arguments),
        stdin=stdin,
        stdout=stdout,
        stderr=PIPE if stdout == PIPE else stdout,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "EVERLIFT_API_KEY": key,
        },
        start_new_session=True,
    )


async def prompts(parts: Cluster) -> list[str]:
    page = await parts.ledger.list_requests("")
    model = parts.routers[0]._models.first
    texts = []
    for entry in page.entries:
        stored = await parts.ledger.read(entry.request_id)
        texts.append(model.decode(stored.request.prompt_ids))
    return texts[::-1]


async def test_cli_chat_sends_piped_lines_as_one_conversation(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "m", TEMPLATE) as parts:
        process = await chat(parts, "--system", "be brief", "--temperature", "0")
        lines = f"{SAY}four\n\n{SAY}five\n/clear\n{SAY}six\n"
        out, err = await process.communicate(lines.encode())
        assert (process.returncode, out.decode()) == (0, "four\nfive\nsix\n")
        assert err.decode().strip() == "new conversation"
        first, second, third = await prompts(parts)
    for prompt in (first, second, third):
        assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert second.startswith(first) and "four" in second
    assert "five" not in third


async def test_cli_chat_separates_reasoning(tmp_path: Path) -> None:
    reasoning = replace(ROUTER, reasoning_format="think")
    async with scripted_cluster(tmp_path / "m", TEMPLATE, router_config=reasoning) as parts:
        process = await chat(parts, "--temperature", "0")
        lines = f"{SAY}<think>two and two</think>four\n{SAY}five\n"
        out, err = await process.communicate(lines.encode())
        assert (process.returncode, out.decode()) == (0, "four\nfive\n")
        assert "two and two\n" in err.decode()
        _, second = await prompts(parts)
    assert "four<|im_end|>" in second and second.count("two and two") == 1


async def test_cli_chat_reports_missing_chat_template() -> None:
    async with in_process.cluster(workers=1) as parts:
        process = await chat(parts)
        out, err = await process.communicate(b"hello\n")
    assert (process.returncode, out) == (1, b"")
    assert "has no chat template: use `everlift generate`" in err.decode()


async def test_cli_chat_needs_no_scope_but_infer(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "keys.yaml")
    key = await keyring.key("acme")
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    async with scripted_cluster(tmp_path / "m", TEMPLATE, router_config=config) as parts:
        process = await chat(parts, "--temperature", "0", key=key)
        out, _ = await process.communicate(f"{SAY}four\n".encode())
    assert (process.returncode, out.decode()) == (0, "four\n")


async def test_cli_chat_asks_for_the_template_of_its_model() -> None:
    demo = ModelConfig(model=str(DEMO_MODEL))
    async with in_process.cluster(router_config=replace(ROUTER, more_models=(demo,))) as parts:
        process = await chat(parts, "--model", DEMO_MODEL.name)
        assert await process.communicate(b"") == (b"", b"")
    assert process.returncode == 0


async def test_cli_chat_names_its_model(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "m", TEMPLATE) as parts:
        process = await chat(parts, "--model", "sql")
        out, err = await process.communicate(f"{SAY}four\n".encode())
    assert (process.returncode, out) == (1, b"")
    assert "the model 'sql' is not served" in err.decode()


async def test_cli_chat_ctrl_c_cancels_answer_only(tmp_path: Path) -> None:
    # The answer must not end before the signal, although the processes may be paused.
    async with scripted_cluster(tmp_path / "m", TEMPLATE, step_time=0.03) as parts:
        terminal, end = pty.openpty()
        os.set_blocking(terminal, False)
        process = await chat(parts, stdin=end, stdout=end)
        os.close(end)
        shown = b""

        async def until_shown(text: str) -> None:
            nonlocal shown
            while text.encode() not in shown:
                with suppress(BlockingIOError):
                    shown += os.read(terminal, 1024)
                await asyncio.sleep(0.01)

        try:
            async with asyncio.timeout(60.0):
                await until_shown("> ")
                os.write(terminal, f"{SAY}{'on and ' * 100}\n".encode())
                await until_shown("\r\non and ")
                # The terminal does not control the process, so that Ctrl-C would send no signal.
                process.send_signal(signal.SIGINT)
                shown = b""
                await until_shown("> ")
                os.write(terminal, f"{SAY}five\n".encode())
                await until_shown("five\r\n")
                await until_shown("> ")
                os.write(terminal, b"/exit\n")
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(terminal)
        page = await parts.ledger.list_requests("")
    # Newest first.
    assert [entry.state for entry in page.entries] == [State.FINISHED, State.CANCELLED]
