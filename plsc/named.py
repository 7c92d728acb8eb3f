"""Code of the user's by its name, ``package.module:function``: a function, or a class."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from plsc.errors import OptionError, PlscError, did_you_mean, kind_and_line


def name_of(function: Callable[..., Any]) -> str:
    """Return ``module:name`` of a function, of a class, or of what functools.partial wraps."""
    inner = getattr(function, "func", function)
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}:{named.__qualname__}"


def load_function(reference: str, option: str, setter: str) -> Callable[..., Any]:
    """Import ``package.module:function``: a function, or a class that is called. Runs the user's code.

    Raises:
        OptionError: no such module, nothing callable of that name in it, or it was defined in a script.
    """
    module_name, _, name = reference.partition(":")
    if module_name == "__main__" or "<" in name:
        raise OptionError(
            f"{option} is {reference!r}, which was defined in the script that trained; call {setter} in this "
            "one, too, or put it into a module of its own and name it 'module:function'"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except PlscError:
        raise
    except Exception as error:  # anything may happen while a user's module runs
        said = kind_and_line(error)
        raise OptionError(
            f"cannot import {module_name!r} of {option} {reference!r}: {said}; name it "
            "'package.module:function' and start where Python finds the package"
        ) from error
    for part in name.split("."):
        near = did_you_mean(part, dir(found))
        found = getattr(found, part, None)
        if found is None:
            raise OptionError(f"{option} is {reference!r}, but {module_name} has no {part!r}{near}")
    if not callable(found):
        raise OptionError(
            f"{option} is {reference!r}, which is a {type(found).__name__}; expected a function or class"
        )
    return found
