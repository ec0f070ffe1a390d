"""The operations of one sample."""

import pytest

from sdp.families import flops
from sdp.families.sd import SD, SD2


@pytest.mark.parametrize(("resolution", "gigaflops"), [(256, 539), (512, 2409)])
def test_stable_diffusions_unet_costs_what_was_counted_by_others(resolution: int, gigaflops: float) -> None:
    assert flops(SD, SD2.unet, resolution // 8) / 1e9 == pytest.approx(gigaflops, rel=0.01)
