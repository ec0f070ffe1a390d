"""Checks and decisions before anything costly begins: source, CLIP, predictor, output."""

from sdp.config.score import ScoreConfig
from sdp.encode.recipe import TEXT, EncoderSettings, Recipe
from sdp.errors import UserError
from sdp.model import networks
from sdp.model.clip import find_predictor, view_of
from sdp.process.prepare import Prepared, head_of
from sdp.score.stages import HASH, HASHED_SIDE, ScoreSpec
from sdp.sources.pictures import open_section
from sdp.storage import open_storage

_TEXT_BATCH = 256


def prepare(config: ScoreConfig) -> Prepared[ScoreConfig, ScoreSpec]:
    """Check everything that is cheap to check. Writes nothing."""
    options, score = config.storage.options(), config.score
    output = open_storage(config.output.uri, options)
    clip = predictor = None
    if score.clip_model is not None:
        clip = networks.find(score.clip_model, "score.clip_model", storage=options)
        if clip.kind != "clip":
            raise UserError(f"score.clip_model: expected a CLIP model, got {clip.source}, which is of type {clip.kind}")
    if clip is not None and score.aesthetics is not None:
        predictor = find_predictor(score.aesthetics, clip, options)
    view = None if clip is None else view_of(clip)
    pictures = open_section(config.source, options)
    side = HASHED_SIDE if view is None else view.side
    batch_sizes = {side: config.encode.batch_size, TEXT: _TEXT_BATCH}
    spec = ScoreSpec(
        recipe=Recipe((HASH,) if view is None else (HASH, side), seed=config.seed),
        settings=EncoderSettings(dtype=config.encode.dtype, batch_sizes=batch_sizes),
        columns=pictures.columns,
        storage=options,
        output=output,
        foreign=pictures.dataset is None,
        clip=None if clip is None else clip.source,
        view=view,
        aesthetics=predictor,
    )
    digests = {"clip.digest": clip and clip.digest, "aesthetics.sha256": predictor and predictor.sha256}
    head = head_of(config, ScoreSpec.kind, config.output.rows_per_file, pictures, digests)
    models = {"clip": f"{clip.source} sha256:{clip.digest}"} if clip else {}
    if predictor is not None:
        models["aesthetics"] = f"{predictor.uri} sha256:{predictor.sha256}"
    return Prepared(config, spec, pictures, head, models)
