"""Give up on a call that shows no sign of life: a server may take a connection and never answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")
_LOOK_SECONDS = 0.5


class Pulse:
    """Told of each piece that arrives; remembers when the last one did, and passes on how large it was."""

    def __init__(self, on_bytes: Callable[[int], None] | None = None) -> None:
        self.last = time.monotonic()
        self._on_bytes = on_bytes
        self._count = 0

    def begin(self) -> None:
        """A try begins: what moved in an earlier one is taken back."""
        self.beat(-self._count)

    def beat(self, count: int) -> None:
        """`count` more bytes have moved."""
        self.last = time.monotonic()
        self._count += count
        if self._on_bytes is not None and count:
            self._on_bytes(count)

    def end(self, total: int) -> None:
        """All `total` bytes have moved, whether the client told of them or not."""
        self.beat(total - self._count)


def watched(call: Callable[[], Answer], silence: float, pulse: Pulse | None = None) -> Answer:
    """Return ``call()``, made in a thread of its own; TimeoutError after `silence` seconds without a beat.

    The thread of a call that was given up stays behind, as nothing can end it; it keeps no process alive.
    """
    pulse = pulse or Pulse()
    pulse.begin()
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="plsc-store")
    thread.start()
    while True:
        thread.join(_LOOK_SECONDS)
        if outcome:
            value, error = outcome[0]
            if error is not None:
                raise error
            return value
        if not thread.is_alive() and not outcome:
            raise RuntimeError("the call ended without an outcome")
        if time.monotonic() - pulse.last > silence:
            raise TimeoutError(f"no answer for {silence:g} s")
