"""Property tests are not timed: a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None, max_examples=3000)
settings.load_profile("untimed")
