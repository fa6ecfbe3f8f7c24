"""Messages that start the choices of a request to an ``LLM``."""

from __future__ import annotations

from cluster.llm.generation import Generation
from everlift.images import Image
from everlift.messages import OnDisconnect, Request
from everlift.sampling import SamplingParams
from router.requests.tokenizer import ByteTokenizer
from tests.support.images import png


def test_generation_starts_have_all_that_affects_the_output() -> None:
    image = Image.checked(png(1), "image")
    request = Request(
        request_id="r",
        model="m",
        fingerprint="",
        prompt_ids=(1, 2, 3),
        max_tokens=5,
        sampling=SamplingParams(seed=3, prompt_logprobs=1),
        stop=(),
        stop_token_ids=(7,),
        on_disconnect=OnDisconnect.CANCEL,
        deadline=None,
        body_hash=b"",
        salt=b"s",
        n=2,
        priority=4,
        session_id="chat",
        adapter="sql",
        adapter_digest="d",
        adapter_source="sql=org/sql",
        images=(image,),
    )
    first, second = Generation(9, request, ByteTokenizer()).starts()
    for start in (first, second):
        assert (start.epoch, start.request_id, start.salt) == (9, "r", b"s")
        assert (list(start.prompt_ids), start.max_tokens) == ([1, 2, 3], 5)
        assert (start.adapter, start.adapter_digest) == ("sql", "d")
        assert start.adapter_source == "sql=org/sql"
        assert (start.priority, start.session) == (4, request.session)
        assert [each.digest for each in start.images] == [image.digest]
    # Later choices share the files and the prompt's log probabilities of the first one.
    assert (first.images[0].data, second.images[0].data) == (image.data, b"")
    assert first.sampling.HasField("prompt_logprobs")
    assert not second.sampling.HasField("prompt_logprobs")
