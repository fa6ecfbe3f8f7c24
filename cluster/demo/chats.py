"""Chat requests of the demo: mixed lengths, alternately greedy and sampled with a seed."""

from __future__ import annotations

from cluster.demo.load import Task
from everlift import model_files
from everlift.errors import NoChatTemplate
from everlift.v1 import inference_pb2 as pb
from router.chat.conversation import Turn
from router.chat.templates import ChatTemplate
from router.requests.tokenizer import ServedModel

_SYSTEM = "You are a helpful assistant. Answer in a few short sentences."
_PASSAGES = (
    "A lighthouse is a tower that shows a bright light at night. It warns ships of rocks and "
    "shallow water, and helps sailors to find their position. In the past a keeper lived in the "
    "tower and lit the lamp every evening. Today most lamps are electric and work without a "
    "keeper, and many old towers are museums.",
    "Honey bees live in large colonies with one queen, many workers and a few drones. The "
    "workers collect nectar and pollen from flowers. On the way they carry pollen from flower "
    "to flower, so that fruit and seeds can grow. In the hive they turn the nectar into honey, "
    "which feeds the colony in winter. A colony can visit millions of flowers in a single "
    "summer, and farmers rent hives in spring so that their orchards bear more fruit. When a "
    "colony grows too large, the old queen leaves with half of the workers and looks for a new "
    "home.",
)
_QUESTIONS = (
    "Explain in a few sentences how a rainbow forms.",
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Give me three tips for learning a new language.",
    "Why is the sky blue?",
    "Tell me a story about a fox and a bear.",
    "What is the difference between a list and a tuple in Python?",
    "Describe a quiet morning in a small village.",
    "How do I make a simple tomato soup?",
    "What does a compiler do?",
    "Name five animals that live in the forest.",
    "Write a friendly invitation to a birthday party.",
    "What is photosynthesis?",
    "How can I sleep better?",
    "Explain what a database index is.",
    "Write one sentence about each season.",
    "What should I see in London in one day?",
    "Why do we have leap years?",
    "Describe the taste of a lemon.",
    "How does a bicycle stay upright?",
    "What is the moon made of?",
    "Write a short thank-you note to a teacher.",
    "Explain gravity to a child.",
    "What are the benefits of walking every day?",
)
_ABOUT_PASSAGES = (
    "Summarise this text in one sentence:",
    "Write a title for this text:",
    "What are the two most important facts in this text?",
    "Ask a question that this text answers:",
)
_TOKENS = (64, 24, 40, 52, 32)


async def chat_tasks(model: str, count: int) -> list[Task]:
    """Return ``count`` chat requests for ``model``, without expected texts.

    Raises NoChatTemplate, ModelUnavailable.
    """
    await model_files.fetch(model, weights=False)
    served = ServedModel.load(model)
    template = ChatTemplate.load(served.directory) if served.directory else None
    if template is None:
        raise NoChatTemplate(f"the model {served.name!r} has no chat template")
    try:
        return [await _task(served, template, i) for i in range(count)]
    finally:
        await template.close()


async def _task(served: ServedModel, template: ChatTemplate, number: int) -> Task:
    question = _question(number)
    text = await template.render([Turn("system", (_SYSTEM,)), Turn("user", (question,))], None)
    tokens = served.tokenizer.encode(text, add_special_tokens=False)
    return Task(
        shown=f"{question}\n",
        request=pb.GenerateRequest(
            tokens=pb.TokenIds(ids=tokens),
            max_tokens=_TOKENS[number % len(_TOKENS)],
            sampling=_sampling(number),
        ),
    )


def _question(number: int) -> str:
    """Return the question of request ``number``; every fourth one is about a long passage."""
    if number % 4 == 3:
        place = number // 4
        passage = _PASSAGES[place % len(_PASSAGES)]
        return f"{_ABOUT_PASSAGES[place // 2 % len(_ABOUT_PASSAGES)]}\n\n{passage}"
    return _QUESTIONS[(number - number // 4) % len(_QUESTIONS)]


def _sampling(number: int) -> pb.Sampling:
    if number % 2 == 0:
        return pb.Sampling(temperature=0.0)
    return pb.Sampling(temperature=0.8, top_p=0.95, seed=number)
