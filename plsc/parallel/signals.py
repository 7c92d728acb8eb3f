"""SIGINT and SIGTERM set a flag; the ranks agree on it at a step boundary, with a deadline."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Context manager that turns the first SIGINT or SIGTERM into a request to stop.

    `number` is the signal's, or 0. A second SIGINT raises KeyboardInterrupt at once. When the process is
    still inside the context `deadline_seconds` after the first signal, it is ended: a peer may be
    dead, and the collective that waits for it would never return. Outside the main thread, where Python
    delivers no signals, it does nothing.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self.number = 0
        self._deadline_seconds = deadline_seconds
        self._left = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs handlers between two bytecodes, so not while the main thread is inside a
        # collective. The wake-up descriptor is written by the C handler itself, at once.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_descriptor = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        threading.Thread(target=self._watch, daemon=True, name="plsc-deadline").start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._previous:
            return
        self._left.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        os.close(self._write_end)  # ends the watching thread, which closes its own end

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    def _watch(self) -> None:
        try:
            while received := os.read(self._read_end, 1):
                number = received[0]
                if number not in _SIGNALS:
                    continue
                if not self._left.wait(self._deadline_seconds):
                    print(
                        f"plsc: error: no step boundary within {self._deadline_seconds:g} s after "
                        f"{signal.Signals(number).name}; stopped without saving",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(128 + number)
                return
        finally:
            os.close(self._read_end)
