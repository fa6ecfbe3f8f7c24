"""``LLM``: a model in this process, without router, ledger, Ray or network.

    with LLM("~/models/llama") as llm:
        for completion in llm.generate(["one,", "two,"], max_tokens=20):
            print(completion.text)

Prompts are tokenized and tokens decoded by the router's code; the engine is that of a worker.
"""

from __future__ import annotations

import secrets
import sys
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from pydantic import ValidationError

from cluster.bar import bar
from cluster.config import Config
from cluster.llm.background import Background
from cluster.llm.completion import Completion
from cluster.llm.window import CompletionStream, run_in_window
from cluster.llm.worker import Task
from cluster.threads import wait_passively
from everlift import settings
from everlift.messages import Submission
from everlift.options import GenerateOptions, Prompt, submission_message
from router.requests.served_models import ServedModels
from worker.config import WorkerConfig

#: Number of choices at the engine at a time, in multiples of its batch. The engine then never lacks
#: work, and the other prompts take no memory there.
_WINDOW = 4


class LLM:
    """Model in this process.

    Methods may be called from several threads. The model is closed when the object is garbage
    collected or the process ends.
    """

    def __init__(self, model: str | Path, **overrides: object) -> None:
        """Load ``model``, an id or directory as for ``everlift up``.

        ``overrides`` are worker settings by name. Raises SettingsError if one of them is invalid,
        UnknownModel or ModelUnavailable if the model cannot be loaded, ClusterFailed if it is not
        supported, and any error of building the engine.
        """
        worker = settings.load(WorkerConfig, overrides)
        try:
            config = Config(
                model=str(model),
                model_revision=worker.model_revision,
                adapters=worker.adapters,
                # Config completes the worker's adapters with absolute paths.
                worker=replace(worker, adapters=()),
            )
        except ValidationError as error:
            raise settings.to_settings_error(Config, error) from None
        self._open(config)

    @classmethod
    def of(cls, config: Config) -> Self:
        """Create an LLM with the model and worker settings of a cluster's configuration.

        Raises UnknownModel or ModelUnavailable if the model cannot be loaded, ClusterFailed if it
        is not supported, and any error of building the engine.
        """
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: Config) -> None:
        wait_passively()
        self._max_num_seqs = config.worker.max_num_seqs
        self._background = Background(config)
        self._finalizer = weakref.finalize(self, self._background.close)
        try:
            self._models = ServedModels([self._background.ready()])
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        *,
        each: Sequence[GenerateOptions] | None = None,
        progress: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Return a completion for each prompt, in the order of ``prompts``.

        ``options`` apply to all prompts. ``each`` has the options of each single prompt, in the
        same order; they override ``options``. ``progress`` says whether a progress bar is shown; if
        None, it is shown on a terminal for two or more prompts. Raises ValueError if ``each`` and
        ``prompts`` differ in length, and TypeError if an element of ``prompts`` is neither text nor
        a sequence of token ids.

        Any other invalid prompt or option raises its EverliftError before anything runs. A failure
        after that is in ``Completion.error``, is raised by ``Completion.text``, and does not affect
        other prompts. Raises ClusterFailed if the engine ends. ``timeout_s`` counts from the moment
        when a prompt is given to the engine. ``on_disconnect`` has no effect.
        """
        tasks = self._tasks(_listed(prompts), each, options)
        completions: dict[int, Completion] = {}
        with bar("generating", len(tasks), shown=_is_shown(progress, len(tasks))) as advance:
            for index, completion in run_in_window(
                tasks, self._submit, _WINDOW * self._max_num_seqs
            ):
                completions[index] = completion
                advance(completion.num_output_tokens)
        return [completions[index] for index in range(len(tasks))]

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> CompletionStream:
        """Return an iterator over the chunks of one prompt, as they are generated.

        Raises EverliftError for an invalid prompt or option.
        """
        return CompletionStream(self._task(prompt, options), self._background)

    def submit(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Future[Completion]:
        """Start one prompt, and return a future of its completion.

        Cancelling the future cancels the request. Raises EverliftError for an invalid prompt or
        option.
        """
        return self._submit(self._task(prompt, options))

    def close(self) -> None:
        """Stop the engine, its threads and processes, and cancel running requests.

        A second call does nothing.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _tasks(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[GenerateOptions] | None,
        options: GenerateOptions,
    ) -> list[Task]:
        own: Sequence[GenerateOptions] = [{}] * len(prompts) if each is None else each
        if len(own) != len(prompts):
            raise ValueError(f"each has {len(own)} items; it must have one for each prompt")
        return [
            self._task(prompt, {**options, **mine})
            for prompt, mine in zip(prompts, own, strict=True)
        ]

    def _task(self, prompt: Prompt, options: GenerateOptions) -> Task:
        message, model = submission_message(prompt, options), self._models.first
        submission = Submission.from_proto(
            message,
            message.request_id,
            secrets.randbits(63),
            sampling_defaults=model.sampling_defaults,
            adapters=model.adapter_digests,
        )
        return Task(self._models.resolve(submission), submission.timeout_s)

    def _submit(self, task: Task) -> Future[Completion]:
        done: Future[Completion] = Future()
        try:
            self._background.submit(task, done)
        except BaseException:  # such as Ctrl-C: the caller does not get the future
            done.cancel()
            raise
        return done


def _listed(prompts: str | Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts as a list.

    Raises TypeError if an element is not a prompt, for example if ``prompts`` are the token ids of
    a single prompt.
    """
    listed: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
    for prompt in listed:
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise TypeError(f"a prompt is text or a sequence of token ids, not {prompt!r}")
    return listed


def _is_shown(progress: bool | None, total: int) -> bool:
    return total > 1 and sys.stderr.isatty() if progress is None else progress
