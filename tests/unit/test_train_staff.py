"""What online training's pool reserves, by what the cluster has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdp.train.online import Staff, plan_staff
from tests.training import config

IMAGES: Any = SimpleNamespace(slice_rows=64, resolution=64)


def staff(root: Path, cpus: float, trainers: int = 2, **changes: Any) -> Staff:
    return plan_staff(config(root, data__mode="online", **changes), IMAGES, {"CPU": cpus}, trainers)


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
