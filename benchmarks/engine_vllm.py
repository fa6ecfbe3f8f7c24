"""vLLM for bench-engine, in its own environment."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import LLM, SamplingParams

from benchmarks.engine_system import Job, Request, main


class Vllm:
    def __init__(self, job: Job) -> None:
        self._llm = LLM(job.model, **job.settings)

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": request.prompt} for request in requests],
            [
                SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
                for request in requests
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Do nothing, because vLLM's processes end with this one."""


if __name__ == "__main__":
    main(Vllm)
