"""The prediction target of a run, if the configuration leaves it to the model that the run begins with."""

from sdp.config import TrainConfig
from sdp.datasets.output import read_json
from sdp.errors import ConfigError, Problem
from sdp.model import sources
from sdp.model.checkpoints import CONFIG, find_checkpoint


def with_prediction(config: TrainConfig) -> TrainConfig:
    """Return the configuration with objective.prediction resolved."""
    if config.objective.prediction is not None:
        return config
    key, own = _own_prediction(config)
    if own == "epsilon" and config.objective.zero_terminal_snr:
        hint = "at zero SNR the noise is the input itself, so epsilon teaches nothing"
        got = f"null, and {key} was trained to predict epsilon"
        raise ConfigError([Problem("objective.prediction", "v while zero_terminal_snr is on", got, hint)])
    return config.replaced(objective=config.objective.replaced(prediction=own))


def prediction_note(config: TrainConfig) -> str | None:
    """Return a line for the user if the weights that a run begins with were trained for another target."""
    if config.model.start_from is None and config.model.unet == "new":
        return None
    key, own = _own_prediction(config)
    if own == config.objective.prediction:
        return None
    return (
        f"objective.prediction is {config.objective.prediction}, and {key} was trained to predict {own}: its weights "
        "have to learn another target; null keeps theirs"
    )


def _own_prediction(config: TrainConfig) -> tuple[str, str]:
    """Return the key of the model that the run begins with, and the prediction that it was trained for."""
    options = config.storage.options()
    if config.model.start_from is not None:
        trained = read_json(find_checkpoint(config.model.start_from, options), CONFIG)
        return "model.start_from", trained["objective"]["prediction"]
    return "model.source", sources.prediction_type(config.model.source, storage=options)
