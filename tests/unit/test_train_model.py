"""The noise schedule, the loss and the moving average, against diffusers and by hand."""

from dataclasses import replace

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_snr
from torch import nn

from sdp.families import TICKS
from sdp.model.schedule import Flow, sample_losses
from sdp.train.optimizer import Ema
from tests.training import scaled_linear


def diffusers_schedule(**kwargs: object) -> DDPMScheduler:
    return DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, **kwargs)  # type: ignore[arg-type]


def test_the_schedule_is_stable_diffusions() -> None:
    actual = scaled_linear().alphas_cumprod
    assert len(actual) == 1000
    assert float(actual[-1]) == pytest.approx(0.0046601, abs=5e-8)
    assert torch.allclose(actual, diffusers_schedule().alphas_cumprod, rtol=1e-4)


@pytest.mark.parametrize("zero", [False, True])
def test_noise_and_velocity_are_diffusers(zero: bool) -> None:
    schedule, scheduler = scaled_linear(zero_terminal_snr=zero), diffusers_schedule(rescale_betas_zero_snr=zero)
    latents, noise = torch.randn(5, 4, 8, 8), torch.randn(5, 4, 8, 8)
    timesteps = torch.tensor([0, 1, 500, 998, 999])
    noisy = scheduler.add_noise(latents, noise, timesteps)
    assert torch.allclose(schedule.add_noise(latents, noise, timesteps), noisy, atol=1e-4)
    velocity = scheduler.get_velocity(latents, noise, timesteps)
    assert torch.allclose(replace(schedule, prediction="v").target(latents, noise, timesteps), velocity, atol=1e-4)
    assert schedule.target(latents, noise, timesteps) is noise


def test_min_snr_weights_are_diffusers() -> None:
    timesteps = torch.arange(0, 1000, 7)
    schedule, snr = scaled_linear(), compute_snr(diffusers_schedule(), timesteps)
    of_velocity = replace(schedule, prediction="v")
    capped = torch.stack([snr, torch.full_like(snr, 5.0)], dim=1).min(dim=1)[0]
    assert torch.allclose(schedule.min_snr_weights(timesteps, 5.0), capped / snr, rtol=1e-3)
    assert torch.allclose(of_velocity.min_snr_weights(timesteps, 5.0), capped / (snr + 1), rtol=1e-3)


def test_min_snr_weights_are_finite_where_there_is_no_signal() -> None:
    schedule = scaled_linear(zero_terminal_snr=True)
    for prediction in ("epsilon", "v"):
        assert replace(schedule, prediction=prediction).min_snr_weights(torch.tensor([999]), 5.0).isfinite().all()


def test_the_loss_is_computed_in_fp32_whatever_the_model_computes_in() -> None:
    big = torch.full((1, 4, 8, 8), 300.0, dtype=torch.float16)  # whose square is beyond fp16
    assert sample_losses(big, torch.zeros_like(big)).tolist() == [90_000.0]


def test_the_average_follows_the_weights_with_a_rising_decay() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    ema, by_hand = Ema(dict(model.named_parameters()), 0.5), 1.0
    for step in range(1, 12):
        nn.init.constant_(model.weight, float(step))
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        by_hand = decay * by_hand + (1 - decay) * step
        assert float(ema.state_dict()["weight"]) == pytest.approx(by_hand, rel=1e-6)


def test_a_flows_times_are_uniform_or_in_the_middle_and_move_with_the_shift() -> None:
    def integers(high: int) -> torch.Tensor:
        return (torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1] * high).long()

    uniform, middle, late = (flow.times(integers) / TICKS for flow in (Flow(), Flow(True), Flow(shift=3.0)))
    assert torch.allclose(uniform, torch.linspace(0, 1, 4001)[:-1], atol=1e-4)
    assert middle.std() == pytest.approx(0.2084, abs=2e-3)  # of a logit-normal distribution, by numerical integration
    assert middle.mean() == pytest.approx(0.5, abs=1e-3)
    assert torch.allclose(late, 3 * uniform / (1 + 2 * uniform), atol=1e-6)
    low, high = Flow().times_in(integers, 100, 200).float().aminmax()
    assert (low / TICKS, high / TICKS) == (pytest.approx(0.1, abs=1e-4), pytest.approx(0.2, abs=1e-4))


def test_a_flow_is_the_schedulers_line_from_latents_to_noise() -> None:
    latents, noise = torch.randn(2, 3, 4, 8, 8)
    scheduler = FlowMatchEulerDiscreteScheduler()
    times = torch.tensor([0.1, 0.5, 0.999])
    at = (times * 1000).round().long()
    known = scheduler.timesteps[1000 - at]
    expected = scheduler.scale_noise(latents, known, noise)
    flow, ticks = Flow(), (known / 1000 * TICKS).round().long()
    assert torch.allclose(flow.add_noise(latents, noise, ticks), expected, atol=1e-5)
    assert torch.equal(flow.target(latents, noise, ticks), noise - latents)
