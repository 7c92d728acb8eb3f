#!/usr/bin/env python3
"""Write small .rec and .idx files with the real mxnet, to test our reader and writer against it.

mxnet 1.9.1 needs numpy 1.23.5, so it gets an environment of its own (kept in the cache folder):

    python tools/make_mxnet_fixture.py FOLDER
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = ("mxnet==1.9.1", "numpy==1.23.5")

# Runs where mxnet is. The magic number lies at multiples of 4 and beside them: records of several parts.
WRITE = r"""
import json, struct, sys
import numpy as np
from mxnet import recordio

folder = sys.argv[1]
magic = struct.pack("<I", 0xCED7230A)
numbers = np.random.RandomState(0)
images = [numbers.bytes(n) for n in (1, 2, 3, 4, 5, 4000, 70001)]
images += [magic, magic * 3, b"abcd" + magic + b"efgh", b"ab" + magic + b"cdefgh", b"abcd" + magic]
images += [magic + numbers.bytes(997) + magic + numbers.bytes(2), numbers.bytes(512) + magic * 2 + b"x"]
labels = [(7 * i) % 5 for i in range(len(images))]

def indexed(name):
    return recordio.MXIndexedRecordIO(f"{folder}/{name}.idx", f"{folder}/{name}.rec", "w")

plain = indexed("plain")
several = indexed("several")
backwards = indexed("backwards")
for i, (image, label) in enumerate(zip(images, labels)):
    plain.write_idx(i, recordio.pack(recordio.IRHeader(0, float(label), i, 0), image))
    several.write_idx(i, recordio.pack(recordio.IRHeader(0, [label, 0.5, -3.0], i, 0), image))
    backwards.write_idx(100 - i, recordio.pack(recordio.IRHeader(0, float(label), i, 0), image))
unindexed = recordio.MXRecordIO(f"{folder}/unindexed.rec", "w")
for i, (image, label) in enumerate(zip(images, labels)):
    unindexed.write(recordio.pack(recordio.IRHeader(0, float(label), i, 0), image))

# insightface: record 0 ends the images and the persons, who follow the images.
people = sorted(set(labels))
order = sorted(range(len(images)), key=lambda i: labels[i])
first_person = len(images) + 1
faces = indexed("insightface")
header = recordio.IRHeader(2, [first_person, first_person + len(people)], 0, 1)
faces.write_idx(0, recordio.pack(header, b""))
for key, i in enumerate(order, start=1):
    faces.write_idx(key, recordio.pack(recordio.IRHeader(0, float(labels[i]), key, 0), images[i]))
for number, person in enumerate(people):
    keys = [key for key, i in enumerate(order, start=1) if labels[i] == person]
    header = recordio.IRHeader(2, [keys[0], keys[-1] + 1], first_person + number, 1)
    faces.write_idx(first_person + number, recordio.pack(header, b""))
for file in (plain, several, backwards, unindexed, faces):
    file.close()
with open(f"{folder}/expected.json", "w") as file:
    json.dump({"images": [image.hex() for image in images], "labels": labels, "order": order}, file)
"""


def main() -> int:
    """Write the files; 1, and why, when mxnet cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write; made if need be")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        python = environment()
        subprocess.run([python, "-c", WRITE, str(folder)], check=True, env=own_environment())
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"mxnet cannot be had: {error}", file=sys.stderr)
        return 1
    return 0


def environment() -> Path:
    """Return the Python of an environment with mxnet, made the first time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / f"plsc-mxnet-{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, clear=True, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *PACKAGES]
        subprocess.run(command, check=True, env=own_environment())
        (folder / "complete").touch()
    return python


def own_environment() -> dict[str, str]:
    """Return the environment variables without the caller's Python paths."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main())
