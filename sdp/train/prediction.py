"""What a run's model learns to predict, where the configuration leaves that to what the run begins with."""

from sdp.config import TrainConfig
from sdp.datasets.output import read_json
from sdp.errors import ConfigError, Problem
from sdp.model import sources
from sdp.model.checkpoints import CONFIG, find_checkpoint


def with_prediction(config: TrainConfig) -> TrainConfig:
    """Return the configuration with objective.prediction settled."""
    if config.objective.prediction is not None:
        return config
    where, own = _of_beginning(config)
    if own == "epsilon" and config.objective.zero_terminal_snr:
        hint = "where no signal is left, the noise tells the model nothing"
        got = f"null, and {where} was trained to predict epsilon"
        raise ConfigError([Problem("objective.prediction", "v while zero_terminal_snr is on", got, hint)])
    return config.model_copy(update={"objective": config.objective.model_copy(update={"prediction": own})})


def prediction_note(config: TrainConfig) -> str | None:
    """Return a line that says so if the weights that a run begins with were trained to predict something else."""
    if config.model.start_from is None and config.model.unet == "new":
        return None
    where, own = _of_beginning(config)
    if own == config.objective.prediction:
        return None
    return (
        f"objective.prediction is {config.objective.prediction}, and {where} was trained to predict {own}: its weights "
        "have to learn another target; null goes on with theirs"
    )


def _of_beginning(config: TrainConfig) -> tuple[str, str]:
    """Return the key of what the run begins with, and what that predicts."""
    options = config.storage.options()
    if config.model.start_from is not None:
        trained = read_json(find_checkpoint(config.model.start_from, options), CONFIG)
        return "model.start_from", trained["objective"]["prediction"]
    return "model.source", sources.prediction_type(config.model.source, storage=options)
