"""Calibration for `sdp plan`: a few steps of a job on the devices of this machine."""

import torch

from sdp.config import TrainConfig
from sdp.config.train import LogConfig, ProfileConfig, SamplesConfig, SecondPhaseConfig, TrainEvaluateConfig
from sdp.errors import UserError
from sdp.hardware import gpu_by_product
from sdp.plan.speeds import Figure
from sdp.storage import open_storage
from sdp.train.job import run
from sdp.train.run_folder import RunFolder, measured_speeds

STEPS = 60
"""Steps of each phase; the later half is measured."""


def gpu_at_hand(config: TrainConfig, planned: str) -> str:
    """Return the name of the GPU that a short run would measure; the planned one if Ray places the trainers."""
    if not config.scaling.in_driver and config.scaling.accelerator is not None:
        return planned
    product = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    if (gpu := gpu_by_product(product)) is None:
        raise UserError(
            f"plan: --calibrate: expected a GPU of the catalogue here, got {product}; run it on a machine with one"
        )
    return gpu.name


def calibrate(config: TrainConfig) -> dict[int, Figure]:
    """Train a few steps of each phase in OUTPUT-calibration; return a trainer's speed by resolution."""
    speeds = dict[int, Figure]()
    for phase in config.phases:
        side = phase.data.resolution
        short = phase.model_copy(update=dict.fromkeys(("max_epochs", "max_samples", "max_hours", "max_cost"))).replaced(
            output=config.output.replaced(uri=f"{config.output.uri.rstrip('/')}-calibration/{side}"),
            model=config.model,
            max_steps=STEPS,
            phase_2=SecondPhaseConfig(),
            log=LogConfig(every_steps=5),
            checkpoint=phase.checkpoint.replaced(every_steps=STEPS),
            evaluate=TrainEvaluateConfig(),
            samples=SamplesConfig(),
            profile=ProfileConfig(),
        )
        run(short)
        folder = RunFolder(open_storage(short.output.uri, short.storage.options()))
        for resolution, figure in measured_speeds(folder.storage, on_cpus=True).items():
            speeds[resolution] = Figure(figure.value, figure.source.replace("measured", "calibrated", 1))
        if (step := folder.latest()) is not None:
            folder.delete_checkpoint(step)  # so that another calibration measures anew
    return speeds
