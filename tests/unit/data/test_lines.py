import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.data import lines as lines_module
from plsc.data.lines import MAX_LINE_BYTES, Buffers, LineReader, parse_line
from plsc.errors import DataError

MARK = b"\xef\xbb\xbf"


def read_reference(data: bytes) -> list[tuple[int, bytes, int]]:
    """Return (line number, content, label) of each sample; DataError for a bad line."""
    found = []
    data = data.removeprefix(MARK)
    for number, line in enumerate(data.split(b"\n"), start=1):
        parsed = parse_line(line.removesuffix(b"\r"))
        if parsed is not None:
            found.append((number, line.removesuffix(b"\r"), parsed[1]))
    return found


def read(data: bytes, block: int, **options) -> list[tuple[int, bytes, int]]:
    buffers = Buffers(1, block)
    found = []
    reader = LineReader(io.BytesIO(data), "a.txt", buffers, **options)
    for lines in reader:
        contents = [lines.data[a:b].tobytes() for a, b in zip(lines.starts, lines.ends, strict=True)]
        places = zip((lines.starts + reader.base).tolist(), contents, strict=True)
        assert all(data[place : place + len(content)] == content for place, content in places)
        for content, tab in zip(contents, lines.tabs - lines.starts, strict=True):
            assert b"\t" not in content[tab + 1 :].rstrip(b" \t\r")
            assert content[tab : tab + 1] == b"\t"
        found += zip(lines.numbers.tolist(), contents, lines.labels.tolist(), strict=True)
        buffers.give_back(lines.data)
    return found


def has_format(samples: list[tuple[int, bytes, int]]) -> bool:
    """Whether there is no sample, or one of the first lines is base64."""
    good = re.compile(rb"[A-Za-z0-9+/=]+\t\d+[ \t]*")
    return not samples or any(good.fullmatch(line) for number, line, _ in samples if number <= 16)


@pytest.fixture(params=["native", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr("plsc.data.native.function", lambda *_: None)


good_line = st.builds(
    lambda data, label, blanks: data + b"\t" + label + blanks,
    st.text("ABab+/=9", min_size=1, max_size=90).map(str.encode),
    st.integers(0, 10**18 - 1).map(lambda label: str(label).encode()),
    st.sampled_from([b"", b"", b"", b" ", b" \t"]),
)
any_line = st.one_of(
    good_line, good_line, st.just(b""),
    st.sampled_from([b" ", b"A 5", b"A\t-1", b"\t5", b"A\t", MARK + b"A\t5"]),
    st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"")),
)  # fmt: skip
ends = st.sampled_from([b"\n", b"\n", b"\r\n"])


@given(
    st.lists(st.tuples(any_line, ends), max_size=12), st.booleans(), st.booleans(),
    st.sampled_from([100, 128, 1000]),
)  # fmt: skip
def test_lines_are_read_as_the_reference_implementation_does(pairs, has_bom, is_cut, block):
    data = b"".join(line + end for line, end in pairs)
    data = MARK * has_bom + (data.removesuffix(b"\n") if is_cut else data)
    expected = problem = None
    try:
        expected = read_reference(data)
    except DataError as error:
        problem = str(error)
    if problem is None and not has_format(expected):
        with pytest.raises(DataError, match="first"):
            read(data, len(data) + 100)
    elif problem is None:
        assert read(data, block) == expected
    else:
        with pytest.raises(DataError) as caught:
            read(data, block)
        assert problem in str(caught.value)


@given(st.lists(st.tuples(good_line, ends), max_size=12), st.integers(1, 64))
def test_blocks_shorter_than_lines_give_the_same_samples(pairs, block):
    data = b"".join(line + end for line, end in pairs)
    assert read(data, block) == read_reference(data)


@given(st.lists(st.tuples(any_line, ends), max_size=12), st.sampled_from([100, 128, 1000]))
def test_skipping_leaves_out_only_the_bad_lines(pairs, block):
    expected = []
    for number, (line, _) in enumerate(pairs, start=2):
        line = line.removesuffix(b"\r")
        try:
            parsed = parse_line(line)
        except DataError:
            continue
        if parsed is not None:
            expected.append((number, line, parsed[1]))
    data = b"".join([b"QUJD\t0\n", *(line.removesuffix(b"\r") + end for line, end in pairs)])
    assert read(data, block, skip_bad=True) == [(1, b"QUJD\t0", 0), *expected]


@pytest.mark.parametrize("line", [b"5\tQUJD", b"images/a.jpg\t5", b"QUJD", b"QUJD\t5\r" * 1000])
def test_a_file_of_another_format_is_an_error_whatever_is_skipped(line, way):
    for skip_bad in (False, True):
        with pytest.raises(DataError, match=r"a\.txt"):
            read(b"\n".join([line] * 20 + [b"QUJD\t5\n"]), 4000, skip_bad=skip_bad)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"QUJD 5", "TAB"),
        (b"QUJD\t1.0", "integer"),
        (b"QUJD\t-1", "integer"),
        (b"QUJD\t1234567890123456789", "digits"),
        (b"\t5", "TAB"),
        (b"QUJD\t", "TAB"),
        (b"QU\tJD\t3", "TAB"),
        (b"QUJD\t3\rQUJD\t4", "TAB"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_line(line, problem):
    with pytest.raises(DataError, match=rf"a\.txt:3: .*{problem}"):
        read(b"QUJD\t1\n\n" + line + b"\nQUJD\t2\n", 1000)


@pytest.mark.parametrize("line", [b"hunter2", b"a\thunter2", b"hunter2\tb\t1", b"a\t-7777", b"hunter!\t1"])
def test_a_message_about_a_line_has_nothing_of_it(line):  # a list of files may name a private one
    with pytest.raises(DataError) as caught:
        read(line + b"\n", 1000)
    assert not re.search("hunter|7777", str(caught.value))


def test_a_too_long_line_is_refused_in_bounded_memory():
    class Endless(io.RawIOBase):
        given = 0

        def readinto(self, buffer) -> int:
            self.given += len(buffer)
            buffer[:] = b"A" * len(buffer)
            return len(buffer)

    stream = Endless()
    with pytest.raises(DataError, match=r"a\.txt:1: .*longer"):
        for _ in LineReader(stream, "a.txt", Buffers(1, 2**20)):
            pass
    assert stream.given < MAX_LINE_BYTES + 2**22


def test_a_too_long_line_can_be_skipped(monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 5000)
    data = b"QUJD\t1\n" + b"A" * 9000 + b"\t7\nQUJD\t2\n"
    for block in (64, 20_000):
        assert [label for *_, label in read(data, block, skip_bad=True)] == [1, 2]
