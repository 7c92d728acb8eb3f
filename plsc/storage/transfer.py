"""How far a transfer is, and how fast: a line now and then, and one at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SECONDS_BETWEEN = 10.0


class Transfer:
    """Counts the bytes of one rank's share of a transfer and tells of them.

    what: begins each line. total: bytes of this share. say: prints a line; None stays silent.
    """

    def __init__(self, what: str, total: int, say: Callable[[str], None] | None) -> None:
        self._what = what
        self._total = total
        self._say = say
        self._done = 0
        self._began = self._told = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """`count` more bytes have moved; from any thread."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            is_due = now - self._told >= _SECONDS_BETWEEN
            if is_due:
                self._told = now
        if is_due and self._say is not None:
            share = min(1.0, self._done / max(1, self._total))
            left = (self._total - self._done) / max(1.0, self.rate)
            self._say(
                f"{self._what}: {share:.0%} of {in_words(self._total)}, {in_words(self.rate)}/s, "
                f"{max(0.0, left):.0f} s left"
            )

    def end(self) -> None:
        """All has moved."""
        if self._say is not None:
            seconds = time.monotonic() - self._began
            self._say(
                f"{self._what}: {in_words(self._total)} in {seconds:.1f} s, {in_words(self.rate)}/s"
            )

    @property
    def rate(self) -> float:
        """Bytes a second so far."""
        return self._done / max(1e-3, time.monotonic() - self._began)


def in_words(count: float) -> str:
    """Return a number of bytes for people, such as ``1.4 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
