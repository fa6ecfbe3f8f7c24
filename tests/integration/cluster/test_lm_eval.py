"""lm-eval against a cluster: the scores equal those of its transformers backend."""

from __future__ import annotations

import asyncio
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.config import DEMO_MODEL, load
from cluster.local.processes import ProcessCluster
from everlift import AsyncClient
from tests.support.router.other_clients import ROOT, program

SCRIPT = ROOT / "tests" / "clients" / "lm_eval_samples.py"
#: Maximum number of tokens in a window of a text. For an API, lm-eval subtracts two: the generated
#: token, and the context of a rolling window.
WINDOW = 64

COUNTS = [
    {"text": "count from 17 to 20:", "answer": " 17 18 19 20", "wrong": " 17 19 18"},
    {"text": "count from 3 to 5:", "answer": " 3 4 5", "wrong": " dreiß\N{GRINNING FACE}"},
    {"text": "count from 98 to 101:", "answer": " 98 99 100 101", "wrong": "x"},
]
TEXTS = [
    {"text": "count from 17 to 20: 17 18 19 20\n"},
    {"text": "No line of the model's own: héllo \N{ROCKET}. " * 6},
]
TASKS: dict[str, dict[str, Any]] = {
    "likelihood": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["{{wrong}}", "{{answer}}"],
        "doc_to_target": 1,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "generated": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path) -> None:
    """Write the tasks and their documents; JSON is valid YAML."""
    folder.mkdir()
    for name, task in TASKS.items():
        documents = folder / f"{name}.jsonl"
        lines = TEXTS if name == "rolling" else COUNTS
        documents.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = {"data_files": {"test": str(documents)}}
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": files,
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(whole))


def asked(kind: str, names: Sequence[str], *, is_chat: bool = False, **arguments: Any) -> Any:
    return {"kind": kind, "arguments": arguments, "is_chat": is_chat, "names": names}


async def evaluate(folder: Path, *runs: Any) -> list[Any]:
    """Return the answers that lm-eval received in each run, by task."""
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder.parent / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if any(each["kind"] == "hf" for each in runs):
        environ["EVERLIFT_TORCH"] = sysconfig.get_paths()["purelib"]
    # Without -P, triton.py in the script's folder would be imported instead of the package.
    process = await asyncio.create_subprocess_exec(
        *(program("python"), "-P", str(SCRIPT), str(folder), json.dumps(runs)),
        env=environ,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    found: list[Any] = json.loads(printed.decode().splitlines()[-1])
    return found


def check_same(found: Any, expected: Any) -> None:
    """Compare texts and flags exactly, and numbers within 1e-3 or, if larger, 1e-5 of the value."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            check_same(found[name], expected[name])
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-3)
    else:
        assert found == expected


@pytest.mark.long
async def test_lm_eval_scores_equal_those_of_its_own_model(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    write_tasks(folder)
    own: Any = {
        "pretrained": str(DEMO_MODEL),
        "dtype": "float32",
        "device": "cpu",
        "max_length": WINDOW,
    }
    expected, chatted = await evaluate(
        folder, asked("hf", list(TASKS), **own), asked("hf", ["generated"], is_chat=True, **own)
    )
    assert expected["generated"]["metrics"]["exact_match,none"] == 1.0
    places = ["router.port=0", "router.http_port=0", f"state_dir={tmp_path}"]
    exact = ["worker.dtype=float32", "worker.num_blocks=512"]
    async with ProcessCluster(load(None, {}, [*places, *exact])) as parts:
        async with AsyncClient(parts.address) as client:
            base = f"http://{(await client.status()).http_address}/v1"
        api: Any = {"model": "demo_model", "max_length": WINDOW + 2}
        texts: Any = {**api, "base_url": f"{base}/completions"}
        chats: Any = {**api, "base_url": f"{base}/chat/completions"}
        # lm-eval cannot send a window as text, because its ends may split characters.
        whole = [name for name in TASKS if name != "rolling"]
        *completed, chat = await evaluate(
            folder,
            asked("local-completions", list(TASKS), batch_size=4, **texts),
            asked("local-completions", list(TASKS), num_concurrent=4, **texts),
            asked("local-completions", whole, tokenized_requests=False, **texts),
            asked("local-chat-completions", ["generated"], is_chat=True, **chats),
        )
    for found in completed:
        check_same(found, {name: expected[name] for name in found})
    check_same(chat, chatted)
