"""The fast CRC-32 is zlib's."""

from __future__ import annotations

import os
import zlib

from hypothesis import given
from hypothesis import strategies as st

from plsc.data import crc
from plsc.data.crc import crc32

DATA = os.urandom(9000)


@given(st.integers(0, 64), st.integers(0, 8900), st.integers(0, 2**32 - 1))
def test_pieces_of_every_length_place_and_beginning_have_zlibs_checksum(first, length, before):
    piece = memoryview(DATA)[first : first + length]
    assert crc32(piece, before) == zlib.crc32(piece, before)


def test_without_the_library_it_is_zlibs_too(monkeypatch):
    monkeypatch.setattr(crc, "function", lambda *_: None)
    assert crc32(DATA) == zlib.crc32(DATA)
