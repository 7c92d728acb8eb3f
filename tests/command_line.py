"""Options as the command line sets them."""

from plsc.cli.parser import CommandParser
from plsc.cli.run import COMMANDS
from plsc.config import Options


def options_from(*flags: str) -> Options:
    """The options of `plsc train` with these flags."""
    return CommandParser("plsc train", COMMANDS["train"]).read(flags)["options"]
