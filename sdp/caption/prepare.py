"""Checks and decisions before anything costly begins: source, model or server, output."""

import hashlib

from sdp.caption.stages import CaptionSpec
from sdp.config.caption import CaptionConfig
from sdp.encode.recipe import EncoderSettings, Recipe
from sdp.model import networks
from sdp.process.prepare import Prepared, head_of
from sdp.sources.pictures import open_section
from sdp.storage import open_storage


def prepare(config: CaptionConfig) -> Prepared[CaptionConfig, CaptionSpec]:
    """Check everything that is cheap to check. Writes nothing."""
    options, asked = config.storage.options(), config.captions
    output, pictures = open_storage(config.output.uri, options), open_section(config.source, options)
    network = None
    if asked.url is None:
        network = networks.find(asked.model, "captions.model", storage=options, captions=True)
        digest = network.digest
    else:
        from sdp.caption.server import check_server

        check_server(asked.url, asked.model)
        digest = hashlib.sha256(asked.model.encode()).hexdigest()
    spec = CaptionSpec(
        recipe=Recipe((asked.side,), seed=config.seed),
        settings=EncoderSettings(dtype=config.encode.dtype, batch_sizes={asked.side: config.encode.batch_size}),
        columns=pictures.columns,
        storage=options,
        output=output,
        foreign=pictures.dataset is None,
        asked=asked,
        model=None if network is None else network.source,
    )
    head = head_of(config, CaptionSpec.kind, config.output.rows_per_file, pictures, {"captions.digest": digest})
    where = asked.model if asked.url is None else f"{asked.model} at {asked.url}"
    return Prepared(config, spec, pictures, head, {"captions": f"{where} sha256:{digest}"})
