"""Reuse of token ids between the turns of a session; a part of locality.py.

A router with SmolLM2's tokenizer and chat template, and a fake worker whose outputs are random
tokens, serve chats over HTTP. Each turn sends the messages of the earlier turns with the texts of
the answers.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

from tests.support.in_process import ROUTER, WORKER, Cluster, KeptLedger, cluster
from tests.support.router.http_client import JSON, ask
from worker.config import FakeModel

SESSIONS, TURNS = 20, 8
_EOS = 2
_FAKE = FakeModel(vocab_size=49152, max_model_len=8192, eos_token_id=_EOS, eos_one_in=100)
_WORDS = "list the files of this folder and explain in short what each of them is good for".split()


async def measure() -> dict[str, float]:
    """Return shares of the prompt and answer of each turn with which the next prompt begins.

    ``session_reuse`` counts equal token ids, ``cached`` the tokens that the worker had cached, and
    ``tokenised`` equal token ids of chats without a session id.
    """
    ledger = KeptLedger(time.monotonic)
    router = replace(ROUTER, model="smollm2")
    worker = replace(WORKER, fake=_FAKE, num_blocks=2048)
    async with cluster(1, 1, router, worker, ledger) as parts:
        with_ids = [await _chat(parts, f"s{number}") for number in range(SESSIONS)]
        without = [await _chat(parts, f"t{number}", is_named=False) for number in range(SESSIONS)]
    known, equal, cached = (sum(column) for column in zip(*with_ids, strict=True))
    other_known, other_equal, _ = (sum(column) for column in zip(*without, strict=True))
    return {
        "session_reuse": equal / known,
        "cached": cached / known,
        "tokenised": other_equal / other_known,
    }


async def _chat(parts: Cluster, name: str, *, is_named: bool = True) -> tuple[int, int, int]:
    """Run a chat and return sums over its turns.

    They count the tokens of the previous prompt and answer, those of them with which the prompt
    begins, and the cached tokens of the prompt.
    """
    dice = random.Random(name)
    headers = {**JSON, "x-session-id": name} if is_named else JSON
    messages: list[dict[str, Any]] = []
    known: list[int] = []
    counts = [0, 0, 0]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": " ".join(dice.choices(_WORDS, k=20))})
        request_id = f"{name}-{turn}"
        answer = await ask(
            parts.routers[0].http_address,
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": 200, "seed": turn},
            {**headers, "idempotency-key": request_id},
        )
        assert answer.status == 200, answer.body
        stored = await parts.ledger.read(request_id)
        prompt, output = stored.request.prompt_ids, stored.choices[0].tokens
        details = answer.json["usage"]["prompt_tokens_details"]
        counts[0] += len(known)
        counts[1] += _num_equal(known, prompt)
        counts[2] += details["cached_tokens"] if known else 0
        known = [*prompt, *(output[:-1] if output[-1:] == (_EOS,) else output)]
        messages.append(answer.json["choices"][0]["message"])
    return counts[0], counts[1], counts[2]


def _num_equal(known: list[int], prompt: tuple[int, ...]) -> int:
    pairs = zip(known, prompt, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(known))
