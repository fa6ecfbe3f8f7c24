"""Starts with images, without a socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from everlift.errors import EngineFailed, EverliftError, InvalidRequest
from everlift.images import Image
from everlift.v1 import session_pb2
from tests.support.images import png
from tests.support.worker.fake_vllm_core import IMAGE_TOKENS, PLACEHOLDER_ID, process_images
from tests.support.worker.worker_support import limits, start
from tests.unit.worker.serving.test_omitted_prefix import LOAD, RecordingEngine, incomplete
from worker.engine.images import ProcessedImages
from worker.engine.sequence import Sequence
from worker.grammar.absent import NoGrammars
from worker.serving.sessions import Sessions

IMAGE = Image.checked(png(1), "image")
PROMPT = [5, PLACEHOLDER_ID, 7]
Done = Callable[[ProcessedImages | EverliftError], None]


class RecordedImages:
    """Image queue whose processing ends when a test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Sequence, Callable[[], bool], Done]] = []

    def process(self, sequence: Sequence, is_wanted: Callable[[], bool], done: Done) -> None:
        self.waiting.append((sequence, is_wanted, done))

    def finish(self, error: EverliftError | None = None) -> None:
        sequence, _, done = self.waiting.pop(0)
        prompt = sequence.tokens[: sequence.num_prompt]
        done(error or process_images(prompt, sequence.images, sequence.salt))


class Worker:
    def __init__(self, max_images: int = 2, max_model_len: int = 512) -> None:
        bounds = replace(limits(max_model_len=max_model_len), max_images=max_images)
        self.limits, self.engine, self.images = bounds, RecordingEngine(), RecordedImages()
        self.sessions = Sessions(bounds, LOAD, self.engine, NoGrammars(), self.images)
        self.router = self.sessions.open_session("router", lambda: None)
        self.frame()

    def send(self, *starts: session_pb2.Start) -> session_pb2.WorkerFrame:
        self.sessions.receive(self.router, session_pb2.RouterFrame(starts=starts), now=0.0)
        return self.frame()

    def frame(self) -> session_pb2.WorkerFrame:
        return self.sessions.take_frame(self.router)


def with_image(
    choice: int = 0, *, has_file: bool = True, output: tuple[int, ...] = (), max_tokens: int = 9
) -> session_pb2.Start:
    message = start(1, PROMPT, max_tokens, output, choice)
    message.images.add(digest=IMAGE.digest, data=IMAGE.data if has_file else b"")
    return message


def test_engine_receives_processed_images() -> None:
    worker = Worker()
    frame = worker.send(with_image(output=(3, 4)))
    assert (frame.state.num_waiting, worker.engine.started) == (1, [])
    worker.images.finish()
    [sequence] = worker.engine.started
    assert sequence.images == (IMAGE,)
    assert sequence.num_image_tokens == IMAGE_TOKENS - 1
    assert sequence.processed_images is not None
    assert sequence.processed_images.prompt_ids == [5, *IMAGE.digest[:IMAGE_TOKENS], 7]
    assert sequence.to_start() == with_image(output=(3, 4))


def test_choices_share_the_files_of_images() -> None:
    worker = Worker()
    frame = worker.send(with_image(), with_image(1, has_file=False))
    assert not incomplete(frame)
    for _ in range(2):
        worker.images.finish()
    assert [it.images[0].data for it in worker.engine.started] == [IMAGE.data] * 2


def test_start_without_a_known_file_is_incomplete() -> None:
    worker = Worker()
    frame = worker.send(with_image(1, has_file=False))
    assert incomplete(frame) == [(1, 1)]
    worker.send(with_image(1))
    worker.images.finish()
    assert [it.key.choice for it in worker.engine.started] == [1]


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        (InvalidRequest("images[0] cannot be decoded"), session_pb2.STOP_CAUSE_REFUSED),
        (EngineFailed("no thread"), session_pb2.STOP_CAUSE_FAILED),
    ],
)
def test_failed_image_ends_only_its_sequence(error: EverliftError, stop: int) -> None:
    worker = Worker()
    worker.send(with_image(), start(2, [5, 6], 9))
    worker.images.finish(error)
    [progress] = worker.frame().progress
    assert (progress.epoch, progress.stop, progress.error) == (1, stop, str(error))
    assert [it.key.epoch for it in worker.engine.started] == [2]


def test_worker_without_images_refuses_them() -> None:
    worker = Worker(max_images=0)
    [progress] = worker.send(with_image()).progress
    assert (progress.stop, progress.error_slug) == (
        session_pb2.STOP_CAUSE_REFUSED,
        "unsupported_content",
    )


def test_aborted_sequence_never_starts() -> None:
    worker = Worker()
    worker.send(with_image())
    [(_, is_wanted, _)] = worker.images.waiting
    assert is_wanted()
    abort = session_pb2.RouterFrame(aborts=[session_pb2.Abort(epoch=1)])
    worker.sessions.receive(worker.router, abort, now=0.0)
    assert not is_wanted()
    worker.images.finish()
    assert not worker.engine.started and not worker.frame().progress
    assert worker.sessions.is_idle


def test_drain_returns_sequences_whose_images_wait() -> None:
    worker = Worker()
    worker.send(with_image(output=(3,)))
    worker.sessions.drain()
    [progress] = worker.frame().progress
    assert (progress.stop, progress.offset) == (session_pb2.STOP_CAUSE_RETURNED, 1)


@pytest.mark.parametrize(("spare", "slug"), [(0, "prompt_too_long"), (1, "")])
def test_tokens_of_images_count_for_the_context(spare: int, slug: str) -> None:
    worker = Worker(max_model_len=len(PROMPT) + IMAGE_TOKENS - 1 + spare)
    worker.send(with_image())
    worker.images.finish()
    assert [it.error_slug for it in worker.frame().progress] == ([slug] if slug else [])
    assert len(worker.engine.started) == spare


def test_output_that_fills_the_context_ends_at_once() -> None:
    worker = Worker(max_model_len=len(PROMPT) + IMAGE_TOKENS - 1 + 2)
    worker.send(with_image(output=(3, 4)))
    worker.images.finish()
    [progress] = worker.frame().progress
    assert (progress.stop, progress.offset) == (session_pb2.STOP_CAUSE_LENGTH, 2)
    assert not worker.engine.started
