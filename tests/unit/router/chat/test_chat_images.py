"""Images in the messages of chats, and how chat templates receive them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everlift.errors import InvalidRequest, OutOfRange, UnsupportedContent
from everlift.images import Image
from router.chat.conversation import Turn
from router.chat.images import data_url, image_of_base64, image_of_url, num_image_characters
from router.chat.messages import MAX_BYTES, chat_turns, template_messages
from router.chat.templates import ChatTemplate
from tests.support.images import png, png_header, png_url

DATA = png(1)
IMAGE = Image.checked(DATA, "image")
URL = png_url(DATA)
TURN = Turn("user", ("a", IMAGE, "b"))
LOOP = (
    "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
    "{% endfor %}"
)
MIXED = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text or part.type }}){% endfor %}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{% if 'x' in m['content'] %}{% endif %}{{ m['content'] }}{% endfor %}"
)


def message(*parts: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(parts)}]


def part(url: object = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def test_image_parts_become_images() -> None:
    texts = ({"type": "text", "text": "a"}, {"type": "text", "text": "b"})
    [turn] = chat_turns(message(texts[0], part(), texts[1]))
    assert turn == TURN
    assert turn.images == (IMAGE,) and turn.images[0].data == DATA
    assert turn.text == "a\nb"


def test_input_image_becomes_an_image() -> None:
    [turn] = chat_turns(message({"type": "input_image", "image_url": URL}))
    assert turn == Turn("user", (IMAGE,))


def test_data_url_of_an_image_is_read_back() -> None:
    assert data_url(IMAGE) == URL
    assert image_of_url("at", data_url(IMAGE)) == IMAGE


@pytest.mark.parametrize(
    ("url", "error", "cause"),
    [
        (None, InvalidRequest, "must be a string"),
        ("https://a.b/c.png", UnsupportedContent, "the router fetches no files"),
        ("file:///etc/passwd", UnsupportedContent, "must be a data URL"),
        ("data:image/png,abc", UnsupportedContent, "must be a data URL"),
        ("data:" + "x" * 500 + ";base64,", UnsupportedContent, "must be a data URL"),
        ("data:image/png;base64,", InvalidRequest, "no supported format"),
        ("data:image/png;base64,@@@@", InvalidRequest, "not valid base64"),
        (URL[:-1], InvalidRequest, "not valid base64"),
        (URL + "é", InvalidRequest, "not valid base64"),
        (URL.replace("png", "gif"), InvalidRequest, "is of the type image/png"),
        (png_url(png_header(50_000, 50_000)), OutOfRange, "50000 x 50000 pixels"),
    ],
)
def test_invalid_image_url_is_refused(url: object, error: type[InvalidRequest], cause: str) -> None:
    with pytest.raises(error, match=cause) as caught:
        chat_turns(message(part(url)))
    assert type(caught.value) is error
    assert caught.value.field == "messages[0].content[0].image_url.url"


def test_jpg_is_a_name_of_jpeg() -> None:
    data = b"\xff\xd8\xff\xc0\x00\x11\x08\x00\x1e\x00\x28" + bytes(10)
    url = data_url(Image.checked(data, "image"))
    assert image_of_url("at", url.replace("jpeg", "jpg")).data == data


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (message({"type": "image_url", "image_url": "x"}), "messages[0].content[0].image_url"),
        (message({"type": "input_image", "file_id": "f"}), "messages[0].content[0].file_id"),
        (message(part(), role="system"), "messages[0].content[0]"),
        (message(part(), role="assistant"), "messages[0].content[0]"),
        (message({"type": "input_audio"}), "messages[0].content[0]"),
    ],
)
def test_image_part_of_another_form_is_refused(messages: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_turns(messages)
    assert caught.value.field == field


def test_base64_must_be_a_string() -> None:
    with pytest.raises(InvalidRequest, match="must be a string"):
        image_of_base64("at", "image/png", 5)


def test_size_of_messages_leaves_out_images() -> None:
    large = png_url(png_header(1, 1) + bytes(MAX_BYTES))
    [turn] = chat_turns(message(part(large)))
    assert len(turn.images[0].data) > MAX_BYTES
    assert num_image_characters([part(large)]) == len(large) + len("image_url") + len("low")
    with pytest.raises(OutOfRange, match="bytes; at most"):
        chat_turns(message(part(), {"type": "text", "text": "a" * MAX_BYTES}))


def test_templates_receive_parts_of_turns_with_images() -> None:
    first, second = template_messages([TURN, Turn("user", ("c", "d"))])
    assert first["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "text", "text": "b"},
    ]
    assert second["content"] == "c\nd"


@pytest.mark.parametrize(
    ("template", "texts", "mixed"),
    [(LOOP, "cd", "abcd"), (MIXED, "c\nd", "(a)(image)(b)c\nd"), (PLAIN, "c\nd", None)],
)
async def test_template_that_reads_parts_receives_them(
    tmp_path: Path, template: str, texts: str, mixed: str | None
) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    try:
        plain = Turn("user", ("c", "d"))
        assert await loaded.render([plain], None) == texts
        if mixed is not None:
            assert await loaded.render([TURN, plain], None) == mixed
    finally:
        await loaded.close()


async def test_template_for_tools_may_read_texts_only(tmp_path: Path) -> None:
    named = [{"name": "default", "template": LOOP}, {"name": "tool_use", "template": PLAIN}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    try:
        plain = [Turn("user", ("c", "d"))]
        assert await loaded.render(plain, None) == "cd"
        assert await loaded.render(plain, [{"type": "function"}]) == "c\nd"
    finally:
        await loaded.close()
