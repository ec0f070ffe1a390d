"""Numbers and ticks of the drawn dashboards."""

import pytest

from scripts.dashboards.figures import figure, short, ticks


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.3126, "percentunit", "31.3 %"),
        (0, "percentunit", "0 %"),
        (30 * 2**30, "bytes", "30 GiB"),
        (512, "bytes", "512 B"),
        (90, "s", "1.5 min"),
        (0.0423, "s", "42.3 ms"),
        (2350, "watt", "2.35 kW"),
        (1.41e9, "hertz", "1.41 GHz"),
        (34_000_000, "Bps", "34 MB/s"),
        (88, "celsius", "88 °C"),
        (1234567, "short", "1.23M"),
        (184.6, "suffix: img/s", "185 img/s"),
        (1e-4, "sci", "1.0e-04"),
        (124, "none", "124"),
    ],
)
def test_a_figure_is_read_as_grafana_s_units_are(value: float, unit: str, text: str) -> None:
    assert figure(value, unit) == text


def test_three_digits_count() -> None:
    assert [short(value) for value in (0.012345, 1.5, 12.34, 123.4, 1000)] == ["0.0123", "1.5", "12.3", "123", "1000"]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 37, [0, 10, 20, 30, 40]),
        (0, 0, [0, 0.25]),
        (-3, 9, [-5, 0, 5, 10]),
    ],
)
def test_ticks_are_round_and_reach_around(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)
