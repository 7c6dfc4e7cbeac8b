"""Property tests draw the same examples each time: a failure belongs to the change that made it, not to chance."""

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")
