"""Damaged files of every container are read or refused; they neither crash nor exhaust memory."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plsc.data.writers import write_parquet, write_recordio, write_tar
from tests.distributed.launch import run_code

IMAGES = [b"image %d" % i * (i + 1) for i in range(10)]
SAMPLES = [(image, i % 4) for i, image in enumerate(IMAGES)]


def structs(location: str, samples: list[tuple[bytes, int]]) -> None:
    rows = [{"image": {"bytes": image, "path": "x"}, "label": label} for image, label in samples]
    pq.write_table(pa.Table.from_pylist(rows), location, row_group_size=3)


DAMAGE = """
import faulthandler, json, resource, sys
from pathlib import Path
import numpy as np
from plsc.data.sources import open_source
from plsc.errors import DataError, OptionError

def peak():  # KiB; not ru_maxrss, which starts at the peak of the parent
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

faulthandler.enable()
resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2)  # torch alone maps some
paths = [Path(path) for path in sys.argv[1:]]
good = {path: path.read_bytes() for path in paths}
rng = np.random.default_rng(0)
outcomes, start = {"read": 0, "refused": 0}, peak()
for turn in range(150):
    for path, content in good.items():
        bad, way = bytearray(content), rng.random()
        if way < 0.6:  # most of a Parquet file is images; its metadata is at the end
            low = max(len(bad) - 900, 0) if rng.random() < 0.6 and path.suffix == ".parquet" else 0
            for _ in range(rng.integers(1, 5)):
                bad[rng.integers(low, len(bad))] ^= 1 << rng.integers(8)
        elif way < 0.8:
            bad = bad[: rng.integers(len(bad))]
        else:
            place = rng.integers(len(bad) - 40)
            bad[place : place + 40] = rng.bytes(40)
        if path.suffix == ".tar" and turn % 2:  # valid checksums, so that later fields are parsed
            for at in range(0, len(bad) - 511, 512):
                if bad[at + 257 : at + 262] == b"ustar":
                    bad[at + 148 : at + 156] = b" " * 8
                    bad[at + 148 : at + 156] = b"%06o\\0 " % sum(bad[at : at + 512])
        path.write_bytes(bad if len(good) == 1 or rng.random() < 0.7 else content)
    if len(good) > 1 and rng.random() < 0.3:
        paths[1].unlink()
    try:
        source = open_source(paths[0])
    except (DataError, OptionError):
        outcomes["refused"] += 1
        continue
    outcomes["read"] += 1
    for index in range(len(source)):
        try:
            data, label = source[index]
            assert isinstance(data, bytes) and label >= 0
        except DataError:
            pass
print(json.dumps([*outcomes.values(), peak() - start]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "write"),
    [
        (["a.rec", "a.idx"], write_recordio), (["a.tar"], write_tar),
        (["a.parquet"], write_parquet), (["a.parquet"], structs),
    ],
)  # fmt: skip
def test_damaged_files_neither_crash_nor_exhaust_memory(tmp_path: Path, names, write):
    write(str(tmp_path / names[0]), SAMPLES)
    done = run_code(DAMAGE, *(str(tmp_path / name) for name in names))
    read, refused, kilobytes = json.loads(done.stdout)
    assert min(read, refused) > 5
    assert kilobytes < 2**20
