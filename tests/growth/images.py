"""Image bytes, and the pipe to a decoder."""

from tests.growth import Case

CASES: tuple[Case, ...] = ()
