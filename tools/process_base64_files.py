"""Shuffle a base64 dataset over all its files and split it into one part a rank.

python tools/process_base64_files.py --data_dir ./dataset --file_list file_list.txt --nranks 8
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plsc.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "partition", *sys.argv[1:]]))
