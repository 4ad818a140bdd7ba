"""What goes wrong around a run and is its user's to mend."""

from ..errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be resumed from or written, or a folder that holds another run."""
