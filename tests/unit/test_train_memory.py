import pytest

from sdp.config import draft
from sdp.config.train import TrainConfig
from sdp.hardware import GIB, GPUS
from sdp.train.memory import Memory, activations, as_text, estimates

# MB a sample at 256 px, counted by another program on fake tensors.
COUNTED = {("ddp", False): 318, ("ddp", True): 46, ("fsdp", False): 237, ("fsdp", True): 39}


def estimate(gpu: str, *settings: str, workers: int = 8) -> list[Memory]:
    config = draft("train", None, settings).config
    assert isinstance(config, TrainConfig)
    return estimates(config, GPUS[gpu], workers, 8)


@pytest.mark.timeout(300)
def test_the_memory_of_a_trainer_is_what_other_programs_counted() -> None:
    for (kind, recompute), megabytes in COUNTED.items():
        assert activations(kind, "bf16", recompute, 256).per_sample / 1e6 == pytest.approx(megabytes, rel=0.01)

    # torch's FSDPMemTracker over a fake process group of 8: 17.2 GiB, without an average and a text encoder.
    own = estimate("A100-40G", "strategy.kind=fsdp", "data.batch_size=64", "ema.decay=null")[0]
    assert (own.total - own.parts["text encoder"]) / GIB == pytest.approx(17.2, rel=0.02)
    assert own.fits

    small, *others = estimate("A100-40G", "data.batch_size=128")
    assert small.total / 1e9 == pytest.approx(60, rel=0.02)
    assert not small.fits
    assert small.largest_batch < 64
    assert estimate("A100-80G", "data.batch_size=128")[0].fits
    by_name = {each.name: each.largest_batch for each in (small, *others)}
    assert by_name["ddp"] < by_name["fsdp shard_grad_op"]
    assert sum("a lower bound" in name for name in by_name) == 2
    lines = as_text([small, *others], 256)
    assert "ddp, 128 a GPU: does not fit in one A100-40G of 40 GiB" in lines[0]

    hybrid = estimate("A100-40G", "strategy.kind=fsdp", "strategy.shard=hybrid", workers=32)[0]
    plain = estimate("A100-40G", "strategy.kind=fsdp", workers=32)[0]
    assert hybrid.parts["optimizer"] == pytest.approx(4 * plain.parts["optimizer"])
    full = estimate("A100-40G", "strategy.kind=fsdp", "strategy.shard=full_shard", workers=32)[0]
    assert full.parts["all-gathers"] < plain.parts["all-gathers"] / 4
