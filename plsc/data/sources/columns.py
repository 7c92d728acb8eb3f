"""Sources with named columns; labels that are integers or class names; label maps."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from plsc.data.files import name_key, ranked
from plsc.data.sources.base import IndexedSource, printable
from plsc.errors import DataError, OptionError, check_name
from plsc.storage.disk import parse_json, read_regular, without_mark

IMAGE_COLUMNS = (
    *("image", "img", "image_path", "path", "file_name", "filename", "file", "jpg", "jpeg", "png"),
    *("webp", "base64", "image_base64", "bytes", "image_bytes", "data"),
)
NAMES_COLUMN = "class_name"  # its labels are always names, also if they are digits
LABEL_COLUMNS = (
    *("label", "labels", "class", "cls", "class_id", "identity", "id", "target", "fine_label", NAMES_COLUMN),
)

Label = bytes | str | int
_MAX_DIGITS = 18  # such numbers fit int64
_MOST_JSON = 2**30  # bytes of a label map; larger ones can be lines
_RAW_BYTES = re.compile("[\udc80-\udcff]")
_NUMBER = re.compile(r"[-+]?(([0-9]+(\.[0-9]+)?|\.[0-9]+)(e[-+]?[0-9]+)?|[0-9]+\.|nan|inf)", re.IGNORECASE)


def choose_column(given: str | None, columns: Sequence[str], known: Sequence[str], what: str) -> str:
    """Return the column `given`, or the first of the `known` names that exists.

    what: ``image`` or ``label``, for the message. Raises OptionError that lists the existing columns, or if
    two have this name.
    """
    shown = ", ".join(printable(str(column)[:100]) for column in list(columns)[:50]) or "none"
    names = {column.lower(): column for column in reversed(list(columns))}
    if given is not None:
        known, names = (given,), {column: column for column in columns}
    for name in known:
        if name in names:
            if list(columns).count(names[name]) > 1:
                raise OptionError(f"two columns are called {names[name]!r}; set {what}_column to another one")
            return names[name]
    raise OptionError(f"no {what} column {given!r}; the columns are: {shown}; set {what}_column")


class LabelReader:
    """Collect the labels of rows, in their order: either all integers or all class names.

    All are names if one is no number, or has zeros in front, such as ``cat`` or ``007``; or if `names_wanted`
    (for a label map, or a column ``class_name``). Otherwise all must be integers of 0 or more.
    """

    def __init__(self, names_wanted: bool) -> None:
        self.names_wanted = names_wanted
        self._numbers = array("q")
        self._codes: dict[str, int] | None = {} if names_wanted else None
        self._wrong_number = ""  # the fault of the first, unless all are names
        self._is_name_seen = names_wanted

    def choose_column(self, given: str | None, columns: Sequence[str]) -> str:
        """Return the label column, as `choose_column`, before labels are read from it."""
        column = choose_column(given, columns, LABEL_COLUMNS, "label")
        if column.lower() == NAMES_COLUMN:
            self.names_wanted, self._codes, self._is_name_seen = True, {}, True
        return column

    def extend(self, values: Iterable[Label], place: Callable[[int], str]) -> None:
        """Add the labels of some rows.

        place: returns the location of a row, by its position in `values`, for messages.
        Raises DataError for a label that is missing.
        """
        for position, value in enumerate(values):
            if self._codes is None and is_class_id(value):
                self._numbers.append(int(value))
                continue
            try:
                wrong = self._add(value.decode() if isinstance(value, bytes) else value)
            except (DataError, UnicodeDecodeError) as error:
                raise DataError(f"{place(position)}: the label: {error}") from error
            if wrong and not self._wrong_number:
                self._wrong_number = f"{place(position)}: {wrong}"

    def _add(self, value: str | int) -> str:
        """Add a label; return a fault if it is a number that counts only as a name."""
        text = str(value).strip()
        if self._codes is None and is_class_id(text):
            self._numbers.append(int(text))
            return ""
        wrong = f"expected an integer of 0 or more, or a name, got '{printable(text[:100])}'"
        if not text or (self._codes is None and isinstance(value, int)):
            raise DataError(wrong)
        if self._codes is None:
            codes = self._codes = {}
            written = map(str, self._numbers)  # their only form
            self._numbers = array("q", [codes.setdefault(name, len(codes)) for name in written])
        self._numbers.append(self._codes.setdefault(check_name(text), len(self._codes)))
        is_number = is_class_id(text) or (_NUMBER.fullmatch(text) and not text.isdigit())
        self._is_name_seen = self._is_name_seen or not is_number
        return wrong if is_number and not is_class_id(text) else ""

    def __len__(self) -> int:
        return len(self._numbers)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return ``labels``, int64 [N].

        If they are names, a label is the rank of its name, and the result includes `packed_names`. Raises
        DataError if all are numbers, but one is not an integer of 0 or more.
        """
        if self._wrong_number and not self._is_name_seen:
            raise DataError(f"{self._wrong_number}; if all are names, call the column {NAMES_COLUMN}")
        labels = np.array(self._numbers, np.int64)
        if self._codes is None:
            return {"labels": labels}
        names, ranks = ranked(self._codes)
        return {"labels": np.array([ranks[name] for name in self._codes], int)[labels], **packed_names(names)}


def is_class_id(value: Label) -> bool:
    """Return whether a label is an integer of 0 or more, in its shortest form if it is text."""
    if isinstance(value, int):
        return 0 <= value < 10**_MAX_DIGITS
    is_shortest = len(value) == 1 or value[:1] not in ("0", b"0")
    return is_shortest and value.isdigit() and value.isascii() and len(value) <= _MAX_DIGITS


def check_class_name(name: str) -> str:
    """Return the name of a numbered class, as `check_name`, but with the bytes of any folder name."""
    check_name(_RAW_BYTES.sub("", name))
    return name


def with_label_map(labels: np.ndarray, names: list[str] | None, label_map: str | Path | None) -> np.ndarray:
    """Return the labels, int64 [N], mapped by a label map if given; DataError if it lacks a name."""
    if label_map is None:
        return labels
    ids = read_label_map(Path(label_map))
    missing = [name for name in names or [] if name_key(name) not in ids]
    if missing:
        raise DataError(
            f"{label_map} has no id for '{printable(missing[0])}' (and {len(missing) - 1} others)"
        )
    return np.array([ids[name_key(name)] for name in names or []], dtype=np.int64)[labels]


def read_label_map(path: Path) -> dict[str, int]:
    """Return `name_key` of a class -> id from a ``.json`` object, or from lines of ``name<TAB>id``.

    Several names may share an id. Raises DataError if the file cannot be read or an id is not an integer of 0
    or more.
    """
    ids: dict[str, int] = {}
    try:
        is_json = path.suffix.lower() == ".json"
        data = read_regular(path, _MOST_JSON if is_json else 2**34)
        text = without_mark(data, f"the label map {path}").decode()
        for name, class_id in (parse_json(text) if is_json else _parse_lines(text)).items():
            is_new = ids.setdefault(name_key(name), class_id) == class_id
            if type(class_id) is not int or not 0 <= class_id < 2**62 or not is_new:
                raise ValueError(f"'{name}' has the id {class_id!r}; expected one integer of 0 or more")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"the label map {path} is not of names and ids, or unreadable: {error}") from error
    return ids


def _parse_lines(text: str) -> dict[str, int]:
    ids: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        name, _, label = line.rstrip("\r").rpartition("\t")
        if line.strip():
            if not name or "\r" in name or not (label.isascii() and label.isdigit()) or name in ids:
                raise ValueError(f"line {number}: expected '<name><TAB><id>', each name once")
            ids[name] = int(label)
    return ids


def packed_names(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the class names of the labels from 0 as the array ``names``, JSON; see `ColumnSource`."""
    return {"names": np.frombuffer(json.dumps(names).encode(), np.uint8)}


class ColumnSource(IndexedSource):
    """A source with an image column and a label column; ``label_map`` maps class names to ids."""

    def __init__(
        self,
        location: str | Path,
        *,
        image_column: str | None = None,
        label_column: str | None = None,
        label_map: str | Path | None = None,
    ) -> None:
        labels = LabelReader(names_wanted=label_map is not None)
        found = self._open(str(location), image_column, label_column, labels)
        names: list[str] | None = json.loads(found["names"].tobytes()) if "names" in found else None
        if names is not None and label_map is None:
            self.class_names = dict(enumerate(names))
        self._labels = with_label_map(found["labels"], names, label_map)

    @abstractmethod
    def _open(
        self, location: str, image: str | None, label: str | None, labels: LabelReader
    ) -> Mapping[str, np.ndarray]:
        """Open it with these columns; return the label arrays, from `labels` or a stored index."""
