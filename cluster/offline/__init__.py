"""Generation without a cluster: a model in this process."""

from cluster.completion import Choice, Completion
from cluster.offline.llm import LLM
from cluster.offline.stream import CompletionStream

__all__ = ["LLM", "Choice", "Completion", "CompletionStream"]
