"""The one exception that stands for a user's mistake."""


class InputError(ValueError):
    """A mistake in what the user gave: its message is one line that says what is wrong and what to do."""
