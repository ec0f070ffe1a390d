"""The requests that the image server saw, by which a test judges how polite a client is."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Visit:
    """One request. Times are seconds of the machine's monotonic clock."""

    host: str
    """The Host header without its port."""
    target: str
    """Path and query."""
    user_agent: str
    began: float
    ended: float | None = None
    """Time when the last byte went to the kernel, or the connection ended."""
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests since the server started or was reset, oldest first."""

    visits: Sequence[Visit]
    connections: int = 0
    """Number of connections that were opened."""

    def at(self, host: str) -> "Traffic":
        """Return the traffic of one host."""
        return Traffic([visit for visit in self.visits if visit.host == host])

    @property
    def requests(self) -> int:
        return len(self.visits)

    @property
    def in_flight(self) -> int:
        return sum(visit.ended is None for visit in self.visits)

    @property
    def most_at_once(self) -> int:
        """The most requests that were unanswered at once."""
        changes = [(visit.began, 1) for visit in self.visits]
        changes += [(visit.ended, -1) for visit in self.visits if visit.ended is not None]
        most = now = 0
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        return most
