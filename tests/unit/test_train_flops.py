"""The operations of one sample."""

import pytest

from sdp.families import flops
from sdp.families.prx import PRX
from sdp.families.sd import SD, SD2


@pytest.mark.parametrize(("resolution", "gigaflops"), [(256, 539), (512, 2409)])
def test_stable_diffusions_unet_costs_what_was_counted_by_others(resolution: int, gigaflops: float) -> None:
    assert flops(SD, SD2.unet, resolution // 8) / 1e9 == pytest.approx(gigaflops, rel=0.01)


@pytest.mark.parametrize(("resolution", "share"), [(256, 0.665), (512, 0.647)])
def test_half_of_the_tokens_skip_a_third_of_prx(resolution: int, share: float) -> None:
    prx = {"hidden_size": 1792, "depth": 16, "num_heads": 28, "context_in_dim": 1024}
    whole, half = (flops(PRX, prx, resolution // 8, skipped) for skipped in (0.0, 0.5))
    assert half / whole == pytest.approx(share, abs=0.01)
