"""From readings to metric families, without a driver."""

import pytest

from sdp.exporter.catalogue import CATALOGUE
from sdp.exporter.metrics import Snapshot, families, grouped
from sdp.exporter.nvml import FIELDS, READINGS, GpuReading, Identity

IDENTITY = Identity(3, "GPU-3", "NVIDIA A100-SXM4-80GB")


def samples(snapshot: Snapshot) -> dict[tuple[str, str], float]:
    """Return a dict of (name, distinguishing label) to value."""
    result = {}
    for family in families(snapshot):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in {"gpu", "uuid", "product", "node"}}
            result[sample.name, ",".join(rest.values())] = sample.value
    return result


def test_names_are_unique_and_every_help_text_is_a_sentence() -> None:
    assert len({row.name for row in CATALOGUE}) == len(CATALOGUE)
    assert all(row.help.endswith(".") for row in CATALOGUE)
    read = [(metric, *labels.values()) for metric, labels, *_ in (*READINGS, *FIELDS)]
    assert len(set(read)) == len(read)
    assert {metric for metric, *_ in read} <= {row.name for row in CATALOGUE}


def test_a_value_that_a_gpu_lacks_is_missing_rather_than_zero() -> None:
    series = samples(Snapshot(node="n1", up=True, gpus=(GpuReading(IDENTITY),)))
    assert {name for name, _ in series if name.startswith("sdp_gpu_")} == {"sdp_gpu_up"}
    reasons = [("sdp_gpu_throttle_reason", {"reason": r}, held) for r, held in (("gpu_idle", 1), ("sw_power_cap", 0))]
    gpu = GpuReading(IDENTITY, (("sdp_gpu_power_watts", {}, 0.0), *reasons))
    series = samples(Snapshot(node="n1", up=True, gpus=(gpu,)))
    assert series["sdp_gpu_power_watts", ""] == 0
    assert series["sdp_gpu_throttle_reason", "gpu_idle"] == 1
    assert series["sdp_gpu_throttle_reason", "sw_power_cap"] == 0


def test_only_metrics_in_the_catalogue_can_be_exported() -> None:
    with pytest.raises(KeyError):
        grouped(iter([("sdp_gpu_mood", {}, 1.0)]))
    with pytest.raises(AssertionError, match="labels"):
        grouped(iter([("sdp_exporter_up", {"node": "n1", "mood": "fine"}, 1.0)]))
