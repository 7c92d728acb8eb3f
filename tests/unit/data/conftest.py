import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def smooth_picture(seed: int, height: int = 24, width: int = 20) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    planes = [rows * 7 + seed * 31, columns * 9 + seed * 17, rows * 3 + columns * 4 + seed]
    return Image.fromarray((np.stack(planes, axis=-1) % 200 + 20).astype(np.uint8))


def encode(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def png_file(width: int, height: int, pixels: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def hostile_images() -> dict[str, bytes]:
    jpeg, png = (encode(smooth_picture(1), kind) for kind in ("JPEG", "PNG"))
    rows = b"".join(b"\0" + bytes(60) for _ in range(24))
    bad_checksum = bytearray(zlib.compress(rows))
    bad_checksum[-1] ^= 1
    frame = jpeg.index(b"\xff\xc0")
    return {
        "nothing": b"",
        "text": b"this is not an image\n",
        "jpeg cut in half": jpeg[: len(jpeg) // 2],
        "jpeg without its last byte": jpeg[:-1],
        "jpeg of two bytes": jpeg[:2],
        "png cut in half": png[: len(png) // 2],
        "png header only": png[:33],
        "png of 100000x100000": png_file(100_000, 100_000, zlib.compress(bytes(100))),
        "png of 9000x9000": png_file(9_000, 9_000, zlib.compress(bytes(100))),
        "png with a bad checksum inside": png_file(20, 24, bytes(bad_checksum)),
        "png with too few pixels": png_file(20, 24, zlib.compress(bytes(100))),
        "jpeg of 65000x65000": jpeg[: frame + 5] + b"\xfd\xe8" * 2 + jpeg[frame + 9 :],
        "jpeg with an odd header": jpeg[:11] + b"\x7f" + jpeg[12:21] + b"\1" + jpeg[22:],
        "jpeg of no height": jpeg[: frame + 5] + b"\0\0" + jpeg[frame + 7 :],
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
    }


@pytest.fixture
def label_folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes ``images/0.jpg``.. and label.txt, and returns the folder."""

    def make(count: int = 10, classes: int = 3) -> Path:
        folder = tmp_path / "train_data"
        (folder / "images").mkdir(parents=True)
        lines = []
        for index in range(count):
            data = encode(smooth_picture(index), "JPEG", quality=95)
            (folder / "images" / f"{index}.jpg").write_bytes(data)
            lines.append(f"images/{index}.jpg {index % classes}\n")
        (folder / "label.txt").write_text("".join(lines))
        return folder

    return make
