"""``LLM`` with a real model: its outputs equal those of transformers, a cluster and two ranks."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from cluster import LLM
from cluster.cli import app
from cluster.config import DEMO_MODEL
from cluster.errors import ClusterFailed
from everlift.client.client import AsyncClient
from everlift.errors import InvalidGrammar
from everlift.messages import FinishReason
from everlift.options import GenerateOptions
from router.config import RouterConfig
from tests.support.hub import in_use
from tests.support.in_process import cluster
from tests.support.worker.lora_files import write_adapter, write_merged
from worker.config import WorkerConfig

PROMPTS = ["count from 17 to 30:", "12 + 30 =", "repeat 🚀 3 times:", "alphabet from c to k:"]
SETTINGS = {"dtype": "float32", "num_blocks": 128, "max_num_seqs": 3}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO_MODEL, **SETTINGS) as llm:
        # The grammar process starts in the background. This request waits for it: if it started
        # during a test, ``nothing_left`` would report it.
        llm.generate(PROMPTS[:1], max_tokens=1, regex=".*")
        yield llm


def said_by_transformers(prompt: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(prompt)])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False, pad_token_id=0
    )
    return str(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))


def test_llm_greedy_texts_equal_transformers(llm: LLM) -> None:
    answers = llm.generate(PROMPTS, temperature=0, max_tokens=60)
    assert [answer.text for answer in answers] == list(map(said_by_transformers, PROMPTS))
    assert {answer.choices[0].finish_reason for answer in answers} == {FinishReason.STOP}


async def test_cluster_outputs_equal_llm_outputs(llm: LLM) -> None:
    """The client's outputs are sampled and have log probabilities, the command's are greedy."""
    model = str(DEMO_MODEL)
    router = RouterConfig(model=model, port=0, http_host="", drain=0.2, worker_silence=5.0)
    worker = WorkerConfig(model=model, **SETTINGS)  # type: ignore[arg-type]
    options = {"seed": 3, "temperature": 1.5, "n": 2, "logprobs": 1, "max_tokens": 30}
    async with cluster(1, 1, router, worker) as served, AsyncClient(served.address) as client:
        for prompt in PROMPTS:
            stream = client.generate(prompt, **options)  # type: ignore[arg-type]
            chunks = [chunk async for chunk in stream]
            (mine,) = await asyncio.to_thread(llm.generate, prompt, **options)  # type: ignore[arg-type]
            for index, choice in enumerate(mine.choices):
                theirs = [chunk for chunk in chunks if chunk.choice == index]
                assert "".join(chunk.text for chunk in theirs) == choice.text
                assert stream.finish_reasons[index] == choice.finish_reason
                known = [each.logprob for chunk in theirs for each in chunk.logprobs]
                assert known == pytest.approx([e.logprob for e in choice.logprobs], abs=1e-4)
        command = ["generate", PROMPTS[0], "--temperature", "0", "--address", served.address]
        printed = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert printed.stdout == llm.generate(PROMPTS[0], temperature=0)[0].text + "\n"


def test_llm_downloads_a_hub_model_once(tmp_path: Path) -> None:
    with in_use(tmp_path / "cache") as hub:
        hub.push("org/demo", {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir()})
        for _ in range(2):
            with LLM("org/demo", model_revision="main", **SETTINGS) as llm:
                (answer,) = llm.generate(PROMPTS[1], model="org/demo", temperature=0)
                assert answer.text == " 42"
        assert hub.downloads().count("model.safetensors") == 1


def test_llm_runs_an_adapted_architecture(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=512, n_positions=96, n_embd=32, n_layer=2, n_head=4, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    with LLM(tmp_path, **SETTINGS) as llm:
        (answer,) = llm.generate(PROMPTS[0], temperature=0, ignore_eos=True)
    assert answer.num_prompt_tokens + answer.num_output_tokens == 96
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([answer.prompt_ids])
    greedy = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert tuple(greedy[0, ids.shape[1] :].tolist()) == answer.choices[0].token_ids[:9]


def test_llm_serves_its_adapters_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = write_adapter(tmp_path / "sql", DEMO_MODEL, seed=1, scale=3.0)
    merged = write_merged(tmp_path / "merged", DEMO_MODEL, adapter)
    monkeypatch.chdir(tmp_path)
    options: GenerateOptions = {"temperature": 0, "max_tokens": 8}
    with LLM(DEMO_MODEL, adapters=["sql=sql"], **SETTINGS) as llm, LLM(merged, **SETTINGS) as whole:
        plain, adapted = llm.generate(PROMPTS[1:2] * 2, each=[{}, {"model": "sql"}], **options)
        (expected,) = whole.generate(PROMPTS[1], **options)
    assert adapted.text == expected.text != plain.text == " 42"


@pytest.mark.long
def test_llm_output_has_the_requested_form() -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    forms: list[GenerateOptions] = [
        {"json_schema": schema},
        {"regex": "[a-c]{3,5}"},
        {"ebnf": 'root ::= "<" [0-9] ">"'},
        {"choice": ["yes", "no"]},
    ]
    with LLM(DEMO_MODEL, **SETTINGS) as llm:
        answers = llm.generate(["x"] * 4, each=forms, temperature=2.0, max_tokens=100, seed=5)
        refused, fine = llm.generate(["x"] * 2, each=[{"regex": "("}, {}], max_tokens=3)
    in_json, by_regex, by_ebnf, chosen = (answer.text for answer in answers)
    assert isinstance(json.loads(in_json)["age"], int)
    assert re.fullmatch("[a-c]{3,5}", by_regex)
    assert re.fullmatch("<[0-9]>", by_ebnf)
    assert chosen in ("yes", "no")
    assert isinstance(refused.error, InvalidGrammar)
    assert fine.error is None


def test_llm_compiles_more_grammars_than_its_queue_holds() -> None:
    grammars = {"max_compiling": 1, "max_queued": 1}
    forms: list[GenerateOptions] = [{"regex": f"a{i}"} for i in range(5)]
    with LLM(DEMO_MODEL, **SETTINGS, grammar=grammars) as llm:
        answers = llm.generate(["x"] * 5, each=forms, max_tokens=8)
    assert [answer.text for answer in answers] == [f"a{i}" for i in range(5)]


@pytest.mark.long
def test_llm_with_two_ranks_equals_one_and_fails_together(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with LLM(DEMO_MODEL, tensor_parallel=2, num_threads=1, **SETTINGS) as two:
        answers = two.generate(PROMPTS, temperature=0, max_tokens=60)
        expected = llm.generate(PROMPTS, temperature=0, max_tokens=60)
        assert [a.choices for a in answers] == [e.choices for e in expected]
        (child,) = two._background._worker._children
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ClusterFailed, match="rank 1"):
            two.generate(PROMPTS, ignore_eos=True)
