"""Adapters in settings, and their part in a request's salt and stored form."""

from __future__ import annotations

from pathlib import Path

import pytest

from everlift import model_files
from everlift.adapters import AdapterSource, parse_adapters
from everlift.hashes import chunk_hashes
from everlift.messages import Request, Submission
from everlift.v1 import inference_pb2 as pb


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sql=/adapters/sql", AdapterSource("sql", "/adapters/sql")),
        ("sql=org/lora", AdapterSource("sql", "org/lora")),
        ("sql=org/lora@v1", AdapterSource("sql", "org/lora", "v1")),
        ("org/sql:2=/a@b=c", AdapterSource("org/sql:2", "/a@b=c")),
    ],
)
def test_adapter_source_is_parsed(text: str, expected: AdapterSource) -> None:
    assert AdapterSource.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize("text", ["", "sql", "sql=", "=/a", "a b=/c", f"{'a' * 129}=/c"])
def test_adapter_source_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be NAME=DIRECTORY or NAME=ORG/NAME@REVISION"):
        AdapterSource.parse(text)


def test_directory_with_an_at_sign_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b@c").mkdir(parents=True)
    source = AdapterSource.parse("sql=a/b@c")
    assert not source.is_hub_id and source.absolute.location == str(tmp_path / "a" / "b@c")
    assert (source.absolute.root, AdapterSource.parse("x=org/y@z").root) == ("b@c", "org/y")


def test_repeated_adapter_name_is_refused() -> None:
    with pytest.raises(ValueError, match="names 'a' twice"):
        parse_adapters(["a=/x", "b=/x", "a=/y"])


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_file_of_an_adapter_is_named(missing: str, tmp_path: Path) -> None:
    for name in {"adapter_config.json", "adapter_model.safetensors"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(model_files.ModelUnavailable, match=f"no adapter at .*: {missing} is"):
        model_files.locate_adapter(AdapterSource("a", str(tmp_path)))


def submission(
    model: str = "",
    request_id: str = "r",
    salt: str = "",
    digest: str = "",
) -> Submission:
    message = pb.GenerateRequest(model=model, text="x", cache_salt=salt)
    return Submission.from_proto(message, request_id, 0, adapters={"a": digest, "b": digest})


def test_salt_depends_on_adapter_tenant_and_salt() -> None:
    given = [
        submission(model, request_id, salt, digest=digest)
        for model, digest in (("", ""), ("a", ""), ("b", ""), ("a", "1"), ("a", "2"), ("b", "1"))
        for request_id in ("r", "t/r")
        for salt in ("", "s", "s\0a", "\0a\0")
    ]
    salts = [each.salt for each in given]
    assert len({*salts}) == len(salts)
    prompt = range(300)
    assert len({chunk_hashes(prompt, salt)[0] for salt in salts}) == len(salts)
    assert submission("model").salt == submission().salt == b""


def test_adapter_is_kept_in_the_stored_request() -> None:
    assert (submission("a").adapter, submission("model").adapter) == ("a", "")
    request = Request(
        request_id="r",
        model="m",
        fingerprint="f",
        prompt_ids=(1,),
        max_tokens=1,
        sampling=submission().sampling,
        stop=(),
        stop_token_ids=(),
        on_disconnect=submission().on_disconnect,
        deadline=None,
        body_hash=b"",
        adapter="a",
        adapter_digest="d",
        adapter_source="a=/x",
    )
    assert Request.from_bytes(request.to_bytes()) == request
    assert request.served_model == "a"
