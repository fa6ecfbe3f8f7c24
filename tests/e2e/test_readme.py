"""Commands and examples of READMEs, and the outputs that they show."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from cluster import endpoint
from cluster.config import DEMO_MODEL, Config
from cluster.local.processes import ProcessCluster
from everlift import AsyncClient
from router.config import RouterConfig
from tests.conftest import leaving_nothing
from tests.support.router.other_clients import program as client_program

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Override the check after each test: the cluster starts processes on demand, until its end."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smollm2(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, str]]:
    """Environment of a user in whose state directory a cluster with SmolLM2 runs."""
    with leaving_nothing():
        async with serving("smollm2", tmp_path_factory.mktemp("smollm2")) as environment:
            yield environment


@asynccontextmanager
async def serving(model: str, directory: Path) -> AsyncIterator[dict[str, str]]:
    state_dir = directory / "everlift"
    router = RouterConfig(port=0, http_port=0, drain=0.2)
    config = Config(model=model, state_dir=state_dir, router=router)
    async with ProcessCluster(config) as cluster:
        async with AsyncClient(cluster.address) as client:
            http_address = (await client.status()).http_address
        with endpoint.published(state_dir, cluster.addresses):
            yield {
                "XDG_STATE_HOME": str(directory),
                "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
                "ADDRESS": cluster.address,
                "HTTP_ADDRESS": http_address,
            }


async def output(
    environment: dict[str, str], *arguments: str, program: str = sys.executable
) -> str:
    process = await asyncio.create_subprocess_exec(
        program, *arguments, env=environment, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_readme_generate_command_prints_shown_answer(smollm2: dict[str, str]) -> None:
    shown = re.search(r"^    \$ everlift (generate .*)\n    (.*)$", README, re.MULTILINE)
    assert shown is not None
    command, answer = shown.groups()
    printed = await output(smollm2, "-m", "cluster.cli", *shlex.split(command))
    assert printed.rstrip("\n") == answer


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_readme_curl_command_answers(smollm2: dict[str, str]) -> None:
    command = re.search(r"^    (curl .*\\\n.*)$", README, re.MULTILINE)
    assert command is not None
    line = command[1].replace("127.0.0.1:8000", smollm2["HTTP_ADDRESS"])
    answer = json.loads(await output({"PATH": os.environ["PATH"]}, "-c", line, program="bash"))
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


async def test_readme_python_example_runs(smollm2: dict[str, str]) -> None:
    example = re.search(r"```python\n(from everlift.*?)```", README, re.DOTALL)
    assert example is not None
    body = example[1].replace("127.0.0.1:50051", smollm2["ADDRESS"])
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    script = f"import asyncio\nasync def main():\n{lines}\nasyncio.run(main())"
    assert await output(smollm2, "-c", script) == " Paris."


@pytest.mark.long
async def test_kserve_readme_triton_example_runs(tmp_path: Path) -> None:
    page = (ROOT / "router" / "api" / "kserve" / "README.md").read_text()
    example = re.search(r"```python\n(import numpy.*?)```", page, re.DOTALL)
    assert example is not None
    async with serving(str(DEMO_MODEL), tmp_path) as environment:
        script = example[1].replace("127.0.0.1:50051", environment["ADDRESS"])
        printed = await output({}, "-c", script, program=client_program("python"))
    answer = " 17 18 19 20 21 22 23 24 25 26 27 28 29 30"
    assert printed == f"{answer}\n{answer}"


@pytest.mark.long
async def test_readme_openai_example_runs(smollm2: dict[str, str]) -> None:
    example = re.search(r"```python\n(from openai.*?)```", README, re.DOTALL)
    assert example is not None
    body = example[1].replace("127.0.0.1:8000", smollm2["HTTP_ADDRESS"])
    environment = {name: value for name, value in smollm2.items() if name != "PYTHONPATH"}
    printed = await output(environment, "-c", body, program=client_program("python"))
    assert printed == "The capital of France is Paris."


@pytest.mark.long
async def test_cluster_readme_example_runs() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "cluster" / "README.md").read_text(), re.S)
    assert example is not None
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    body = example[1].replace("cluster/demo_model", str(DEMO_MODEL))
    assert await output(environment, "-c", body) == " 42\n 5 4 3 2 1\n"
