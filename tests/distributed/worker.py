"""How a script of several ranks ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def run_worker(main: Callable[[], None]) -> None:
    """Run `main`; a failure is shown and ends the process at once, as the other ranks may wait for it."""
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
