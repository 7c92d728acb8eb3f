"""``python -m plsc.cli`` is the plsc command, for torchrun."""

import sys

from plsc.cli import main

if __name__ == "__main__":
    sys.exit(main())
