"""Messages about unusable data: what is wrong, where, and what to do."""

from __future__ import annotations

import io
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plsc.cli import main


def parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"image": [b"image"] * 50, "label": list(range(50))}), file)
    return file.getvalue()


def tar(label: str = "cls") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in (("1.jpg", b"image"), (f"1.{label}", b"7")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


ROW = '{"image": "a.jpg", "label": 1}\n'
CASES = [
    # name, content, expected message: about the file, and what to do
    ("a.parquet", parquet()[:500], " is damaged or not a Parquet file (", ""),
    ("a.parquet", b"hello", " is damaged or not a Parquet file (", ""),
    ("a.tar", tar()[:514], " is truncated in '1.jpg'", ""),
    ("a.tar", tar()[:1500], " is truncated, damaged, compressed or not a tar (", ""),
    ("a.tar", b"\x1f\x8b" * 400, " is truncated, damaged, compressed or not a tar (", ""),
    ("a.tar", tar("txt"), ":1 has no label", "label_column"),
    ("a.jsonl", ROW + '{"image": "a', ":2: ", "JSON"),
    ("a.jsonl", ROW + '{"image": "a"}', ":2: ", "'label'"),
    ("a.jsonl", '{"image":\n' + ROW, ": the first line: ", "JSON"),
    ("a.csv", b"\xff,label\n1,2\n", ": the first line: ", "UTF-8"),
    ("mk.py", "print()\n", " is of no known format", ".parquet"),
    ("LICENSE", "text", " is of no known format", "label.txt"),
    ("label.txt", "a.jpg 1\n", " is of no known format", "a folder with label.txt"),
    ("gone", None, " does not exist", "expected a folder with label.txt"),
]


@pytest.mark.parametrize(("name", "content", "problem", "advice"), CASES)
def test_errors_about_a_dataset_name_the_location_and_what_to_do(
    tmp_path, capsys, name, content, problem, advice
):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["data", "inspect", str(path)]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{path}{problem}" in error.replace("\\n", "")
    assert advice in error
