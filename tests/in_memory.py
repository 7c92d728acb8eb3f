"""Bytes of a file that is none, as plsc.storage.blocks.Bytes."""

from __future__ import annotations


class InMemory:
    location = "train"

    def __init__(self, content: bytes) -> None:
        self.content, self.size = content, len(content)

    def read_at(self, offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= self.size
        return self.content[offset : offset + length]
