"""Property tests draw the same examples each time: a failure belongs to the change that made it."""

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.load_profile("same")
