import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, features

from plsc.data.decode import count_pixels, decode_image, decode_into, decode_whole
from plsc.errors import DataError
from tests.distributed.launch import run_code
from tests.unit.data.conftest import encode, hostile_images, smooth_picture

SHAPE = (3, 24, 20)
HOSTILE = hostile_images()


def channels_first(picture: Image.Image) -> torch.Tensor:
    pixels = np.array(picture)
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1).copy())


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "GIF"])
def test_a_lossless_file_gives_its_pixels(kind):
    picture = smooth_picture(3).quantize(16) if kind == "GIF" else smooth_picture(3)
    options = {"lossless": True} if kind == "WEBP" else {}
    decoded = decode_image(encode(picture, kind, **options), SHAPE)
    assert torch.equal(decoded, channels_first(picture.convert("RGB")))


def test_transparency_is_laid_over_white():
    pixels = np.zeros((24, 20, 4), dtype=np.uint8)
    pixels[:, 10:, 3] = 255
    decoded = decode_image(encode(Image.fromarray(pixels), "PNG"), SHAPE)
    assert (decoded[:, :, :10] == 255).all()
    assert (decoded[:, :, 10:] == 0).all()


def test_16_bit_gray_keeps_its_upper_byte():
    values = np.arange(24 * 20, dtype=np.uint16).reshape(24, 20) * 100
    decoded = decode_image(encode(Image.fromarray(values), "PNG"), (1, 24, 20))
    assert decoded[0].tolist() == (values >> 8).tolist()


def with_orientation(picture: Image.Image, orientation: int, kind: str = "JPEG", **options) -> bytes:
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "A camera", orientation
    return encode(picture, kind, exif=exif, **options)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
def test_an_image_is_turned_upright_once_by_its_exif_orientation(kind, orientation):
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    data = with_orientation(smooth_picture(2, 24, 20), orientation, kind)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    whole = decode_whole(data)
    assert tuple(whole.shape) == ((3, 24, 20) if orientation < 5 else (3, 20, 24))
    for decoded in (whole, decode_whole(Image.open(io.BytesIO(data))), decoded_into(data, whole.shape)):
        assert (decoded.int() - channels_first(expected.convert("RGB")).int()).abs().max() <= 4
    again = Image.open(io.BytesIO(data)).transpose(Image.Transpose.ROTATE_90)  # Pillow keeps the tag
    assert tuple(decode_whole(again).shape[1:]) == again.size[::-1]


@pytest.mark.parametrize(("channels", "orientation"), [(1, 5), (1, 8), *((3, n) for n in range(2, 9))])
def test_a_square_jpeg_of_the_input_size_is_turned_upright_in_its_slot(channels, orientation):
    picture = smooth_picture(2, 24, 24).convert("RGB" if channels == 3 else "L")
    data = with_orientation(picture, orientation)
    expected = channels_first(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert (decoded_into(data, (channels, 24, 24)).int() - expected.int()).abs().max() <= 4


@pytest.mark.parametrize("order", ["II", "MM"])
def test_exif_of_both_byte_orders_is_found_after_other_segments(order):
    picture = smooth_picture(2)
    plain = encode(picture, "JPEG")
    signs = "<" if order == "II" else ">"
    entries = struct.pack(f"{signs}HHIHHHHIHH", 0x0111, 3, 1, 7, 0, 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0" + order.encode() + struct.pack(f"{signs}HIH", 42, 8, 2) + entries
    other = b"\xff\xe2" + struct.pack(">H", 20) + b"\xff\xda" * 9
    where = plain.index(b"\xff\xdb")
    for junk in (b"", b"\xff\xff", b"junk"):
        data = plain[:where] + other + junk + segment(0xFFE1, exif) + plain[where:]
        assert torch.equal(decode_whole(data), decode_whole(plain).transpose(1, 2).flip(2))
        for length in range(len(exif)):  # damaged: never an error
            decode_whole(plain[:2] + segment(0xFFE1, exif[:length]) + plain[2:])


def test_a_narrow_image_is_resized_in_little_memory(tmp_path):
    Image.new("L", (1, 4_000_000), 77).save(tmp_path / "a.png")
    script = (
        "import sys, pathlib; from plsc.data.decode import decode_image\n"
        "def peak():\n"
        "    lines = pathlib.Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if 'VmHWM' in line)\n"
        "before = peak()\n"
        "image = decode_image(pathlib.Path(sys.argv[1]).read_bytes(), (3, 112, 112))\n"
        "print(image.min().item(), image.max().item(), peak() - before)"
    )
    least, most, kilobytes = map(int, run_code(script, str(tmp_path / "a.png")).stdout.split())
    assert (least, most) == (77, 77)
    assert kilobytes < 600_000  # 1,900,000 if the width is resized first


@pytest.mark.parametrize(
    ("kind", "odd", "options"), [("JPEG", 11, {}), ("JPEG", None, {"progressive": True}), ("PNG", None, {})]
)
def test_damaged_bytes_give_an_image_in_its_slot_or_a_data_error(kind, odd, options):
    generator = np.random.default_rng(0)
    good = encode(smooth_picture(0), kind, **options)
    for position in range(2, min(len(good), 700)):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            data = bytearray(good)
            data[position] = value
            data[generator.integers(2, len(data))] = generator.integers(256)
            if odd is not None:
                data[odd] = 0x7F
            if value == 0x80:
                del data[generator.integers(20, len(data)) :]
            for decode in (lambda data: decode_image(data, SHAPE), decoded_into):
                try:
                    assert decode(bytes(data)).shape == SHAPE
                except DataError:
                    continue


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((24, 20, 4), dtype=np.uint8), "4 channels"),
        (np.zeros((24, 20, 3), dtype=np.int64), "int64"),
        (torch.zeros(2, 3, 24, 20), "2, 3, 24, 20"),
        (torch.zeros(3, 0, 20, dtype=torch.uint8), "20x0 pixels"),
        (torch.full(SHAPE, float("nan")), "nan or inf"),
        ("a/path.jpg", "got str"),
        (Image.new("F", (20, 24)), "32-bit"),
    ],
)
def test_an_image_of_unsupported_type_or_shape_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        decode_image(data, SHAPE)


def decoded_into(data, shape=SHAPE) -> torch.Tensor:
    """Return what decode_into leaves in a slot of a batch; it must not write beyond the slot."""
    channels, height, width = shape
    batch = np.full((3, height, width, channels), 7, dtype=np.uint8)
    floats = decode_into(data, batch[1])
    assert (batch[0] == 7).all()
    assert (batch[2] == 7).all()
    return torch.from_numpy(batch[1].transpose(2, 0, 1).copy()) if floats is None else floats


@pytest.mark.parametrize("size", [(24, 20), (48, 40), (9, 11), (24, 21), (10, 48)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_jpeg_is_decoded_as_pillow_decodes_it_and_into_a_batch(size, mode, channels):
    picture, shape = smooth_picture(3, *size).convert(mode), (channels, 24, 20)
    header = b"\x08\x00\x18\x00\x14"  # as in a frame header of the requested size
    data = encode(picture, "JPEG", quality=95, subsampling=0, comment=header)
    decoded = decode_image(data, shape)
    assert torch.equal(decoded_into(data, shape), decoded)
    if size == (24, 20):
        expected = channels_first(Image.open(io.BytesIO(data)).convert("RGB" if channels == 3 else "L"))
        assert (decoded.int() - expected.int()).abs().max() <= 4  # decoders may round differently


def test_all_kinds_of_images_give_the_same_pixels_alone_and_in_a_batch():
    picture = smooth_picture(4)
    expected, floats = channels_first(picture), torch.randn(SHAPE)
    for decode in (decoded_into, lambda data: decode_image(data, SHAPE)):
        for data in (picture, np.array(picture), expected, encode(picture, "PNG")):
            assert torch.equal(decode(data), expected)
        for data in (floats, floats.double().numpy()):
            assert torch.equal(decode(data), floats)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_bad_file_is_refused_alike_alone_and_in_a_batch(kind):
    with pytest.raises(DataError) as whole:
        decode_image(HOSTILE[kind], SHAPE)
    with pytest.raises(DataError) as into:
        decoded_into(HOSTILE[kind])
    assert (str(into.value), into.value.kind) == (str(whole.value), whole.value.kind)
    assert whole.value.kind in ("undecodable", "empty", "too large")
    assert "\n" not in str(whole.value)
    assert ("000" in kind) == (" pixels" in str(whole.value))


def test_a_jpeg_truncated_anywhere_is_refused():
    good = encode(smooth_picture(6), "JPEG")
    for length in range(2, len(good)):
        with pytest.raises(DataError):
            decoded_into(good[:length])


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">HH", marker, len(content) + 2) + content


def odd_jpegs(good: bytes) -> dict[str, bytes]:
    """Return JPEGs that libjpeg warns of, with the pixels of `good`."""
    tables, scan, end = good.index(b"\xff\xdb"), good.index(b"\xff\xda"), good.rindex(b"\xff\xd9")
    last = good.rindex(b"\xff\xda")
    short = b"\xff\xe1\0\x06Exif and longer than it says"
    profile = segment(0xFFE2, b"ICC_PROFILE\0\3\7abc")
    return {
        "JFIF 9.1": good[:11] + b"\x09" + good[12:],
        "surplus before the tables": good[:tables] + b"surplus" + good[tables:],
        "surplus before the scan": good[:scan] + b"surplus" + good[scan:],
        "ICC profile without a part": good[:tables] + profile + good[tables:],
        "short segment": good[:tables] + short + good[tables:],
        "all of them": good[:11] + b"\x09" + good[12:tables] + short + good[tables:scan] + b"x" + good[scan:],
        "surplus before the end": good[:end] + b"surplus bytes" + good[end:],
        "zeros before the last scan": good[:last] + bytes(3000) + good[last:],
        "zeros before the end": good[:end] + bytes(5000) + good[end:],
        "surplus after the end": good + b"surplus" * 9,
    }


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_jpegs_with_harmless_libjpeg_warnings_are_decoded(options):
    good = encode(smooth_picture(6), "JPEG", **options)
    for name, odd in odd_jpegs(good).items():
        for decode in (decoded_into, lambda data: decode_image(data, SHAPE)):
            assert torch.equal(decode(odd), decode_image(good, SHAPE)), name


def test_a_harmless_warning_does_not_hide_a_damaged_scan():
    good = encode(smooth_picture(6, 240, 200), "JPEG")
    middle = len(good) // 2
    for odd in odd_jpegs(good).values():
        where = odd.index(good[middle : middle + 20])
        for damaged in (odd[:where] + b"\xff\xd9" + odd[where + 2 :], odd[:where]):
            with pytest.raises(DataError, match="damaged"):
                decoded_into(damaged)


def test_a_jpeg_with_a_part_of_its_scan_left_over_is_refused_with_the_doubt():
    good = encode(smooth_picture(6, 240, 200), "JPEG")
    rest = np.random.default_rng(0).bytes(900).replace(b"\xff", b"\0")
    with pytest.raises(DataError, match="extraneous"):
        decoded_into(good[:-2] + rest + good[-2:])


def test_a_jpeg_of_thousands_of_scans_is_refused():
    good = encode(smooth_picture(6), "JPEG", progressive=True)
    scan = good[good.rindex(b"\xff\xda") : -2]
    bomb = good[:-2] + scan * (3000 + 20_000 // len(scan)) + b"\xff\xd9"
    with pytest.raises(DataError, match="scans"):
        decoded_into(bomb)


def test_a_png_of_many_chunks_is_refused():
    good = encode(smooth_picture(6), "PNG")
    chunk = bytes(4) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    assert count_pixels(good[:-12] + chunk * 100 + good[-12:], 10**6) == count_pixels(good, 10**6)
    with pytest.raises(DataError, match="chunks"):
        count_pixels(good[:-12] + chunk * 20_000 + good[-12:], 10**6)


@pytest.mark.parametrize("count", [5000, 2**18])
def test_pillow_does_not_see_exif_segments_of_a_jpeg(count):  # it would take minutes or gigabytes
    good = encode(smooth_picture(6), "JPEG")
    bomb = good[:2] + b"\xff\xe1\0\x12Exif\0\0aaaaaaaaaa" * count + good[2:]
    with contextlib.nullcontext() if count < 10**4 else pytest.raises(DataError):
        assert count_pixels(bomb, 10**6) == count_pixels(good, 10**6)
