"""A training's configuration once all is settled that its keys leave to this machine, to the model and to prices.

The defaults that depend on other keys are settled when it is parsed (`TrainConfig.settled`).
"""

from pathlib import Path
from typing import Any

from sdp.config.train import LoraConfig, PricesConfig, TrainConfig
from sdp.console import say
from sdp.errors import ConfigError, Problem
from sdp.model import sources
from sdp.model.checkpoints import TrainState, find_checkpoint, read_config
from sdp.plan.prices import load_prices
from sdp.storage import is_read_only, open_storage
from sdp.train.run_folder import RunFolder


def settled(config: TrainConfig) -> tuple[TrainConfig, ...]:
    """Return the configuration of each phase: absolute URIs, then the model's prediction, then prices by the hour."""
    config = _absolute(config)
    objective = config.objective.replaced(prediction=_prediction(config))
    return config.replaced(objective=objective, lora=_with_targets(config), prices=_known_prices(config)).phases


def with_hours(phase: TrainConfig, earlier: TrainState) -> TrainConfig:
    """Return a phase's configuration with what the phase before has left of the budget as `max_hours`.

    Money becomes hours of all trainers and encoders that the job may have, so that it never costs more.
    """
    hours = [] if phase.max_hours is None else [phase.max_hours - earlier.seconds / 3600]
    prices = phase.prices.hourly
    per_hour = phase.scaling.most * prices.get("trainer_hour", 0.0)
    if phase.data.mode == "online":
        per_hour += phase.encode.most * prices.get("encoder_hour", 0.0)
    if phase.max_cost is not None and per_hour:
        state = RunFolder.of(phase).state()
        left = phase.max_cost - sum(each.cost(prices) for each in (earlier, state))
        hours.append(state.seconds / 3600 + left / per_hour)
    return phase.replaced(max_hours=max(0.0, min(hours))) if hours else phase


def _absolute(config: TrainConfig) -> TrainConfig:
    """Return the configuration with absolute URIs, since a worker has another working directory."""
    options = config.storage.options()

    def absolute(uri: str | None) -> str | None:
        if uri is None or is_read_only(uri):
            return uri
        return open_storage(uri, options).uri

    source, model, second = config.source, config.model, config.phase_2
    also = tuple(other.replaced(uri=absolute(other.uri)) for other in source.also)
    tables = tuple(table.replaced(uri=absolute(table.uri)) for table in source.tables)
    local = Path(model.source)
    folder = str(local.absolute()) if local.is_dir() else None
    return config.replaced(
        source=source.replaced(uri=absolute(source.uri), also=also, tables=tables),
        output=config.output.replaced(uri=absolute(config.output.uri)),
        model=model.replaced(source=folder, start_from=absolute(model.start_from)),
        lora=config.lora.replaced(start_from=absolute(config.lora.start_from)),
        evaluate=config.evaluate.replaced(source=absolute(config.evaluate.source)),
        phase_2=second.replaced(source=absolute(second.source)),
    )


def _prediction(config: TrainConfig) -> str:
    """Return objective.prediction, by default that of the model; refuse what the model's family lacks."""
    objective, key = config.objective, "objective.prediction"
    own: Any = objective.prediction
    got = repr(own)
    if own is None:
        origin, own = _own_prediction(config)
        got = f"null, and {origin} was trained to predict {own}"
        if own == "epsilon" and objective.zero_terminal_snr:
            hint = "at zero SNR the noise is the input itself, so epsilon teaches nothing"
            raise ConfigError([Problem(key, "v while zero_terminal_snr is on", got, hint)])
    options = config.storage.options()
    family = sources.family(config.model.source, storage=options)
    if sources.is_distilled(config.model.source, storage=options):
        hint = "it draws with a LoRA of its base"
        raise ConfigError([Problem("model.source", "a base model", f"{config.model.source}, which is distilled", hint)])
    if own not in family.predictions:
        expected = f"{' or '.join(family.predictions)} for a model of {family.name}"
        raise ConfigError([Problem(key, expected, got, "or choose another model.source")])
    if own == "flow" and (objective.min_snr_gamma or objective.zero_terminal_snr):
        hint = "set min_snr_gamma to null and zero_terminal_snr to false: a flow has no noise schedule"
        raise ConfigError([Problem(key, "epsilon or v with these settings", got, hint)])
    if config.model.train_text_encoder and not family.trains_text:
        hint = f"only some layers of the text encoder of {family.name} are used"
        raise ConfigError([Problem("model.train_text_encoder", "false", "true", hint)])
    skipped = max(phase.objective.skipped_tokens for phase in config.phases)
    if skipped and not family.skips_tokens(sources.denoiser_config(config.model.source, storage=options)):
        key = "objective.skipped_tokens" if objective.skipped_tokens else "phase_2.skipped_tokens"
        hint = f"this model of {family.name} has no blocks that tokens may skip"
        raise ConfigError([Problem(key, "0", str(skipped), hint)])
    return str(own)


def _with_targets(config: TrainConfig) -> LoraConfig:
    """Return the LoRA's configuration, by default with the layers of the file that it begins with."""
    lora, usual = config.lora, LoraConfig()
    if lora.start_from is None:
        return lora
    from sdp.model.trained import read_lora  # brings torch

    matrices = read_lora(lora, config.model.source, config.storage.options())
    rank = next(len(value) for name, value in matrices.items() if ".lora_A." in name)
    if rank != lora.rank:
        raise ConfigError([Problem("lora.rank", f"{rank}, as in {lora.start_from}", str(lora.rank), "set it")])
    layers = {name.partition(".")[2].rpartition(".lora_")[0] for name in matrices if not name.startswith("text_")}
    return lora.replaced(targets=tuple(sorted(layers))) if lora.targets == usual.targets and layers else lora


def _own_prediction(config: TrainConfig) -> tuple[str, str]:
    """Return the key of the model that the run begins with, and the prediction that it was trained for."""
    options = config.storage.options()
    if config.model.start_from is not None:
        trained = read_config(find_checkpoint(config.model.start_from, options))
        return "model.start_from", trained["objective"]["prediction"]
    return "model.source", sources.prediction_type(config.model.source, storage=options)


def _known_prices(config: TrainConfig) -> PricesConfig:
    """Return the prices by the hour, with the known ones of the instance types that are named."""
    known: dict[str, float | None] = {}
    for name, instance in (("trainer_hour", config.prices.trainer_hour), ("encoder_hour", config.prices.encoder_hour)):
        if not isinstance(instance, str):
            continue
        hour = load_prices(None).gpu_hour(instance)
        if hour is None and config.max_cost is not None and name == "trainer_hour":
            expected = f"null while no price of {instance} is known"
            raise ConfigError([Problem("max_cost", expected, repr(config.max_cost), "set prices.trainer_hour")])
        if hour is None:
            say(f"train: prices.{name}: no known price of {instance}, so none counts; set a number")
        known[name] = hour
    return config.prices.model_copy(update=known)
