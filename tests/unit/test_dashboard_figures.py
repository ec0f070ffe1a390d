"""Numbers and ticks of the drawn dashboards."""

import pytest

from scripts.dashboards.figures import figure, ticks


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.3126, "percentunit", "31.3 %"), (0, "percentunit", "0 %"), (124, "none", "124"), (1e-4, "sci", "1.0e-04"),
        (30 * 2**30, "bytes", "30 GiB"), (512, "bytes", "512 B"), (90, "s", "1.5 min"), (0.0423, "s", "42.3 ms"),
        (2350, "watt", "2.35 kW"), (1.41e9, "hertz", "1.41 GHz"), (34_000_000, "Bps", "34 MB/s"),
        (88, "celsius", "88 °C"), (1234567, "short", "1.23M"), (184.6, "suffix: img/s", "185 img/s"),
    ],
)  # fmt: skip
def test_a_figure_has_three_digits_and_its_unit(value: float, unit: str, text: str) -> None:
    assert figure(value, unit) == text


def test_ticks_are_round_and_reach_around() -> None:
    assert ticks(0, 37) == [0, 10, 20, 30, 40]
    assert ticks(-3, 9) == [-5, 0, 5, 10]
    assert ticks(0, 0) == [0, 0.25]
