"""The error for damaged checkpoints."""

from sdp.errors import DatasetError, ModelError


class DamagedCheckpoint(ModelError, DatasetError):
    """A file of a checkpoint is missing, truncated, changed or malformed."""

    def __init__(self, what: str, hint: str = "use another checkpoint") -> None:
        super().__init__(what, hint)  # both are in args, from which unpickling makes it
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}"
