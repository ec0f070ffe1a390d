"""The configuration of each job."""

from collections.abc import Mapping

from sdp.config.download import DownloadConfig
from sdp.config.dreambooth import DreamboothConfig
from sdp.config.evaluate import EvaluateConfig
from sdp.config.generate import GenerateConfig
from sdp.config.process import ProcessConfig
from sdp.config.score import ScoreConfig
from sdp.config.shared import JobConfig
from sdp.config.train import TrainConfig

JOBS: Mapping[str, type[JobConfig]] = {
    "download": DownloadConfig,
    "score": ScoreConfig,
    "process": ProcessConfig,
    "train": TrainConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "dreambooth": DreamboothConfig,
}
"""The model of each job, in the order of the pipeline."""
