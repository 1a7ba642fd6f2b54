"""The one error of this room."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or trusted; the message says which file and what to do."""
