"""What was seen while the inputs were read."""

from __future__ import annotations

from dataclasses import dataclass, field

from plsc.data.partition.inputs import Input

_SHOWN = 20


@dataclass
class InputCount:
    """Of one input: samples, blank and skipped lines, bytes and checksum of its (decompressed) content."""

    source: Input
    lines: int = 0
    blanks: int = 0
    skipped: int = 0
    content_bytes: int = 0
    checksum: int = 0

    def add(self, more: InputCount) -> None:
        """Add what another piece of the same input holds."""
        self.lines += more.lines
        self.blanks += more.blanks
        self.skipped += more.skipped
        self.content_bytes += more.content_bytes
        self.checksum = (self.checksum + more.checksum) % 2**64


@dataclass
class Counts:
    """Of all inputs, in their order; `messages` tells of the first bad lines that were skipped."""

    inputs: list[InputCount] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """Samples of all inputs."""
        return sum(one.lines for one in self.inputs)

    @property
    def blanks(self) -> int:
        """Blank lines, which were left out."""
        return sum(one.blanks for one in self.inputs)

    @property
    def skipped(self) -> int:
        """Bad lines, which were left out because that was asked for."""
        return sum(one.skipped for one in self.inputs)

    def remember(self, messages: list[str]) -> None:
        """Keep the first few messages about skipped lines."""
        self.messages += messages[: max(0, _SHOWN - len(self.messages))]
