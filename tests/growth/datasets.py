"""Parquet footers and strings, tables, tars and JSON."""

from tests.growth import Case

CASES: tuple[Case, ...] = ()
