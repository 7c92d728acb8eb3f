"""The options of a run: one table, and what was set of it resolved into a frozen configuration."""

from plsc.config.options import Config, Options, all_options, find_option

__all__ = ["Config", "Options", "all_options", "find_option"]
