"""Train the demo model, and write it as a Hugging Face checkpoint.

    python tools/train_demo_model.py                                    train cluster/demo_model
    python tools/train_demo_model.py --evaluate cluster/demo_model      only evaluate it

The weights depend only on the recipe and the training text (`cluster/demo/tasks.py`). Two processes
with one thread each sample their own text and average their gradients, in fp32, so equal machines
produce equal weights. The training takes 29 minutes on two shared cores. benchmarks/RESULTS.md has
the accuracy of the trained model.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

# Lets idle threads sleep. OpenMP reads the variable when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.demo import tasks
from cluster.demo.tasks import KINDS, Example

DEMO_MODEL = Path(__file__).resolve().parents[1] / "cluster" / "demo_model"
END = "<|endoftext|>"
END_ID = 0
#: Target at positions that do not contribute to the loss (cross_entropy's ignore_index).
UNWANTED = -100

#: Shares of the training steps, by the row length in tokens.
Lengths = Mapping[int, float]

#: Relative frequency of each kind of task: larger for kinds that are harder to learn, and for kinds
#: with short answers.
WEIGHTS = {
    "count": 6,
    "long_count": 16,
    "count_by": 8,
    "alphabet": 1,
    "repeat": 5,
    "sum": 8,
    "days": 1,
    "months": 2,
    "json": 3,
}
#: Share of the tasks whose prompt has no colon.
WITHOUT_COLON = 0.25
#: Maximum tokens of a line that may fill the end of a row; only such a line may be truncated.
SHORT_LINE = 48
#: Minimum number of free tokens in a row for a task of the kind long_count.
SHORTEST_LONG_COUNT = 200


@dataclass(frozen=True)
class Recipe:
    """Parameters that determine the weights, together with the training text."""

    seed: int = 0
    ranks: int = 2
    steps: int = 5200
    #: tokens per step and rank
    rank_tokens: int = 2048
    peak_rate: float = 3e-3
    warmup_steps: int = 150
    weight_decay: float = 0.05
    #: pairs of the share of the steps at which a phase ends, and the row lengths of the phase.
    #: Copying is learned many times faster on short rows. The long rows of later phases teach to
    #: find lines that are farther back.
    curriculum: tuple[tuple[float, Lengths], ...] = (
        (0.36, {64: 1.0}),
        (0.58, {64: 0.5, 256: 0.5}),
        (1.0, {64: 0.25, 256: 0.3, 1024: 0.45}),
    )
    vocab_size: int = 512
    positions: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32


def build_tokenizer(recipe: Recipe) -> Tokenizer:
    """Train a byte-level BPE tokenizer in which only runs of letters are merged.

    Each space, digit and sign is a separate token. Therefore a prompt and its continuation have the
    same tokens whether they are tokenized together or separately, and a number consists of its
    digits. No merge contains a byte above 127, so a character of several bytes is always several
    tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|[^\p{L}]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    drawn = (e.text for kind in KINDS for e in tasks.examples(kind, recipe.seed, 2000))
    tokenizer.train_from_iterator((text for text in drawn if text.isascii()), trainer)
    return tokenizer


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Row:
    """Token ids of a training row, and the target for the next token at each position.

    A target is UNWANTED if the position does not contribute to the loss.
    """

    ids: list[int]
    wanted: list[int]


def solved(tokenizer: Tokenizer, example: Example) -> Row:
    """Return the row of one example; its targets are the answer and the end-of-text token."""
    prompt = tokenizer.encode(example.prompt).ids
    answer = tokenizer.encode(example.answer).ids
    return Row(prompt + answer, [*[UNWANTED] * (len(prompt) - 1), *answer, END_ID])


class RowMaker:
    """Generator of training rows of equal length, which consist of solved tasks, one per line.

    The lines are joined as in `after_lines`. The target after each answer is the end-of-text token,
    although a newline follows in the row, because any line may be the last one of a prompt. Thus
    one row trains short prompts, prompts after many lines, and all positions.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self._streams = {kind: tasks.stream(kind, self._rng) for kind in KINDS}
        self._newline = tokenizer.encode("\n").ids

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the token ids and the targets of a batch, each as int64 of [rows, length]."""
        made = [self._row(length) for _ in range(rows)]
        return torch.tensor([row.ids for row in made]), torch.tensor([row.wanted for row in made])

    def _row(self, length: int) -> Row:
        ids: list[int] = []
        wanted: list[int] = []
        while len(ids) < length:
            line = self._line(max(length - len(ids), SHORT_LINE))
            ids += line.ids + self._newline
            wanted += [*line.wanted, UNWANTED]
        return Row(ids[:length], wanted[:length])

    def _line(self, max_tokens: int) -> Row:
        """Return a line of at most ``max_tokens`` tokens.

        ``max_tokens`` is the rest of the row, and at least SHORT_LINE. Only short lines are
        truncated: the end of an answer is the hardest part to learn.
        """
        while len((line := solved(self._tokenizer, self._draw(max_tokens))).ids) > max_tokens:
            pass
        return line

    def _draw(self, max_tokens: int) -> Example:
        weights = WEIGHTS | ({"long_count": 0} if max_tokens < SHORTEST_LONG_COUNT else {})
        (kind,) = self._rng.choices(list(weights), list(weights.values()))
        example = next(self._streams[kind])
        if self._rng.random() < WITHOUT_COLON:
            return tasks.without_colon(example)
        return example


def train(recipe: Recipe, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Train the model in one rank; all ranks have equal weights after every step."""
    rank = distributed.get_rank()
    rows = RowMaker(tokenizer, seed=recipe.seed * 1000 + rank)
    lengths = Random(recipe.seed)
    optimizers = build_optimizers(recipe, model)
    schedules = [LambdaLR(o, lambda step: rate(recipe, step)) for o in optimizers]
    began = time.monotonic()
    for step in range(1, recipe.steps + 1):
        length = row_length(recipe, step, lengths)
        loss = loss_of(model, *rows.batch(recipe.rank_tokens // length, length))
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(model)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        if rank == 0 and step % 100 == 0:
            report(step, loss.item(), time.monotonic() - began)
        if rank == 0 and step % 1300 == 0:
            print_scores(evaluate(model, tokenizer, 20))


def row_length(recipe: Recipe, step: int, rng: Random) -> int:
    shares = next(shares for until, shares in recipe.curriculum if step <= until * recipe.steps)
    (length,) = rng.choices(list(shares), list(shares.values()))
    return length


def rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate divided by its peak: a linear warm-up, then a cosine decay to 0."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def build_optimizers(recipe: Recipe, model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(
        inner,
        recipe.peak_rate,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, torch.optim.AdamW(outer, recipe.peak_rate, (0.9, 0.98), weight_decay=0.0)]


def loss_of(model: LlamaForCausalLM, ids: Tensor, wanted: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=UNWANTED)


def average_gradients(model: LlamaForCausalLM) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def report(step: int, loss: float, seconds: float) -> None:
    print(f"step {step:5}  loss {loss:.4f}  {seconds:5.0f} s", flush=True)


@dataclass(frozen=True)
class Score:
    """Accuracy on one kind of task, asked in one form (a key of FORMS).

    ``exact`` is the share of exact answers. Over the exact answers, ``gap`` is the smallest
    difference between the largest two logits, and ``longest`` is the largest number of tokens.
    """

    kind: str
    form: str
    exact: float
    gap: float
    longest: int


#: Forms of the prompt of a held-out example, by name. Preceding lines are not held out.
FORMS: dict[str, Callable[[Example, int], Example]] = {
    "alone": lambda example, i: example,
    "no colon": lambda example, i: tasks.without_colon(example),
    "after lines": lambda example, i: tasks.after_lines(lines_before(i), example),
}


def lines_before(i: int) -> list[Example]:
    short = ("json", "sum", "days", "alphabet")
    return [tasks.examples(kind, seed=i, n=1)[0] for kind in short[: 1 + i % len(short)]]


def evaluate(model: LlamaForCausalLM, tokenizer: Tokenizer, n: int) -> list[Score]:
    """Return the scores on ``n`` random held-out examples of each kind, in each form."""
    return [score(model, tokenizer, kind, form, n) for kind in KINDS for form in FORMS]


def score(model: LlamaForCausalLM, tokenizer: Tokenizer, kind: str, form: str, n: int) -> Score:
    drawn = tasks.examples(kind, seed=1, n=n, held_out=True)
    rows = [solved(tokenizer, FORMS[form](example, i)) for i, example in enumerate(drawn)]
    fitting = [row for row in rows if len(row.ids) <= model.config.max_position_embeddings]
    gaps = {i: gap for i, row in enumerate(fitting) if (gap := least_lead(model, row)) > 0}
    longest = max((sum(w != UNWANTED for w in fitting[i].wanted) for i in gaps), default=0)
    return Score(kind, form, len(gaps) / len(fitting), min(gaps.values(), default=0.0), longest)


@torch.no_grad()
def least_lead(model: LlamaForCausalLM, row: Row) -> float:
    """Return the smallest difference between a target's logit and the largest other logit.

    It is negative if another token has a larger logit at any position. One pass over the right text
    is enough: greedy decoding generates exactly this text if the target has the largest logit at
    every position.
    """
    wanted = torch.tensor(row.wanted)
    places = (wanted != UNWANTED).nonzero()[:, 0]
    logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, places]
    right = logits.gather(1, wanted[places, None])
    rivals = logits.scatter(1, wanted[places, None], -math.inf)
    return float((right[:, 0] - rivals.amax(1)).min())


def print_scores(scores: Sequence[Score]) -> None:
    print(f"  {'kind':12} {'form':12} {'exact':>7} {'least gap':>9} {'longest':>7}")
    for s in scores:
        print(f"  {s.kind:12} {s.form:12} {s.exact:7.2%} {s.gap:9.3f} {s.longest:7}", flush=True)


def save(recipe: Recipe, model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model in bfloat16, with its tokenizer, to the directory ``out``."""
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore[arg-type]
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        model_max_length=recipe.positions,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)


def run_rank(rank: int, recipe: Recipe, tokenizer_json: str, out: Path, rendezvous: str) -> None:
    torch.set_num_threads(1)
    # Learned examples have gradients near zero. Denormal numbers are slow, and not needed.
    torch.set_flush_denormal(True)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=recipe.ranks
    )
    tokenizer = Tokenizer.from_str(tokenizer_json)
    model = build_model(recipe)
    train(recipe, model, tokenizer)
    if rank == 0:
        save(recipe, model, tokenizer, out)
    distributed.destroy_process_group()


def train_all(recipe: Recipe, out: Path) -> None:
    began = time.monotonic()
    tokenizer_json = build_tokenizer(recipe).to_str()
    print(f"{sum(p.numel() for p in build_model(recipe).parameters())} parameters, {recipe}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (recipe, tokenizer_json, out, f"{folder}/rendezvous")
        spawn(run_rank, arguments, nprocs=recipe.ranks)  # type: ignore[no-untyped-call]
    print(f"{out} written after {time.monotonic() - began:.0f} s")


def evaluate_checkpoint(checkpoint: Path, n: int) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    print_scores(evaluate(model, Tokenizer.from_file(str(checkpoint / "tokenizer.json")), n))
    for file in sorted(checkpoint.iterdir()):
        print(f"  {file.name:24} {file.stat().st_size:9} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEMO_MODEL)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument(
        "--evaluate", type=Path, metavar="CHECKPOINT", help="evaluate this checkpoint only"
    )
    parser.add_argument(
        "--examples", type=int, default=200, help="evaluated examples per kind and form"
    )
    asked = parser.parse_args()
    if asked.evaluate is None:
        train_all(Recipe(seed=asked.seed, steps=asked.steps), asked.out)
    evaluate_checkpoint(asked.evaluate or asked.out, asked.examples)


if __name__ == "__main__":
    main()
