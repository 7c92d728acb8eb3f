"""No secret of a URL in a message: of every kind of URL, and of what clients make of it."""

import fsspec
import pytest

from plsc.data.sources import open_images
from plsc.errors import DataError, OptionError, PlscError, add_note, shown, without_secrets
from plsc.predict.predict import Samples
from plsc.storage.urls import is_url, open_filesystem, with_retries

CASES = [
    ("s3://me:SECRET@bucket/x", "s3://bucket/x"),
    ("https://SECRET@host/x", "https://host/x"),
    ("http://me@example.com:SECRET@host/x", "http://host/x"),
    ("s3://me:SE@CRET@bucket/x", "s3://bucket/x"),
    ("s3://me:SE/CRET@bucket/x", "s3://bucket/x"),
    ("https://me:SE?k=CRET@host/x", "https://?***"),
    ("https://me:SE#k=CRET@host/x", "https://#***"),
    ("s3://me:SE'C\"RE)T@bucket/x", "s3://bucket/x"),
    ("s3://me:SE::CRET@bucket/x", "s3://bucket/x"),
    ("s3:/me:SECRET@bucket/x", "s3:/bucket/x"),
    ("http://me:a SECRET\u00a0SECRET\tSECRET@host/x y", "http://host/x y"),
    ("zip://a.zip::https://me:SE CR/ET SECRET@host/x", "zip://a.zip::https://host/x"),
    ("s3://me:/SECRET@bucket/x", "s3://bucket/x"),
    ("abfs://me:SECRET@host/x", "abfs://host/x"),
    (f"s3://me:{'SECRET://x:' * 10**4}@bucket/x", "(110017 characters)"),
    ("https://me:SECRET@[::1]:80/x", "https://[::1]:80/x"),
    ("https://host/x?token=SECRET", "https://host/x?***"),
    ("https://host/x#access_token=SECRET", "https://host/x#***"),
    ("https://host/x#t=SECRET?x", "https://host/x#***"),
    ("https://me:SECRET@host/x?token=SECRET@a/b?c=SECRET", "https://host/x?***"),
    (
        "https://b.s3.aws.com/k?X-Amz-Credential=SECRET%2F2026&X-Amz-Signature=SECRET",
        "https://b.s3.aws.com/k?***",
    ),
    (
        "zip://*.csv::simplecache::https://me:SE/CRET@host/x?sig=SECRET",
        "zip://*.csv::simplecache::https://host/x?***",
    ),
    ("s3://a/b,s3://me:SECRET@bucket/x", "s3://a/b,s3://bucket/x"),
    (
        "403, url='https://host/x?sig=SECRET', then (s3://me:SECRET@b/k).",
        "403, url='https://host/x?***', then (s3://b/k).",
    ),
]
OF_VALUES = [
    ("http://John Smith:SECRET@host/x", "http://host/x"),
    ("http://me: SECRET@host/x", "http://host/x"),
    ("http://me:12 SECRET@host/x y", "http://host/x y"),
    ("http://me:p@a SECRET@host/x", "http://host/x"),
    ("postgresql://host/x?password=a SECRET", "postgresql://host/x?***"),
    ("https://host/my data/x?sig=SECRET", "https://host/my data/x?***"),
]
UNCHANGED = [
    "s3://bucket/part-?.tar",
    "/data/a:b@c/d?e=f",
    "expected hdfs://server:port/folder, or memory://x; see http://x.org/.",
    "zip://a/b@2.csv::https://host:80/x.zip",
    "two  spaces\tand\nlines",
    "s3://bucket/a:b@c",
    "abfs://container@account.dfs.core.windows.net/x@y",
    "hdfs://namenode:9000 has no a@b, http://host: a@b",
]

OPEN = """
    https://me:SE/CRET@host/x https://me:SE/CR?ET@host/x s3://me:12/3?4@host/x s3://a@host:SE/CRET@bucket
    https://a@host:SE#CRET@host https://me:p@SE?CRET@host s3://me:p@SECR#x=1@host/a https://me:SECRET/x
    s3://me:SECRET/x postgresql://me:SECRET/x postgresql://me:SE::CRET@host/x
""".split()  # noqa: SIM905
OPEN.append(f"http://{'a,' * 2000}b:SECRET/x")  # in linear time
CLOSED = """
    https://host:80/me:a/b@c s3://bucket/a:b/c@d https://[::1]:80/@ https://me:SECRET@[::1]:80/x
    postgresql://host:1,host:2/x s3://arn:aws:s3:eu:1:accesspoint/a/x abfs://a@host/x@y memory:///a
    s3://me:SE@CRET@bucket/x reference://k::http: simplecache::https://host/x
""".split()  # noqa: SIM905


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_what_is_shown_has_no_secret(text, expected):
    assert shown(text) == shown(shown(text)) == expected
    assert without_secrets({"a": [{"b": text}], "c": 1}) == {"a": [{"b": expected}], "c": 1}
    for error in (PlscError(text), DataError(text), OptionError(f"wrong: {text}")):
        add_note(error, f"of {text}")
        assert "SECRET" not in repr(error) + str(error) + str(getattr(error, "__notes__", ""))


@pytest.mark.parametrize(("url", "expected"), OF_VALUES)
def test_a_url_with_a_blank_in_its_password_is_refused_and_stored_without_it(url, expected):
    assert without_secrets([url]) == [expected]
    with pytest.raises(DataError, match="blank") as caught:
        is_url(url)
    assert "SECRET" not in str(caught.value)


def test_images_at_urls_have_names_without_secrets_that_differ():
    source = open_images([f"https://me:SECRET@host/photo?id={number}" for number in range(3)])
    names = [source.name(number) for number in range(3)]
    assert len(set(names)) == 3
    assert [shown(name) for name in names] == names
    assert names == Samples(source, "a list", 0).names(range(3))


@pytest.mark.parametrize("text", UNCHANGED)
def test_what_has_no_secret_is_shown_as_it_is(text):
    assert shown(text) == text


@pytest.mark.parametrize(
    "fault",
    [
        CASES[0][0],
        CASES[-1][0],
        "'me:SE/CRET@bucket/x?X-Amz-Signature=SECRET'",
        "no route to me:SE@CRET@host:80",
    ],
)
def test_a_fault_of_a_client_has_no_secret_nor_the_traceback_below_it(fault):
    def fail():
        try:
            raise FileNotFoundError(fault)
        except FileNotFoundError as error:
            raise PermissionError("not for you") from error

    with pytest.raises(DataError) as caught:
        with_retries(fail, "it cannot be read")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert not any(part in str(caught.value) for part in ("SE", "CR", "ET"))


def test_a_password_that_no_client_would_read_is_refused_before_one_is_asked():
    for place in OPEN:
        with pytest.raises(DataError, match="%2F"):
            is_url(f"zip://a.rec::{place}")
    assert all(map(is_url, [*CLOSED, f"s3://{'?=' * 10**6}"]))
    fsspec.filesystem("memory").pipe("/me:SECRET@host/x.zip", b"PK\5\6" + bytes(18))
    filesystem, _ = open_filesystem("zip://a.rec::memory://me:SECRET@host/x.zip")
    assert filesystem.protocol == "zip"
