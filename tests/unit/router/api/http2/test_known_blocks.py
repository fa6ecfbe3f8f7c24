"""HPACK decoder of the server, which caches the header blocks that clients repeat."""

from __future__ import annotations

import random

from hpack import Decoder, Encoder

from router.api.http2.heads import KnownBlocks

HEADERS = [
    (b":method", b"POST"),
    (b":path", b"/everlift.v1.Inference/Generate"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]


def test_known_blocks_reuse_a_block_of_indexed_fields() -> None:
    encoder, decoder = Encoder(), KnownBlocks(1 << 16)
    first = encoder.encode(HEADERS)
    assert list(decoder.decode(first, raw=True)) == HEADERS
    again = encoder.encode(HEADERS)
    assert again != first
    headers = decoder.decode(again, raw=True)
    assert list(headers) == HEADERS
    assert decoder.decode(encoder.encode(HEADERS), raw=True) is headers


def test_known_blocks_follow_changes_of_the_table() -> None:
    encoder, decoder = Encoder(), KnownBlocks(1 << 16)
    decoder.decode(encoder.encode([(b"x-one", b"1")]), raw=True)
    block = encoder.encode([(b"x-one", b"1")])
    assert list(decoder.decode(block, raw=True)) == [(b"x-one", b"1")]
    decoder.decode(encoder.encode([(b"x-two", b"2")]), raw=True)
    # The newest entry has the lowest number.
    assert list(decoder.decode(block, raw=True)) == [(b"x-two", b"2")]


def test_known_blocks_decode_as_hpack_does() -> None:
    chance = random.Random(7)
    encoder, plain, known = Encoder(), Decoder(1 << 16), KnownBlocks(1 << 16)
    same = 0
    for _ in range(3000):
        headers = [
            (b"x-%d" % chance.randrange(6), b"v" * chance.choice((1, 3, 900)))
            for _ in range(chance.randrange(1, 5))
        ]
        block = encoder.encode(headers, huffman=chance.random() < 0.5)
        expected = list(plain.decode(block, raw=True))
        found = known.decode(block, raw=True)
        assert list(found) == expected == headers
        same += all(0x80 < byte < 0xFF for byte in block)
    assert same > 200


def test_known_blocks_are_bounded() -> None:
    encoder, decoder = Encoder(), KnownBlocks(1 << 16)
    names = [b"x-%d" % n for n in range(12)]
    for name in names:
        decoder.decode(encoder.encode([(name, b"")]), raw=True)
    for one in names:
        for other in names:
            decoder.decode(encoder.encode([(one, b""), (other, b"")]), raw=True)
    assert len(decoder._known) == 64
