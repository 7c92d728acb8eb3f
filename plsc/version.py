"""The version of plsc, and its name for pip."""

__version__ = "0.1.0"
DISTRIBUTION = "plsc-torch"  # on the public index, plsc is PaddlePaddle's


def install(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
