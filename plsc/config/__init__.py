"""Options of a run: the table of options, and the frozen configuration resolved from it."""

from plsc.config.options import Config, Options, all_options, find_option

__all__ = ["Config", "Options", "all_options", "find_option"]
