"""Tasks of the demo model: small texts whose only right answer can be computed.

The demo model makes errors of the engine visible. A corrupted, misplaced or half-written KV cache
results in a wrong number in a count, a skipped letter or a broken JSON field. Therefore every kind
of task has exactly one right continuation, which this module computes:

    count        "count from 17 to 30:"                 " 17 18 19 ... 30"    either direction
    long_count   "count from 100 to 300:"               the same with 60 to 240 numbers
    count_by     "count from 4 to 40 by 4:"             " 4 8 12 ... 40"      either direction
    alphabet     "alphabet from c to k:"                " c d e f g h i j k"
    repeat       "repeat hello 4 times:"                " hello hello hello hello"
    sum          "12 + 30 ="                            " 42"
    days         "days from tuesday, 3:"                " tuesday wednesday thursday"
    months       "months from november, 3:"             " november december january"
    json         "json name=ann age=31 city=rome:"      ' {"name": "ann", "age": 31, ...}'

The list shows the canonical forms. The model is also trained on prompts without the colon
(`without_colon`) and on prompts that begin with solved tasks, one per line (`after_lines`). The
latter make prompts of any length. An answer starts with a space, so that prompt + answer is the
complete text. The end-of-text token after the answer is added by the tokenizer, not by this module.

About one prompt in ten is held out from training. A pure function of the prompt's text decides this
(`is_held_out`). The module uses no clock, no global state and no torch.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
MONTHS = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = tuple(
    "ada alan ann anna ben bob carl cara dan dora emil emma eva finn fred gina greta hans hugo ida "
    "ivan jack jane john judy kai kate lena leo lisa luis mara marie max mia nina noah olga omar "
    "otto paul peter rita rosa ruth sam sara sofia sven tara theo tim tom uma vera victor wanda "
    "yuri zoe".split()
)
CITIES = tuple(
    "rome paris london berlin vienna madrid lisbon oslo dublin prague athens tokyo kyoto delhi "
    "cairo lima quito boston denver austin seattle sydney perth geneva milan naples turin lyon "
    "bern".split()
)
WORDS = tuple(
    "apple banana bird black blue book bread brown cat chair cloud coffee cow dog door duck earth "
    "fire fish flower forest garden gold green grey hello horse house hill ice island key lake "
    "lamp leaf light lion milk moon mountain mouse music night orange paper pear pink plum queen "
    "rain red river road rose salt sand sea ship silver snow spring star stone storm sugar summer "
    "sun table tea tiger train tree water white wind window winter wolf yes yellow".split()
)
#: Words with characters of two to four bytes that the tokenizer does not merge. Such a character
#: arrives in several tokens, which incremental detokenisation has to handle.
UNICODE_WORDS = tuple(
    "naïve café zürich münchen köln øre łódź señor ça été über größe århus são "
    "привет мир москва αβγ ωμέγα 日本 東京 你好 世界 한국 שלום سلام नमस्ते "
    "☃ ★ ♞ € ∞ → 🙂 🚀 🐍 🎉 🌍 👩‍🚀".split()
)
STEPS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 25, 50, 100)
NUMBER_FIELDS = ("age", "year", "score", "level", "size", "id")
WORD_FIELDS = ("name", "city", "color", "job", "pet", "food", "team", "user")

LONGEST_REPEAT = 10
LONGEST_CYCLE = 20
LONGEST_COUNT = 240
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Example:
    """Prompt of a task and its only right answer, which excludes the end-of-text token.

    ``kind`` is the kind of task, such as ``count``.
    """

    kind: str
    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return self.prompt + self.answer


def is_held_out(prompt: str) -> bool:
    """Return whether a one-line prompt in canonical form is held out from training."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def examples(kind: str, seed: int, n: int, *, held_out: bool = False) -> list[Example]:
    """Return ``n`` random examples of one kind of task; equal arguments return equal lists.

    With ``held_out`` all are held out from training, otherwise none is. Examples may repeat, and do
    so in kinds with few different tasks.
    """
    sampled = stream(kind, Random(f"{kind}/{seed}/{held_out}"), held_out=held_out)
    return [next(sampled) for _ in range(n)]


def stream(kind: str, rng: Random, *, held_out: bool = False) -> Iterator[Example]:
    """Yield random examples of one kind, endlessly.

    With ``held_out`` all are held out from training, otherwise none is.
    """
    make = MAKERS[kind]
    while True:
        prompt, answer = make(rng)
        if is_held_out(prompt) == held_out:
            yield Example(kind, prompt, answer)


def without_colon(example: Example) -> Example:
    """Return the same task without the colon at the end of its prompt.

    The task stays held out from training, or not, as before. ``is_held_out`` decides this only
    from the prompt with the colon.
    """
    return replace(example, prompt=example.prompt.removesuffix(":"))


def after_lines(lines: Sequence[Example], last: Example) -> Example:
    """Return ``last`` with a longer prompt, which begins with the solved tasks ``lines``.

    Each task is on a line of its own.
    """
    solved = "".join(f"{line.text}\n" for line in lines)
    return replace(last, prompt=solved + last.prompt)


def _count(rng: Random) -> tuple[str, str]:
    return _count_of(rng, _skewed(rng, 2, 60), step=1)


def _long_count(rng: Random) -> tuple[str, str]:
    return _count_of(rng, rng.randint(60, LONGEST_COUNT), step=1)


def _count_by(rng: Random) -> tuple[str, str]:
    step = rng.choice(STEPS)
    return _count_of(rng, _skewed(rng, 2, min(60, 900 // step)), step)


def _count_of(rng: Random, size: int, step: int) -> tuple[str, str]:
    span = (size - 1) * step + 1
    ceiling = rng.choice([top for top in (100, 200, 500, 1000) if top >= span])
    low = rng.randint(0, ceiling - span)
    if rng.random() < 0.3:  # start near 1, as people do, so that the number of digits changes
        low = min(low, rng.randint(0, 10))
    numbers = range(low, low + span, step)
    if rng.random() < 0.4:
        numbers = numbers[::-1]
    by = f" by {step}" if step > 1 else ""
    return f"count from {numbers[0]} to {numbers[-1]}{by}:", _spaced(numbers)


def _alphabet(rng: Random) -> tuple[str, str]:
    first, last = sorted(rng.sample(range(26), 2))
    letters = LETTERS[first : last + 1]
    if rng.random() < 0.5:
        letters = letters.upper()
    return f"alphabet from {letters[0]} to {letters[-1]}:", _spaced(letters)


def _repeat(rng: Random) -> tuple[str, str]:
    word, times = _random_word(rng), rng.randint(2, LONGEST_REPEAT)
    return f"repeat {word} {times} times:", _spaced([word] * times)


def _sum(rng: Random) -> tuple[str, str]:
    left, right = rng.randint(0, 99), rng.randint(0, 99)
    return f"{left} + {right} =", f" {left + right}"


def _days(rng: Random) -> tuple[str, str]:
    return _cycle(rng, "days", DAYS)


def _months(rng: Random) -> tuple[str, str]:
    return _cycle(rng, "months", MONTHS)


def _cycle(rng: Random, name: str, cycle: tuple[str, ...]) -> tuple[str, str]:
    first, size = rng.randrange(len(cycle)), rng.randint(2, LONGEST_CYCLE)
    words = [cycle[(first + i) % len(cycle)] for i in range(size)]
    if rng.random() < 0.3:
        words = [word.capitalize() for word in words]
    return f"{name} from {words[0]}, {size}:", _spaced(words)


def _json(rng: Random) -> tuple[str, str]:
    keys = rng.sample(NUMBER_FIELDS + WORD_FIELDS, rng.randint(1, 5))
    fields = {key: _field_value(rng, key) for key in keys}
    pairs = " ".join(f"{key}={value}" for key, value in fields.items())
    return f"json {pairs}:", " " + json.dumps(fields, ensure_ascii=False)


def _field_value(rng: Random, key: str) -> str | int:
    if key in NUMBER_FIELDS:
        return rng.randrange(10 ** rng.randint(1, 4))
    if key in ("name", "city") and rng.random() < 0.5:
        return rng.choice(NAMES if key == "name" else CITIES)
    return _random_word(rng)


def _random_word(rng: Random) -> str:
    """Return a known word, a word of random letters, or a word with multi-byte characters.

    Words of random letters teach the model to copy.
    """
    pick = rng.random()
    if pick < 0.5:
        return rng.choice(WORDS + NAMES + CITIES)
    if pick < 0.8:
        return "".join(rng.choices(LETTERS, k=rng.randint(1, 8)))
    return rng.choice(UNICODE_WORDS)


def _skewed(rng: Random, low: int, high: int) -> int:
    """Return a random integer from low to high, both inclusive; small ones are more frequent."""
    return low + int((high - low + 1) * rng.random() ** 3)


def _spaced(items: Sequence[object]) -> str:
    return "".join(f" {item}" for item in items)


#: Functions that make a random (prompt, answer) pair, by kind of task.
MAKERS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "count": _count,
    "long_count": _long_count,
    "count_by": _count_by,
    "alphabet": _alphabet,
    "repeat": _repeat,
    "sum": _sum,
    "days": _days,
    "months": _months,
    "json": _json,
}
KINDS = tuple(MAKERS)
