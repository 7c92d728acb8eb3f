"""Secrets in URLs, left out of all that a user or a log sees."""

from __future__ import annotations

import re
from typing import Any

_SCHEME = r"[a-z][a-z0-9+.-]{1,20}:/{1,2}"  # pathlib makes one slash of two
_CHAIN = re.compile(r"(::)(?=[a-z][a-z0-9+.-]*(?:::|:/))", re.IGNORECASE)
# A '?' is a wildcard, too, but not in front of name=, nor over HTTP.
_QUERY = re.compile(r"(https?:/[^?]*\?|[?#](?=[^/?#]*=)).*", re.IGNORECASE)
_HOST = r"(?:\[[^\]@]*\]|[^@:/?#]*)(?::\d{0,5})?(?:[/?#]|$)"
# The name alone; or name and password, which may hold '/' and '@', to the last '@', or to a '?' in them.
_USER = re.compile(rf"({_SCHEME})(?!{_HOST})(?:[^@:/?#]*@|.*@|[^@/]*(?=[?#]\*\*\*))", re.IGNORECASE)
_USER_OF_CLIENT = re.compile(r"[^/@:'\"(=]*:.*@")


def shown(text: str, *, by_client: bool = False) -> str:
    """Return a URL, or a text with URLs in it, without users, passwords and the values of queries.

    Each URL of a chain (``zip://a.zip::https://...``) is parsed by itself. A text without secrets comes back
    as it is. by_client: it was written by a library, which may have taken the scheme off.
    """

    def redact(word: re.Match[str]) -> str:
        if not by_client and ":/" not in word[0]:
            return word[0]
        url = word[0].rstrip("'\")]}>,.;:")
        parts = [_USER.sub(r"\1", part) for part in _CHAIN.split(_QUERY.sub(r"\1***", url))]
        if by_client:
            parts = [_USER_OF_CLIENT.sub("", part) for part in parts]
        return "".join(parts) + word[0][len(url) :]

    return re.sub(r"\S+", redact, text)


def without_secrets(values: Any) -> Any:
    """Return nested options with all their strings as `shown` has them."""
    if isinstance(values, dict):
        return {key: without_secrets(value) for key, value in values.items()}
    if isinstance(values, list):
        return [without_secrets(value) for value in values]
    return shown(values) if isinstance(values, str) else values
