"""What a check of `sdp doctor` found."""

from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's."""

    check: str
    state: State
    says: str
    do: str = ""
    """What to do about it; empty where nothing is to be done."""

    def __str__(self) -> str:
        line = f"{self.state:8}{self.check}: {self.says}"
        return f"{line}; {self.do}" if self.do else line

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def ok(check: str, says: str) -> Finding:
    return Finding(check, "ok", says)


def warning(check: str, says: str, do: str = "") -> Finding:
    return Finding(check, "warning", says, do)


def failed(check: str, says: str, do: str = "") -> Finding:
    return Finding(check, "failed", says, do)
