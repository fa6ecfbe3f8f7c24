"""The coding agent Codex against a cluster with a scripted model, which loses a worker."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.cluster.test_openai_clients import run
from tests.support.in_process import Cluster, until
from tests.support.router import chat_support
from tests.support.router.http_client import get
from tests.support.router.other_clients import ROOT
from tests.support.scripted import SAY, THEN, scripted_cluster

ENVIRONMENT = ROOT / "build" / "agent"
CONFIG = """
model = "caller"
model_provider = "everlift"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
model_instructions_file = "{home}/instructions.md"

[analytics]
enabled = false

[model_providers.everlift]
name = "Everlift"
base_url = "http://{address}/v1"
wire_api = "responses"
"""

FILE = "double.sh"
CONTENT = "double() { echo $(($1 * 2)); }\n"
WRITE = f"cat > {FILE} <<'END'\n{CONTENT}END\n"
TEST = f'. ./{FILE} && test "$(double 21)" = 42'
COMMIT = f'{TEST} && git add {FILE} && git commit -q -m "Add double"'


def call(command: str) -> str:
    """Return the model's text of a call of Codex's tool for shell commands."""
    written = json.dumps({"name": "exec_command", "arguments": {"cmd": command}})
    return f"<tool_call>\n{written}\n</tool_call>"


TASK = SAY + THEN.join(
    [
        f"I write the function.\n{call(WRITE)}",
        f"I test the function and commit it.\n{call(COMMIT)}",
        "The function is committed.",
    ]
)


def codex() -> str:
    programs = [*ENVIRONMENT.glob("lib/python*/site-packages/codex_cli_bin/bin/codex")]
    assert programs, f"Codex is missing in {ENVIRONMENT}: make build/agent/.installed"
    return str(programs[0])


def git(repository: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=repository, text=True)


def lengthen_context(model: Path) -> None:
    """Extend the model's context to fit Codex's prompts, whose tools alone are 8,000 tokens."""
    path = model / "config.json"
    changed = json.loads(path.read_text()) | {"max_position_embeddings": 32768}
    path.write_text(json.dumps(changed))


async def kill_second_answer(parts: Cluster) -> None:
    """Kill the worker of the second request while it generates.

    That request has the result of the first tool call.
    """
    registry = parts.routers[0]._requests._registry
    await until(lambda: len(registry), seconds=60)
    [first] = registry
    await until(
        lambda: any(live is not first and live.num_tokens for live in registry), seconds=120
    )
    [busy] = [rank for rank in parts.workers if rank._sessions and rank._sessions._attempts]
    await parts.kill_worker(busy)


@pytest.mark.long
async def test_codex_completes_a_task_while_a_worker_dies(tmp_path: Path) -> None:
    repository, home = tmp_path / "repository", tmp_path / "home"
    repository.mkdir()
    home.mkdir()
    git(repository, "init", "-q")
    git(repository, "config", "user.name", "agent")
    git(repository, "config", "user.email", "agent@example.org")
    async with scripted_cluster(
        tmp_path / "caller",
        chat_support.HERMES,
        lengthen_context,
        workers=2,
        num_blocks=1024,
        step_time=0.01,
    ) as parts:
        address = parts.routers[0].http_address
        # Codex's own instructions are 9,000 of the model's tokens.
        (home / "instructions.md").write_text("Do the task.")
        (home / "config.toml").write_text(CONFIG.format(address=address, home=home))
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(
                run(address, codex(), "exec", TASK, cwd=repository, CODEX_HOME=str(home))
            )
            tasks.create_task(kill_second_answer(parts))
        metrics = (await get(address, "/metrics")).body.decode()
    assert working.result().rstrip().endswith("The function is committed.")
    assert (repository / FILE).read_text() == CONTENT
    assert git(repository, "log", "--format=%s") == "Add double\n"
    assert git(repository, "status", "--porcelain") == ""
    [migrations] = re.findall(r"^everlift_migrations_total (\S+)$", metrics, re.MULTILINE)
    assert float(migrations) >= 1
