"""Checks of values that come out of a file, each with an error that names the file."""

from __future__ import annotations

from typing import Any

from plsc.errors import CheckpointError


class Checker:
    """Takes values of unknown type from ``source``, a path for the messages, and returns typed ones.

    All of its methods raise CheckpointError.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def wrong(self, what: str, advice: str = "choose another checkpoint") -> CheckpointError:
        """Return the error about this file."""
        return CheckpointError(f"{self.source}: {what}; {advice}")

    def item(self, mapping: dict[str, Any], key: str) -> Any:
        """Return the value that must be there."""
        if key not in mapping:
            raise self.wrong(f"{key!r} is missing")
        return mapping[key]

    def mapping(self, value: object, what: str) -> dict[str, Any]:
        """Return a dictionary (JSON's have text for keys)."""
        if not isinstance(value, dict):
            raise self._type(value, what, "an object")
        return value

    def listing(self, value: object, what: str) -> list[Any]:
        """Return a list."""
        if not isinstance(value, list):
            raise self._type(value, what, "a list")
        return value

    def integer(self, value: object, what: str) -> int:
        """Return a whole number of 0 or more; true and false are none."""
        if type(value) is not int or not 0 <= value < 2**63:
            raise self._type(value, what, "a whole number from 0")
        return value

    def text(self, value: object, what: str) -> str:
        """Return a string."""
        if not isinstance(value, str):
            raise self._type(value, what, "a string")
        return value

    def _type(self, value: object, what: str, expected: str) -> CheckpointError:
        return self.wrong(f"{what} is {repr(value)[:80]}, expected {expected}")
