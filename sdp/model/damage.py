"""A checkpoint that is not what was written."""

from sdp.errors import DatasetError, ModelError


class DamagedCheckpoint(ModelError, DatasetError):
    """A file of a checkpoint that is missing, cut short, changed, or not what sdp writes there."""

    def __init__(self, what: str, hint: str = "use another checkpoint") -> None:
        super().__init__(what, hint)  # both in args: it is made anew where it crosses processes
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}"
