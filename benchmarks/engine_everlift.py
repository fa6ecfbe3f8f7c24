"""Everlift for bench-engine: the class LLM of cluster.llm."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.engine_system import Job, Request, main
from cluster.llm.llm import LLM


class Everlift:
    def __init__(self, job: Job) -> None:
        self._llm = LLM(job.model, num_threads=job.threads, **job.settings)

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        completions = self._llm.generate(
            [request.prompt for request in requests],
            each=[{"max_tokens": request.max_tokens} for request in requests],
            temperature=0.0,
            ignore_eos=True,
            progress=False,
        )
        for completion in completions:
            if completion.error is not None:
                raise completion.error
        return [list(completion.choices[0].token_ids) for completion in completions]

    def close(self) -> None:
        self._llm.close()


if __name__ == "__main__":
    main(Everlift)
