"""The version of plsc."""

__version__ = "0.1.0"
