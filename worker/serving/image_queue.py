"""Processing of the images of new sequences, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from everlift import logs
from everlift.errors import EngineFailed, EverliftError
from worker.engine.images import ImageProcessor, ProcessedImages
from worker.engine.sequence import Sequence

log = logs.get_logger(__name__)


class ImageQueue:
    """Queue of sequences whose images are processed, one sequence at a time.

    Its methods must be called in the event loop's thread, which also calls ``done``.
    """

    def __init__(self, process: ImageProcessor) -> None:
        self._process = process
        self._executor = ThreadPoolExecutor(1, "images")

    def process(
        self,
        sequence: Sequence,
        is_wanted: Callable[[], bool],
        done: Callable[[ProcessedImages | EverliftError], None],
    ) -> None:
        """Process the images of a sequence; call ``done`` later with the result or an error.

        The queue's thread calls ``is_wanted`` right before the processing. The images are not
        processed, and ``done`` is not called, if the result is False.
        """
        loop = asyncio.get_running_loop()

        def work() -> None:
            if not is_wanted():
                return
            result = self._result(sequence)
            loop.call_soon_threadsafe(done, result)

        self._executor.submit(work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _result(self, sequence: Sequence) -> ProcessedImages | EverliftError:
        prompt = sequence.tokens[: sequence.num_prompt]
        try:
            return self._process(prompt, sequence.images, sequence.salt)
        except EverliftError as error:
            return error
        except Exception:
            log.exception("images not processed", request_id=sequence.request_id)
            return EngineFailed("the images could not be processed")
