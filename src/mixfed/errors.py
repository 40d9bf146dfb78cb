"""The one error that a user is meant to read."""


class InputError(ValueError):
    """Something the user gave cannot work; the message is one sentence that says what and how to mend it.

    The command line prints the sentence and exits with code 2; it never shows a traceback for this class.
    """


class RunStopped(RuntimeError):
    """A run cannot go on through no fault of its input (every update of a round was NaN, say); one sentence."""
