"""Queue of sequences whose images are processed in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from everlift.errors import EngineFailed, EverliftError, InvalidRequest
from everlift.images import Image
from tests.support.images import png
from tests.support.worker.engine_contract import sequence
from worker.engine.images import ProcessedImages
from worker.serving.image_queue import ImageQueue

IMAGE = Image.checked(png(1), "image")


def wanted() -> bool:
    return True


async def test_unwanted_images_are_not_processed() -> None:
    processed: list[int] = []

    def process(prompt: Sequence[int], *_: object) -> ProcessedImages:
        processed.append(prompt[0])
        return ProcessedImages([], None)

    queue = ImageQueue(process)
    results: asyncio.Queue[ProcessedImages | EverliftError] = asyncio.Queue()
    for number in range(3):
        given = sequence([number], images=(IMAGE,))
        queue.process(given, lambda number=number: number != 1, results.put_nowait)  # type: ignore[misc]
    for _ in range(2):
        await results.get()
    queue.close()
    assert processed == [0, 2] and results.empty()


async def test_images_are_processed_in_another_thread() -> None:
    threads: list[int] = []

    def process(prompt: object, images: object, salt: bytes) -> ProcessedImages:
        threads.append(threading.get_ident())
        assert (prompt, images, salt) == ([1, 2], (IMAGE,), b"salt")
        return ProcessedImages([1, 2, 3], None)

    queue = ImageQueue(process)
    results: asyncio.Queue[tuple[int, ProcessedImages | EverliftError]] = asyncio.Queue()
    given = sequence([1, 2], [9], images=(IMAGE,), salt=b"salt")
    queue.process(given, wanted, lambda result: results.put_nowait((threading.get_ident(), result)))
    thread, result = await results.get()
    queue.close()
    assert isinstance(result, ProcessedImages) and result.prompt_ids == [1, 2, 3]
    assert thread == threading.get_ident() != threads[0]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(InvalidRequest("broken"), InvalidRequest), (OSError("disk"), EngineFailed)],
)
async def test_error_is_the_result(raised: Exception, kind: type[EverliftError]) -> None:
    def process(*_: object) -> ProcessedImages:
        raise raised

    queue = ImageQueue(process)
    results: asyncio.Queue[ProcessedImages | EverliftError] = asyncio.Queue()
    queue.process(sequence([1], images=(IMAGE,)), wanted, results.put_nowait)
    assert type(await results.get()) is kind
    queue.close()
