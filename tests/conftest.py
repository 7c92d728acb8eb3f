"""The same examples in every run: a failure that comes and goes helps nobody."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
