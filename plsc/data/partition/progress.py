"""How far it is, at what rate, and how long it will take."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


class Progress:
    """A bar on a terminal, nothing elsewhere. Threads may add at once."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._lock = threading.Lock()

    def begin(self, what: str, total: int | None) -> None:
        """Start a stage of `total` bytes; None if that is not known."""
        self._close()
        if sys.stderr.isatty():
            from tqdm import tqdm  # not needed otherwise, and not quick to import

            self._bar = tqdm(
                total=total,
                desc=what,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                dynamic_ncols=True,
            )

    def add(self, count: int) -> None:
        """Count bytes of the stage."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(count)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
