"""Headers and indexes of tensors."""

from tests.growth import Case

CASES: tuple[Case, ...] = ()
