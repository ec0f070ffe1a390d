"""Numbers in readable form, and the ticks of an axis."""

import math
from collections.abc import Sequence

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_THOUSANDS: Sequence[tuple[float, str]] = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY: Sequence[tuple[float, str]] = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_TIMES: Sequence[tuple[float, str]] = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SUFFIXES = {"cps": "/s", "celsius": " °C"}
_SCALED = {"watt": "W", "hertz": "Hz", "Bps": "B/s"}


def figure(value: float, unit: str) -> str:
    """Format a value in one of Grafana's units, or in the one after `suffix: `."""
    if unit == "percentunit":
        return f"{short(100 * value)} %"
    if unit == "bytes":
        return _scaled(value, _BINARY, "B")
    if unit == "s":
        return _scaled(value, _TIMES, "s")
    if unit == "sci":
        return f"{value:.1e}"
    if unit.startswith("suffix: "):
        return f"{short(value)} {unit.removeprefix('suffix: ')}"
    if unit == "none":
        return short(value)
    scale, letter = next(((s, t) for s, t in _THOUSANDS if abs(value) >= s), (1.0, ""))
    if unit in _SCALED:
        return f"{short(value / scale)} {letter}{_SCALED[unit]}"
    return f"{short(value / scale)}{letter}{_SUFFIXES.get(unit, '')}"


def short(value: float) -> str:
    """Format a number with three significant digits and no trailing zeros."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that span low to high."""
    span = (high - low) or 1.0
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in _STEPS if s * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def scale_of(unit: str, high: float) -> float:
    """Return the unit in which ticks are round numbers: GiB rather than bytes, minutes rather than seconds."""
    scales = {"bytes": _BINARY, "s": _TIMES}.get(unit, ())
    return next((scale for scale, _ in scales if high >= scale), 1.0)


def _scaled(value: float, scales: Sequence[tuple[float, str]], plain: str) -> str:
    scale, unit = next(((s, t) for s, t in scales if abs(value) >= s), (1.0, plain))
    return f"{short(value / scale)} {unit}"
