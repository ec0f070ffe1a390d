"""What online training's pool reserves, by what the cluster has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdp.train.online import Lately, Staff, plan_staff
from tests.training import config

IMAGES: Any = SimpleNamespace(slice_rows=64, resolution=64)


def staff(root: Path, cpus: float, trainers: int = 2, **changes: Any) -> Staff:
    return plan_staff(
        config(root, data__mode="online", encode__use_gpu=False, **changes), IMAGES, {"CPU": cpus}, trainers
    )


@pytest.mark.parametrize(("cpus", "encoder", "transform"), [(2, 0.0, 0.0), (3, 0.0, 1.0), (4, 1.0, 1.0)])
def test_where_cpus_are_few_they_are_shared_rather_than_reserved(
    tmp_path: Path, cpus: float, encoder: float, transform: float
) -> None:
    found = staff(tmp_path, cpus)
    assert (found.encoder_cpus, found.transform_cpus) == (encoder, transform)


@pytest.mark.parametrize("cpus", [0, 2])
def test_where_nodes_come_on_demand_all_reserve_what_they_need(tmp_path: Path, cpus: float) -> None:
    """What reserves nothing brings no node, and runs on the head, beside the driver."""
    found = staff(tmp_path, cpus, scaling__can_grow=True)
    assert (found.encoder_cpus, found.transform_cpus) == (1.0, 1.0)
    assert found.first_transforms >= 1


def test_how_busy_encoders_are_is_of_late_and_not_of_all_time() -> None:
    lately = Lately(60)
    assert lately.share(0, 0, 0, resting=True) == 0
    day = 24 * 3600.0
    for second in range(0, int(day), 30):
        lately.share(second, 0.99 * second, 0.01 * second, resting=False)
    busy, idle = 0.99 * day, 0.01 * day
    assert lately.share(day, busy, idle, resting=False) == pytest.approx(0.99)
    assert lately.share(day + 60, busy + 15, idle + 45, resting=False) < 0.6
    assert lately.share(day + 120, busy + 15, idle + 45, resting=False) == pytest.approx(0.25), "nothing was told since"
    assert lately.share(day + 180, busy + 15, idle + 45, resting=True) == 0, "they have nothing to do"
