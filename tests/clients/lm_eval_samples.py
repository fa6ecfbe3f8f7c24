"""Run lm-eval on the tasks in a folder, and print the scores and texts that it received as JSON.

The arguments are the folder and a list of runs as JSON: each has the kind of the model, its
arguments, whether conversations are sent, and the names of the tasks. Run in the environment of
other people's clients, by tests/integration. The kind `hf` needs torch and transformers, which are
not installed there: they are taken from the folder that EVERLIFT_TORCH names.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path += [path for path in [os.environ.get("EVERLIFT_TORCH")] if path]

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def run(tasks: TaskManager, kind: str, arguments: Any, is_chat: bool, names: list[str]) -> Any:
    found: Any = simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=names,
        task_manager=tasks,
        apply_chat_template=is_chat,
        bootstrap_iters=0,
    )
    return {
        name: {
            "answers": [sample["filtered_resps"] for sample in found["samples"][name]],
            "metrics": {
                metric: value
                for metric, value in found["results"][name].items()
                if metric.endswith(",none") and isinstance(value, float)
            },
        }
        for name in names
    }


def main(folder: str, runs: str) -> None:
    tasks = TaskManager(include_path=folder, include_defaults=False)
    print(json.dumps([run(tasks, **each) for each in json.loads(runs)]))


main(*sys.argv[1:])
