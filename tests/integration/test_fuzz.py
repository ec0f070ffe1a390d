"""Some damaged files of each kind; `make fuzz` tries thousands."""

from collections import Counter
from pathlib import Path

from tests.fuzz import __main__ as fuzz
from tests.fuzz.files import damaged_files
from tests.fuzz.images import seeds


def test_damaged_images_become_pixels_or_a_reason() -> None:
    result = fuzz.run(400, seed=7)
    assert result.broken == {}
    reasons = Counter(reason for _, reason in result.outcomes.elements())
    assert reasons.total() == 400
    assert min(reasons["pixels"], reasons["undecodable"], reasons["not_an_image"]) > 20, reasons
    assert {name for name, _ in result.outcomes} == {seed.name for seed in seeds()}


def test_damaged_datasets_and_checkpoints_are_read_or_refused_in_a_line(tmp_path: Path) -> None:
    readings = list(damaged_files(tmp_path, 30, seed=7))
    assert [str(reading) for reading in readings if reading.broken] == []
    assert len({reading.verdict for reading in readings}) == 2
