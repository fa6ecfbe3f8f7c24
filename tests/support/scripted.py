"""Worker that runs the demo model with a custom chat template and scripted answers.

A prompt's script is the text from SAY to the end of that turn. Without a script, or under a
grammar, the worker returns the model's own output. THEN divides a script into steps: the first is
the first answer, and each tool result in the prompt selects the next one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from router.config import RouterConfig
from router.requests.tokenizer import HuggingFaceTokenizer
from tests.support.in_process import ROUTER, Cluster, cluster
from tests.support.worker.grammar_support import DEMO_MODEL
from worker.config import WorkerConfig
from worker.engine.plan import Plan, Row, RowResult, Runner

SAY = "say:"
#: Message that makes the scripted model answer "four", and bodies of requests to each HTTP API.
TURN = {"role": "user", "content": f"{SAY}four"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/messages": {"messages": [TURN], "max_tokens": 9},
    "/v1/responses": {"input": f"{SAY}four"},
}
THEN = "then:"
#: Ends of turns, in the templates of tests.support.router.chat_support.
_ENDS = ("<|im_end|>", "<|eot_id|>")
#: Start of a tool result, in chat_support.HERMES.
_RESULT = "<tool_response>"


class ScriptedRunner:
    """Runner that replaces tokens of sequences with a script; steps take ``step_time`` s longer."""

    def __init__(
        self, runner: Runner, tokenizer: HuggingFaceTokenizer, eos_id: int, step_time: float
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_id = eos_id
        self._step_time = step_time
        #: by slot: the prompt's length and the scripted output
        self._scripts: dict[int, tuple[int, list[int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: Plan) -> list[RowResult]:
        for admission in plan.admissions:
            self._scripts.pop(admission.slot, None)
            prompt = admission.tokens[: admission.num_prompt]
            if admission.grammar is None and (script := self._script(prompt)):
                self._scripts[admission.slot] = len(prompt), script
        results = self._runner.execute(plan)
        time.sleep(self._step_time)
        return [self._said(*each) for each in zip(plan.rows, results, strict=True)]

    def _script(self, prompt: tuple[int, ...]) -> list[int]:
        _, _, said = self._tokenizer.decode(prompt).rpartition(SAY)
        ends = [at for end in _ENDS if (at := said.find(end)) >= 0]
        if not ends:
            return []
        steps = said[: min(ends)].split(THEN)
        said = steps[min(said.count(_RESULT), len(steps) - 1)]
        return [*self._tokenizer.encode(said, add_special_tokens=False), self._eos_id]

    def _said(self, row: Row, result: RowResult) -> RowResult:
        if not result.tokens or row.slot not in self._scripts:
            return result
        num_prompt, script = self._scripts[row.slot]
        return result._replace(tokens=(script[row.start + len(row.tokens) - num_prompt],))


@asynccontextmanager
async def scripted_cluster(
    directory: Path,
    template: str,
    change: Callable[[Path], None] = lambda directory: None,
    router_config: RouterConfig = ROUTER,
    workers: int = 1,
    num_blocks: int = 256,
    step_time: float = 0.0,
) -> AsyncIterator[Cluster]:
    """Serve a copy of the demo model in ``directory`` with ``template`` as its chat template.

    ``change`` edits the copied files before the start. Each worker's steps take ``step_time``
    seconds longer.
    """
    shutil.copytree(DEMO_MODEL, directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(template)
    change(directory)
    config = WorkerConfig(
        model=str(directory), device="cpu", dtype="float32", num_blocks=num_blocks, num_threads=1
    )
    router = replace(router_config, model=str(directory))
    eos_id = json.loads((DEMO_MODEL / "config.json").read_text())["eos_token_id"]
    tokenizer = HuggingFaceTokenizer(directory / "tokenizer.json")
    async with cluster(workers=workers, router_config=router, worker_config=config) as parts:
        for rank in parts.workers:
            assert rank._thread is not None
            engine = rank._thread.ready.result()
            engine._runner = ScriptedRunner(engine._runner, tokenizer, eos_id, step_time)
        yield parts
