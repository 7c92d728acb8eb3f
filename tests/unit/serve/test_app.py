"""Forms of images, and hostile ones."""

import pytest

from plsc.errors import DataError

app = pytest.importorskip("plsc.serve.app", reason="plsc-torch[serve] is not installed")
START = b'--x\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\n'


def images_in(content: bytes):
    return app._from_form(START + content + b"\r\n--x--\r\n", "multipart/form-data; boundary=x")[0]


def test_text_that_is_nearly_a_boundary_is_content():
    assert images_in(b"\r\n--xy" * 9) == [b"\r\n--xy" * 9]


def test_blanks_after_a_boundary_are_no_content():
    assert images_in(b"a\r\n--x" + b" " * 10**6 + b"\r\n\r\n") == [b"a"]


@pytest.mark.parametrize("boundary", ["x", '"x"'])
def test_the_field_name_and_files_are_found_by_their_headers(boundary):
    fields = {"name": "Zo\u00eb", "filename": "no", "other": "no"}
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{one}\r\n' for key, one in fields.items()
    ]
    body = "".join(parts).encode() + START + b"\r\n\r\n\r\n--x--"
    assert app._from_form(body, f"multipart/form-data; boundary={boundary}") == ([b"\r\n\r\n"], "Zo\u00eb")


def test_a_form_without_an_end_or_of_many_parts_is_refused():
    for body in (START + b"a", b"\r\n--x\r\n" * 10**5 + b"--x--"):
        with pytest.raises(DataError, match="parts"):
            app._from_form(body, "multipart/form-data; boundary=x")
