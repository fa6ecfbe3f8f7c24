"""Stored form of files."""

from __future__ import annotations

import pytest

from router.api.openai.files.record import FileRecord, ResultChunk, pack, unpack


def test_file_record_is_restored_from_its_bytes() -> None:
    record = FileRecord("é.jsonl", "batch", 1, 2, 3, "digest", "content")
    assert FileRecord.from_bytes(record.to_bytes()) == record
    assert record.body("file-a") == {
        "id": "file-a",
        "object": "file",
        "bytes": 3,
        "created_at": 1,
        "expires_at": 2,
        "filename": "é.jsonl",
        "purpose": "batch",
        "status": "processed",
    }


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("output", "errors"), [(b"", b""), (b"a\n", b""), (b"a\n", b"b\n" * 999)])
def test_result_chunk_is_restored(output: bytes, errors: bytes, is_full: bool) -> None:
    chunk = ResultChunk(output, errors, is_full)
    assert ResultChunk.from_bytes(chunk.to_bytes()) == chunk
    assert chunk.num_bytes == len(output + errors)


def test_result_chunks_are_appended() -> None:
    assert ResultChunk(b"a", b"b") + ResultChunk(b"c", b"d") == ResultChunk(b"ac", b"bd")


def test_parts_of_files_are_compressed() -> None:
    assert unpack(pack(b"a" * 9999)) == b"a" * 9999 and len(pack(b"a" * 9999)) < 999
