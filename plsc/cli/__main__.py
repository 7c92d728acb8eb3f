"""``python -m plsc.cli`` runs the plsc command, for use with torchrun."""

import sys

from plsc.cli import main

if __name__ == "__main__":
    sys.exit(main())
