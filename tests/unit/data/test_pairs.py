import contextlib
import itertools
import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.data.pairs import read_pairs
from plsc.errors import DataError
from tests.distributed.launch import run_code

IMAGES = [b"\xff\xd8 first\n'\"\\", b"second\x00", b"\x89PNG third", bytes(range(256))]
FLAGS = [True, False]

BINS = {
    "bytes": lambda images: list(images),
    "bytearrays": lambda images: [bytearray(image) for image in images],
    "uint8 arrays": lambda images: [np.frombuffer(image, np.uint8) for image in images],
    "uint8 columns": lambda images: [np.frombuffer(image, np.uint8)[:, None] for image in images],
}
IS_SAME = {
    "bools": lambda flags: list(flags),
    "numpy bools": lambda flags: [np.bool_(flag) for flag in flags],
    "numpy int64s": lambda flags: [np.int64(flag) for flag in flags],
    "bool array": lambda flags: np.array(flags),
    "big-endian array": lambda flags: np.array(flags, dtype=">i4"),
}


def assert_refused(path, content, *words):
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_pairs(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message


@pytest.mark.parametrize("protocol", range(6))
def test_every_form_and_protocol_gives_the_same_pairs(tmp_path, protocol):
    path = tmp_path / "lfw.bin"
    for bins, is_same in itertools.product(BINS.values(), IS_SAME.values()):
        path.write_bytes(pickle.dumps((bins(IMAGES), is_same(FLAGS)), protocol))
        pairs = read_pairs(path)
        assert (pairs.images, pairs.is_same.tolist(), len(pairs)) == (IMAGES, FLAGS, 2)
        assert pairs.is_same.dtype == bool


# Output of cPickle of Python 2.7 for (['\xff\xd8ab\n\'"\\', 'x'], [True]), by protocol.
PYTHON_2 = {
    0: b"((lp1\nS'\\xff\\xd8ab\\n\\'\"\\\\'\np2\naS'x'\na(lp3\nI01\nat.",
    1: b"(]q\x01(U\x08\xff\xd8ab\n'\"\\q\x02U\x01xe]q\x03I01\nat.",
    2: b"\x80\x02]q\x01(U\x08\xff\xd8ab\n'\"\\q\x02U\x01xe]q\x03\x88a\x86.",
    # With arrays, by NumPy of Python 2: names under numpy.core, states of str and 0/1 flags.
    "arrays": b"\x80\x02]q\x01(cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85"
    b"U\x01b\x87Rq\x04(K\x01K\x08\x85cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06(K\x03U\x01|NNNJ"
    b"\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x08\xff\xd8ab\n'\"\\tbU\x01xe]cnumpy.core.multiarray\n"
    b"scalar\nh\x05U\x02b1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    b"U\x01\x01\x86Ra\x86.",
}


@pytest.mark.parametrize("protocol", PYTHON_2)
def test_files_written_by_python_2_are_read(tmp_path, protocol):
    path = tmp_path / "lfw.bin"
    path.write_bytes(PYTHON_2[protocol])
    pairs = read_pairs(path)
    assert pairs.images == [b"\xff\xd8ab\n'\"\\", b"x"]
    assert pairs.is_same.tolist() == [True]


def test_a_file_that_is_missing_or_a_folder_is_refused(tmp_path):
    (tmp_path / "taken.bin").mkdir()
    for name in ("gone", "taken.bin"):
        with pytest.raises(DataError, match=name):
            read_pairs(tmp_path / name)


class Attack:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    marker = tmp_path / "ran"
    content = pickle.dumps((IMAGES, FLAGS, Attack(os.mkdir, str(marker))), protocol)
    assert_refused(tmp_path / "lfw.bin", content, f"requests {os.mkdir.__module__}.mkdir")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"(S'id'\nios\nsystem\n.", "os.system"),  # INST calls without REDUCE
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"c_codecs\ndecode\n.", "_codecs.decode"),
        (b"cnumpy.core.multiarray\nfromfile\n.", "numpy.core.multiarray.fromfile"),
        (b"cos\nsys\rtem\x1b[2J\n.", r"os.sys\rtem\x1b[2J"),
    ],
)
def test_every_way_to_request_a_global_is_refused_with_its_name(tmp_path, content, name):
    assert_refused(tmp_path / "lfw.bin", content, f"requests {name}")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"bins": IMAGES}, "EMPTY_DICT"),
        ((np.array([b"a", b"b"], dtype=object), [True]), "dtype"),
        (([np.frombuffer(b"ab", np.int16), b"b"], [True]), "image 0"),
        (([*IMAGES[:3], [b"d"]], FLAGS), "image 3"),
        ((IMAGES, b"\1\0"), "bytes"),
        *(((IMAGES, [True, flag]), "is_same[1]") for flag in (2, 1 << 70)),
        (([b"a", b""], [True]), "image 1 "),
        ((IMAGES[:3], FLAGS), "length 3"),
        (([], []), "length 0"),
        (None, "NoneType"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path, value, word):
    assert_refused(tmp_path / "lfw.bin", pickle.dumps(value, 4), word)


NDARRAY = b"cnumpy\nndarray\n"
EMPTY_ARRAY = b"((lcnumpy.core.multiarray\n_reconstruct\n(" + NDARRAY + b"(I0\ntS'b'\ntR"
UINT8 = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR"
END = b"aS'b'\na(lI01\nat."
HUGE = struct.pack("<Q", 1 << 62)


@pytest.mark.parametrize(
    "content",
    [
        b"((l" + NDARRAY + b"(I9\ntR" + END,  # ndarray itself is never called
        EMPTY_ARRAY + b"(I1\n(I1000000000000\nt" + UINT8 + b"I00\nS'a'\ntb" + END,
        EMPTY_ARRAY + b"(I1\n(I-1\nI-1\nt" + UINT8 + b"I00\nS'a'\ntb" + END,
        EMPTY_ARRAY + b"(I1\n(I1\nt" + UINT8 + b"I00\n(lS'a'\natb" + END,  # a list for its bytes
        b"((lcnumpy.core.multiarray\nscalar\n(" + UINT8 + b"S''\ntR" + END,  # without its byte
        b"\x80\x04\x8e" + HUGE,  # BINBYTES8 of 4 EiB
        b"\x80\x04\x8d" + HUGE,  # BINUNICODE8
        b"\x80\x05\x96" + HUGE,  # BYTEARRAY8
        b"\x80\x04\x95" + HUGE + b".",  # FRAME
        b"\x80\x02T\xff\xff\xff\xff",  # BINSTRING
        b"\x80\x02N\x8b\xff\xff\xff\x7f",  # LONG4
        b"I" + b"9" * 100_000 + b"\n.",
        b"\x80\x09.",
        b"q\x00.",  # PUT of an empty stack
        b"h\x07.",  # GET of nothing
        *(b"e.", b"t.", b"\x87.", b"R.", b"]]R.", b"NNb.", b"K\x01K\x02\x93.", b"K\x01N.a.", b"S'open\n."),
        b"X\x01\x00\x00\x00\xff.",  # not UTF-8
        b"c_codecs\nencode\n(V\\u20ac\nS'latin1'\ntR.",
        b"c_codecs\nencode\n(Va\nS'utf-16'\ntR.",
        b"((lS'a'\naS'b'\na]b(lI01\nat.",  # BUILD on a list
        b"\x80\x04\x95\xff\0\0\0\0\0\0\0K\x01.",  # a frame longer than the file
        b"I0x" + b"f" * 2000 + b"\n.",  # a number of two thousand digits
        *(b"", b"\xff\xd8\xff\xe0 a JPEG", b".", b"version https://git-lfs.github.com/spec/v1\n"),
    ],
)  # fmt: skip
def test_hostile_or_damaged_bytes_give_a_one_line_error(tmp_path, content):
    assert_refused(tmp_path / "lfw.bin", content)


def test_a_value_larger_than_any_image_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "lfw.bin"
    path.write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40))
    os.truncate(path, 2 << 40)  # sparse: takes no space
    with pytest.raises(DataError, match="a value of"):
        read_pairs(path)


@pytest.mark.parametrize("protocol", [0, 4])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, protocol):
    content = pickle.dumps((IMAGES, [np.bool_(flag) for flag in FLAGS]), protocol)
    for length in range(1, len(content)):
        assert_refused(tmp_path / "lfw.bin", content[:length])


@given(st.data())
def test_a_file_with_changed_bytes_is_read_or_refused_but_never_crashes(tmp_path_factory, data):
    bins = [np.frombuffer(image, np.uint8) for image in IMAGES]
    content = bytearray(pickle.dumps((bins, FLAGS), data.draw(st.integers(0, 5))))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.bin"
    path.write_bytes(content)
    with contextlib.suppress(DataError):
        assert len(read_pairs(path)) == 2


LAUGHS = [b"](" + b"h%c" % i * 10 + b"eq%c" % (i + 1) for i in range(100)]
ENCODE_AGAIN = b"h\x01(h\x00U\x06latin1tR"
BOMBS = {
    "largest memo index": (b"]r\xff\xff\xff\xff.", "LONG_BINPUT"),
    "deep lists": (b"]" * 500_000 + b"a" * 499_999 + b".", "length 1"),
    "deep tuples as an image": (b"](" + b")" + b"\x85" * 900_000 + b"e]\x88a\x86.", "length 1"),
    "billion laughs": (b"]q\x00" + b"".join(LAUGHS) + b".", "length 10"),
    "a list in itself": (b"]q\x00h\x00a.", "length 1"),
    "100 GB of copies": (
        b"(X\x40\x42\x0f\x00" + b"a" * 1_000_000 + b"q\x00c_codecs\nencode\nq\x01]("
        + ENCODE_AGAIN * 100_000 + b"et.",
        "more bytes",
    ),
    "10 million lists": (b"(" + b"]" * 10_000_000 + b"l.", "never needs"),
}  # fmt: skip


def test_decompression_bombs_are_refused_in_bounded_memory(tmp_path):
    paths = [tmp_path / f"{number}.bin" for number in range(len(BOMBS))]
    for path, (content, _) in zip(paths, BOMBS.values(), strict=True):
        path.write_bytes(content)
    script = (
        "import resource, sys\n"
        "from plsc.data.pairs import DataError, read_pairs\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "for path in sys.argv[1:]:\n"
        "    try: read_pairs(path)\n"
        "    except DataError as error: print(error)\n"
    )
    refusals = run_code(script, *map(str, paths), timeout=120).stdout.splitlines()
    for refusal, (name, (_, noun)) in zip(refusals, BOMBS.items(), strict=True):
        assert noun in refusal, name
