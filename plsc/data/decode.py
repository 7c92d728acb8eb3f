"""Decode the image of a sample to the network's input size.

JPEG is decoded by simplejpeg (libjpeg-turbo), twice as fast as Pillow, and directly into the batch if the
size matches. Pillow decodes all other formats. torchvision's decoders are not used: its decode_png crashes
the process (segmentation fault, seen with 0.29) on a damaged PNG.

Encoded images are turned upright by their EXIF orientation here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image as PillowImage
from PIL import ImageFile, UnidentifiedImageError
from simplejpeg import decode_jpeg, decode_jpeg_header

from plsc.data.alignment import ALIGNED_SIZE, Face, align
from plsc.errors import DataError
from plsc.values import NO_IMAGE

Image: TypeAlias = bytes | np.ndarray | torch.Tensor | PillowImage.Image | Face
ImageShape: TypeAlias = tuple[int, int, int]

MAX_FILE_BYTES = 64 * 2**20
MAX_PIXELS = 64 * 10**6
# An explicit list: Pillow's decoders for other formats, such as EPS, start other programs.
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".jfi", ".pjpeg", ".pjp", ".mpo"),
    "PNG": (".png", ".apng"),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
}
if importlib.util.find_spec("PIL._avif") is None:  # before Pillow 11.3, and on some platforms
    del _SUFFIXES["AVIF"]
PILLOW_FORMATS = tuple(_SUFFIXES)
IMAGE_SUFFIXES = tuple(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
# Each scan of a progressive JPEG processes the whole image: a small file could take hours.
MAX_SCANS = 200
_USUAL_SCANS = 16  # of the largest photo
_USUAL_HEADERS = 4096  # bytes in which the frame header is searched
_MOST_NORMALISED = 64.0
_SMALL = 2**14  # a smaller file cannot have enough scans or segments to matter
# libjpeg's warnings for complete images; all other warnings mean that data is missing or wrong.
_FOR_PILLOW = ("Unknown Adobe color transform", "Invalid SOS parameters")
_SURPLUS = re.compile(r"(\d+) extraneous bytes before marker 0x(?!d[0-7])(\w\w)")  # and not within a scan
# Some encoders add a few bytes, or zeros, after a scan. More are left over if damage derails the decoder.
_MOST_SURPLUS = 64
_NEEDED = {*range(0xFFC0, 0xFFE0), 0xFFEE}  # markers of the segments that change the pixels
_JFIF = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0"
_EXIF = b"Exif\0\0"
_SCAN = 0xFFDA
_WITH_CONTENT = {*range(0xFFC0, 0xFFD0), *range(0xFFD8, 0xFFFF)} - {_SCAN}  # markers
# By byte order: the start of an entry (the tag 0x0112, the type SHORT and the count 1), and its numbers.
_TIFF_ORDERS = (
    (b"\x12\1\3\0\1\0\0\0", struct.Struct("<I").unpack_from, struct.Struct("<H").unpack_from),
    (b"\1\x12\0\3\0\0\0\1", struct.Struct(">I").unpack_from, struct.Struct(">H").unpack_from),
)
_unpack_segment = struct.Struct(">HH").unpack_from  # marker, and length without the marker
_MOST_SEGMENTS = 10_000  # before the first scan, or chunks: bounds the time for a hostile file


def decode_into(data: Image, out: np.ndarray) -> torch.Tensor | None:
    """Decode into ``out``, uint8 [H, W, C], contiguous; otherwise as `decode_image`.

    Returns None if the pixels are in ``out``; otherwise the image, which is float32 [C, H, W]. After an error
    the content of ``out`` is undefined.
    """
    height, width, channels = out.shape
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape == out.shape:
        np.copyto(out, data)
        return None
    if isinstance(data, bytes) and decode_jpeg_of_size(data, out):
        return None
    image = decode_image(data, (channels, height, width))
    if image.is_floating_point():
        return image
    np.copyto(out, image.numpy().transpose(1, 2, 0))
    return None


def decode_image(data: Image, image_shape: ImageShape) -> torch.Tensor:
    """Return the image as a tensor ``image_shape`` = [C, H, W]: uint8, or float32 if it was float.

    The result shares no memory with ``data``.

    Args:
        data: an encoded file (bytes), a `Face`, which is aligned instead of resized, a Pillow image, an array
            (uint8 [H, W, C] or [H, W], or float [C, H, W]) or a tensor (uint8 or float, [C, H, W] or [H, W]).
            Files, and Pillow images as `PIL.Image.open` returns them, are turned upright by their EXIF
            orientation; landmarks are those of the upright image.
        image_shape: C = 3 gives RGB and C = 1 gray. Encoded and Pillow images are converted (transparency
            over white, 16-bit gray to its upper 8 bits); arrays and tensors must have C channels. Other
            sizes are resized, bilinear with antialiasing.

    Raises:
        DataError: the image is empty, damaged, truncated, not an image, over 64 MiB encoded or 64 megapixels,
            of the wrong number of channels, or has NaN or infinity. The caller adds the name of the image.
    """
    channels, height, width = image_shape
    image = _decode(data.image if isinstance(data, Face) else data, channels)
    if isinstance(data, Face):
        pixels = image.permute(1, 2, 0).numpy()
        return _channels_first(align(pixels, np.array(data.landmarks), height, width))
    if image.shape[1:] == (height, width):
        return image
    if image.shape[1] * width > MAX_PIXELS:  # torch resizes the width first: 15 GB for 1 x 32 million pixels
        size = height, image.shape[2]
        image = F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
    return F.interpolate(image[None], size=(height, width), mode="bilinear", antialias=True)[0]


def _decode(data: Image, channels: int) -> torch.Tensor:
    """Return the image with its own size, uint8 or float32 [C, H, W], after all checks."""
    if isinstance(data, (bytes, bytearray, memoryview, PillowImage.Image)):
        if channels not in (1, 3):
            raise DataError(f"an image gives 1 or 3 channels, but model.image_shape requests {channels}")
        with _decoding(data):
            if isinstance(data, PillowImage.Image):
                image = _decode_pillow(data, channels)
            else:
                _check_file(data := bytes(data))
                is_jpeg = data.startswith(b"\xff\xd8")
                image = _decode_jpeg(data, channels) if is_jpeg else _decode_pillow(_open(data), channels)
    else:
        image = _from_pixels(data)
    if image.shape[0] != channels:
        raise DataError(
            f"the image has {image.shape[0]} channels (shape {tuple(image.shape)}); expected {channels}"
        )
    check_normalised(image)
    return image


def check_normalised(image: torch.Tensor) -> None:
    """Raise DataError for a float image with NaN, or in 0..255, because float images are used unchanged."""
    if not image.is_floating_point() or not image.numel():
        return
    if not bool(torch.isfinite(image).all()):
        raise DataError("the image contains nan or inf; fix it", kind="not finite")
    if image.min() >= 0 and image.max() > _MOST_NORMALISED:
        raise DataError(
            f"the image has float values up to {float(image.max()):g}, but floats must be normalised, as by "
            "(image - 127.5) / 128"
        )


def decode_whole(data: Image) -> torch.Tensor:
    """Return an image in RGB and its own size, uint8 or float32 [3, H, W]; a face aligned, as 112x112."""
    return decode_image(data, (3, *ALIGNED_SIZE)) if isinstance(data, Face) else _decode(data, 3)


def count_pixels(data: bytes, most: int, allows_slow: bool = True) -> int:
    """Return the number of pixels of an encoded image, from its header; raise DataError if over ``most``.

    allows_slow: accept what takes long to decode: a JPEG of many scans, each of which has all pixels, and
    what Pillow decodes in Python, such as a PPM of maximum 254.
    """
    _check_file(data)
    with _decoding(data), _open(data) as picture:
        (width, height), decoders = picture.size, {tile[0] for tile in picture.tile}
    scans = data.count(b"\xff\xda") if data.startswith(b"\xff\xd8") else 1
    is_slow = decoders & PillowImage.DECODERS.keys() or scans * width * height > _USUAL_SCANS * most
    if width * height > most:
        raise DataError(f"the image has {width}x{height} pixels, over the limit of {most}")
    if is_slow and not allows_slow:
        raise DataError("the image takes long to decode, like a PPM of maximum 254 or a JPEG of many scans")
    return width * height


@contextlib.contextmanager
def _decoding(data: Image) -> Iterator[None]:
    """Convert all exceptions of a decoder to DataError; decoders raise anything for damaged data."""
    try:
        yield
    except DataError:
        raise
    except PillowImage.DecompressionBombError as error:
        raise DataError(str(error), kind="too large") from None
    except Exception as error:
        reason = " ".join(str(error).split()).removeprefix("tjDecompressHeader3(): ")
        text = f"the image seems damaged or truncated ({reason}); view it, then save it again or remove it"
        if isinstance(error, UnidentifiedImageError) and isinstance(data, bytes):
            text = (
                f"the image is not readable; expected {', '.join(PILLOW_FORMATS)}, "
                f"got {len(data)} bytes that start with {data[:12]!r}"
            )
        raise DataError(text, kind="undecodable") from error


def _open(data: bytes) -> PillowImage.Image:
    """Open an image in Pillow, a JPEG without its EXIF data, of which Pillow 12 makes gigabytes."""
    plain = _without_metadata(data) if data.startswith(b"\xff\xd8") else data
    at, count = 8, 0
    while data.startswith(b"\x89PNG") and at + 8 < len(data):  # Pillow takes microseconds for each chunk
        at, count = at + 12 + int.from_bytes(data[at : at + 4], "big"), count + 1
        if count > _MOST_SEGMENTS:
            raise DataError(f"the image is a PNG of over {_MOST_SEGMENTS} chunks; save it again")
    return PillowImage.open(io.BytesIO(plain), formats=PILLOW_FORMATS)


def check_image_bytes(length: int) -> None:
    """Raise DataError, without the image's name, for an encoded image of 0 bytes or over 64 MiB."""
    if not 0 < length <= MAX_FILE_BYTES:
        kind = "empty" if length <= 0 else "too large"
        raise DataError(f"the image is {kind}: {length} bytes; expected 1 to {MAX_FILE_BYTES}", kind=kind)


def _check_file(data: bytes) -> None:
    check_image_bytes(len(data))
    if len(data) < _SMALL or not data.startswith(b"\xff\xd8"):
        return
    if data.count(b"\xff\xda") > MAX_SCANS:
        text = f"the image is a JPEG of over {MAX_SCANS} scans; save it again"
        raise DataError(text, kind="undecodable")


def decode_jpeg_of_size(data: bytes, out: np.ndarray) -> bool:
    """Decode a complete JPEG of the size of ``out``, uint8 [H, W, C]; return whether the data is one.

    libjpeg cannot write beyond ``out``, and nothing of another size is decoded. Raises DataError for a file
    over the limits.
    """
    if not data.startswith(b"\xff\xd8"):
        return False
    _check_file(data)
    height, width = out.shape[:2]
    try:
        # Reading the header takes as long as everything else here and releases the interpreter lock, which
        # the thread may then have to wait for. Search the frame header instead: a wrong guess only costs one
        # failed decoding.
        frame = data.find(_frame_header(height, width), 0, _USUAL_HEADERS)
        if frame < 0 and decode_jpeg_header(data)[:2] != (height, width):
            return False
        if not _is_upright(data, frame):
            return False
        pixels = decode_jpeg(data, _colour_space(out.shape[2]), buffer=out)
    except Exception:  # damaged: decode_image reports the reason
        return False
    return bool(pixels.shape == out.shape)


@functools.lru_cache(maxsize=16)
def _frame_header(height: int, width: int) -> bytes:
    """Return the frame header of a JPEG of this size: 8 bits per sample, height and width (T.81, B.2.2)."""
    return struct.pack(">BHH", 8, height, width) if max(height, width) < 2**16 else b"no JPEG"


def _decode_jpeg(data: bytes, channels: int) -> torch.Tensor:
    try:
        pixels = _decode_strictly(data, channels)
    except ValueError:
        # libjpeg reports its first warning: without those of the header, that is one of the scans.
        plain = _without_metadata(data)
        try:
            pixels = _decode_strictly(plain, channels)
        except ValueError as error:
            warning = str(error)
            surplus = _SURPLUS.search(warning)
            count = int(surplus[1]) if surplus else 0
            is_few = surplus and (
                count <= _MOST_SURPLUS or bytes(count) + bytes.fromhex(f"ff{surplus[2]}") in plain
            )
            if not is_few and not any(text in warning for text in _FOR_PILLOW):
                raise
            # Pillow ignores warnings, but not a file that ends too early.
            pixels = _pixels_of(_open(plain), channels)
    return _channels_first(_upright(pixels, _orientation_of(data)))


def _decode_strictly(data: bytes, channels: int) -> np.ndarray:
    """Return the pixels as stored, uint8 [H, W, C]; ValueError for an error or a warning of libjpeg."""
    height, width = decode_jpeg_header(data)[:2]
    _check_size(width, height)
    # A buffer of the checked size: a second header in the file cannot request more.
    pixels = np.empty((height, width, channels), dtype=np.uint8)
    if decode_jpeg(data, _colour_space(channels), buffer=pixels).shape != pixels.shape:
        raise ValueError("it has two frame headers")
    return pixels


def _without_metadata(data: bytes) -> bytes:
    """Return a JPEG without all that its pixels do not depend on before the first scan."""
    parts = [b"\xff\xd8"]
    for marker, at, end in _segments(data):
        if marker in _NEEDED:
            parts.append(data[at : len(data) if marker == _SCAN else end])
        elif marker == 0xFFE0 and data.startswith(b"JFIF\0", at + 4):
            parts.append(_JFIF)
    return b"".join(parts)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of the segments of a JPEG up to its first scan."""
    at = 2
    with contextlib.suppress(struct.error):  # the end
        for _ in range(_MOST_SEGMENTS):
            marker, length = _unpack_segment(data, at)
            yield marker, at, at + 2 + length
            if marker == _SCAN:
                return
            at = at + length + 2 if marker in _WITH_CONTENT else data.find(b"\xff", at + 1)


def _is_upright(data: bytes, frame: int) -> bool:
    """Return whether a JPEG needs no turn; its frame header is at ``frame``, or unknown (negative)."""
    # Looking at each segment takes two microseconds, but few files have EXIF data before the first scan.
    if frame >= 0 and data.find(_EXIF, 0, frame) < 0 > data.find(_EXIF, frame, data.find(b"\xff\xda", frame)):
        return True
    return _orientation_of(data) == 1


def _orientation_of(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8."""
    for marker, at, end in _segments(data):
        if marker == 0xFFE1 and data.startswith(_EXIF, at + 4):
            return _orientation(data[at + 4 : end])
    return 1


def _orientation(exif: bytes) -> int:
    """Return the orientation in EXIF data, 1 to 8; 1 if there is none (EXIF 2.32, 4.6.4, as in TIFF 6.0)."""
    tiff = exif.removeprefix(_EXIF)
    entry, unpack_long, unpack_short = _TIFF_ORDERS[tiff.startswith(b"MM")]
    try:
        first = unpack_long(tiff, 4)[0] + 2
        end = first + 12 * unpack_short(tiff, first - 2)[0]
        at = tiff.find(entry, first, end)
        while at >= 0 and (at - first) % 12:  # within another entry
            at = tiff.find(entry, at + 1, end)
        value = unpack_short(tiff, at + 8)[0] if at >= 0 else 1
    except struct.error:  # the end
        return 1
    return value if 1 <= value <= 8 else 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return a view of pixels, [H, W] or [H, W, C], turned and mirrored as the EXIF orientation says."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    down, right = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return pixels[:: -1 if down else 1, :: -1 if right else 1]


def _colour_space(channels: int) -> str:
    return "RGB" if channels == 3 else "GRAY"


def _pixels_of(picture: PillowImage.Image, channels: int) -> np.ndarray:
    """Return the pixels as stored, uint8 [H, W, 3] or [H, W]."""
    _check_size(*picture.size)
    picture.load()
    return np.array(_to_8_bit(picture).convert("RGB" if channels == 3 else "L"))


def _decode_pillow(picture: PillowImage.Image, channels: int) -> torch.Tensor:
    pixels = _pixels_of(picture, channels)
    # Pillow turns a TIFF itself. Other Pillow images may have been turned since their file was opened.
    exif = picture.info.get("exif", b"") if isinstance(picture, ImageFile.ImageFile) else b""
    return _channels_first(_upright(pixels, _orientation(exif)))


def _to_8_bit(picture: PillowImage.Image) -> PillowImage.Image:
    mode = picture.mode
    if mode.startswith("I;16") or (mode == "I" and picture.format in ("PNG", "PPM")):
        return PillowImage.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if mode in ("I", "F"):
        raise DataError(f"the image has 32-bit pixels (mode {mode}) of unknown range; convert it to 8 bit")
    if "transparency" not in picture.info and mode not in ("RGBA", "LA", "PA", "RGBa", "La"):
        return picture
    if mode == "La":
        picture = picture.convert("LA")
    layer = picture.convert("RGBA")
    white = PillowImage.new("RGBA", layer.size, (255, 255, 255, 255))
    return PillowImage.alpha_composite(white, layer)


def _from_pixels(data: Any) -> torch.Tensor:
    """Return the image in an array (uint8 [H, W, C] or [H, W], or floats [C, H, W]) or a tensor."""
    dtype, shape = str(getattr(data, "dtype", "")).removeprefix("torch."), list(getattr(data, "shape", ()))
    is_known = isinstance(data, (np.ndarray, torch.Tensor)) and (dtype == "uint8" or "float" in dtype)
    if not is_known or len(shape) not in (2, 3):
        raise DataError(
            "expected encoded bytes, a Pillow image, an array of uint8 [H, W, C] or floats [C, H, W], or a "
            f"tensor [C, H, W]; got {type(data).__name__} {dtype} {shape}{NO_IMAGE}"
        )
    if isinstance(data, np.ndarray) and dtype == "uint8":
        _check_size(shape[1], shape[0])
        return _channels_first(data)
    tensor = torch.from_numpy(data.astype(np.float32)) if isinstance(data, np.ndarray) else data
    image = tensor[None] if tensor.ndim == 2 else tensor
    _check_size(image.shape[2], image.shape[1])
    kind = torch.uint8 if image.dtype == torch.uint8 else torch.float32
    return image.detach().cpu().to(kind, copy=True, memory_format=torch.contiguous_format)


def _channels_first(pixels: np.ndarray) -> torch.Tensor:
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C", copy=True))


def _check_size(width: int, height: int) -> None:
    if not (width > 0 and 0 < width * height <= MAX_PIXELS):
        raise DataError(
            f"the image has {width}x{height} pixels; expected up to {MAX_PIXELS // 10**6} megapixels",
            kind="too large" if width * height > 0 else "undecodable",
        )
