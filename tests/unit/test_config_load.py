"""From files and overrides to configurations."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sdp.config import JOBS, draft, dump_yaml, identity, json_schema, keys, load, parse
from sdp.config.scalars import parse_scalar
from sdp.config.shared import Range
from sdp.config.yaml_text import parse_document
from sdp.errors import ConfigError

ENDS = ["source.uri=s3://bucket/in", "output.uri=s3://bucket/out"]
COMPLETE = {
    "download": ENDS,
    "score": ENDS,
    "caption": [*ENDS, "captions.model=s3://bucket/vlm"],
    "process": [*ENDS, "model.source=builtin:tiny"],
    "train": [*ENDS, "model.source=builtin:tiny"],
    "generate": [*ENDS, "checkpoint=s3://bucket/run"],
    "evaluate": [*ENDS, "clip.model=s3://bucket/clip"],
    "dreambooth": [*ENDS, "model.source=builtin:tiny", "source.caption=a photo of unqtkn cat"],
}


def write(folder: Path, text: str) -> str:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_and_the_defaults_make_a_configuration_and_overrides_win(tmp_path: Path) -> None:
    text = "source: {uri: meta, url_column: URL}\noutput:\n  uri: images\nlimit: 10\nfetch:\n  timeout_s: 4\n"
    config: Any = load("download", write(tmp_path, text), ["limit=20", "source.caption_column=TEXT", "limit=30"])
    assert (config.source.url_column, config.source.caption_column) == ("URL", "TEXT")
    assert config.limit == 30
    assert config.fetch.timeout_s == 4.0
    assert config.fetch.allow_networks == ()
    assert config.output.rows_per_file == 10_000  # what the reference writes


def test_the_workers_of_a_job_are_a_number_or_a_range() -> None:
    assert load("train", None, [*COMPLETE["train"], "scaling.num_workers=8"]).scaling.num_workers == 8
    elastic = load("train", None, [*COMPLETE["train"], "scaling.num_workers={min: 2, max: 8}"])
    assert elastic.scaling.num_workers == Range(min=2, max=8)
    by_parts = ["scaling.num_workers.min=2", "scaling.num_workers.max=8"]
    assert load("train", None, [*COMPLETE["train"], *by_parts]) == elastic


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [("NVIDIA_TESLA_A10G", "A10G"), ("NVIDIA_A100_80G", "A100-80G"), ("a10g", "A10G"), ("gpu_of_ours", "gpu_of_ours")],
)
def test_the_name_of_rays_constant_means_its_accelerator_type(name: str, accelerator: str) -> None:
    config: Any = load("process", None, [*COMPLETE["process"], f"encode.accelerator={name}"])
    assert config.encode.gpu_type == accelerator


def test_sharding_strategies_are_known_in_capitals() -> None:
    assert train("strategy.shard=SHARD_GRAD_OP").strategy.shard == "shard_grad_op"


def train(*overrides: str) -> Any:
    return load("train", None, [*COMPLETE["train"], *overrides])


@pytest.mark.parametrize(
    ("overrides", "batch", "per_step", "strategy"),
    [
        ([], 128, None, ("ddp", False)),
        (["scaling.accelerator=cpu", "data.resolution=512"], 128, None, ("ddp", False)),
        (["scaling.accelerator=A100", "scaling.num_workers=32"], 128, 2048, ("fsdp", True)),
        (["scaling.accelerator=A100", "data.resolution=512"], 32, 2048, ("ddp", True)),
        (["scaling.accelerator=gpu", "model.denoiser=pretrained"], 128, None, ("ddp", True)),
        (
            ["scaling.accelerator=A100", "scaling.num_workers={min: 8, max: 32}", "data.batch_size=64",
             "data.global_batch_size=null", "strategy={kind: ddp, compile: false}"],
            64, None, ("ddp", False),
        ),
    ],
)  # fmt: skip
def test_trainers_on_gpus_have_the_recipes_batches_and_the_fastest_strategy_by_default(
    overrides: list[str], batch: int, per_step: int | None, strategy: tuple[str, bool]
) -> None:
    config = train(*overrides)
    assert (config.data.batch_size, config.data.global_batch_size) == (batch, per_step)
    assert (config.strategy.kind, config.strategy.compile) == strategy


def test_the_defaults_on_gpus_are_phase_1s_samples_and_a_smaller_batch_at_512_px() -> None:
    second = ("phase_2.max_steps=850000", "phase_2.resolution=512", "phase_2.skipped_tokens=0.5")
    config = train("scaling.accelerator=A100", *second)
    one, two = config.phases
    assert (one.objective.skipped_tokens, two.objective.skipped_tokens) == (0.0, 0.5)
    assert (config.max_steps or 0) * one.data.batch_of(32) == 1_126_400_000
    assert (one.data.batch_size, two.data.batch_size) == (128, 32)
    assert (two.max_steps or 0) * two.data.batch_of(32) == 1_740_800_000
    assert parse("train", config.model_dump(mode="json")) == config  # what is settled stays so


def test_an_override_takes_a_scalar_whole_and_anything_in_brackets_as_yaml() -> None:
    given_values = {
        "fetch.user_agent=Mozilla/5.0 (a: b) # c": ("fetch.user_agent", "Mozilla/5.0 (a: b) # c"),
        "fetch.user_agent='12'": ("fetch.user_agent", "12"),
        "source.uri=a=b": ("source.uri", "a=b"),
        "image.size=": ("image.size", None),
        "limit=1e6": ("limit", 1_000_000),
        "fetch.timeout_s=1e-3": ("fetch.timeout_s", 0.001),
    }
    for override, (path, wanted) in given_values.items():
        value: object = load("download", None, [*ENDS, override])
        for part in path.split("."):
            value = getattr(value, part)
        assert value == wanted
    process = load("process", None, [*COMPLETE["process"], "resolutions=[256, 512]", "resolutions.1=768"])
    assert process.resolutions == (256, 768)


@pytest.mark.parametrize("empty", ["", "# only a comment\n", "---\n", "fetch:\n  # timeout_s: 3\n"])
def test_an_empty_file_or_section_is_the_defaults(tmp_path: Path, empty: str) -> None:
    assert load("download", write(tmp_path, empty), ENDS) == load("download", None, ENDS)


SCALARS: dict[str, object] = {
    "true": True, "False": False, "yes": "yes", "off": "off", "null": None, "~": None, "12": 12, "-3": -3,
    "1_000": 1000, "0x1F": 31, "0o17": 15, "017": 17, "1e-4": 0.0001, "1.1264e+09": 1_126_400_000, "1.5e0": 1.5,
    "1.0": 1.0, ".5": 0.5, "-.inf": float("-inf"), "1:30": "1:30", "2024-01-01": "2024-01-01", "1.2.3": "1.2.3",
    "e5": "e5", "0.1.": "0.1.", "_1": "_1",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_are_read_as_yaml_1_2_has_them(text: str, value: object) -> None:
    read = parse_scalar(text)
    assert read == value
    assert type(read) is type(value)
    assert parse_document(f"key: {text}", "file") == {"key": value}


def test_a_configuration_cannot_be_changed() -> None:
    config = load("download", None, ENDS)
    with pytest.raises(ValidationError, match="frozen"):
        config.limit = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.fetch.timeout_s = 3.0


@pytest.mark.parametrize("job", JOBS)
def test_what_is_shown_loads_back_to_the_same_configuration_with_every_key_explained(job: str, tmp_path: Path) -> None:
    config = load(job, None, COMPLETE[job])
    text = dump_yaml(config)
    assert load(job, write(tmp_path, text)) == config
    assert max(map(len, text.splitlines())) <= 120
    words = " ".join(line.strip().removeprefix("# ") for line in text.splitlines() if line.strip().startswith("#"))
    for key in keys(JOBS[job]):
        assert key.what in words


# Text as people write it and as they do not: every printable character and some that YAML must escape.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1) | st.sampled_from(
    ["no", "null", "1e-4", "12", "a: b", "a #b", "- a", "'", '"', "~", "[", "é", "\x85", "\u2028", "😀", "\t", " a "]
)


@settings(max_examples=50)
@given(
    checkpoint=TEXT,
    agent=st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1),
    timeout=st.floats(min_value=1e-300, max_value=86400),
    limit=st.none() | st.integers(1, 2**80),
    prompts=st.lists(TEXT, min_size=1, max_size=4),
    negative=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
)
def test_any_values_survive_being_shown_and_read(
    checkpoint: str, agent: str, timeout: float, limit: int | None, prompts: list[str], negative: str
) -> None:
    ends = {"source": {"uri": "a"}, "output": {"uri": "b"}}
    download = parse("download", {**ends, "limit": limit, "fetch": {"user_agent": agent, "timeout_s": timeout}})
    assert parse("download", parse_document(dump_yaml(download), "shown")) == download
    drawn = {"checkpoint": checkpoint, "prompts": prompts, "sampler": {"negative_prompt": negative}}
    generate = parse("generate", {"output": {"uri": "b"}, **drawn})
    assert parse("generate", parse_document(dump_yaml(generate), "shown")) == generate


@pytest.mark.parametrize(
    "text",
    ["on", "No", "y", "true", "null", "~", "1e-8", "1:30", "0b1", "2024-01-01", "1_000", "=", "<<", ".5", ".inf", "a:"],
)
def test_shown_yaml_means_the_same_to_us_and_to_a_reader_of_yaml_1_1(text: str) -> None:
    config = parse("generate", {"output": {"uri": "b"}, "checkpoint": text, "prompts": [text]})
    for shown in (yaml.safe_load(dump_yaml(config)), parse_document(dump_yaml(config), "shown")):
        assert (shown["checkpoint"], shown["prompts"]) == (text, [text])


@pytest.mark.parametrize("job", JOBS)
def test_a_draft_shows_the_keys_that_must_be_set(job: str, tmp_path: Path) -> None:
    sketch = draft(job, None)
    assert {key.path for key in keys(JOBS[job]) if key.field.is_required()} == sketch.missing
    text = dump_yaml(sketch.config, missing=sketch.missing)
    assert text.count("# REQUIRED") == len(sketch.missing)
    with pytest.raises(ConfigError) as refused:
        load(job, write(tmp_path, text))
    assert {problem.path for problem in refused.value.problems} == sketch.missing


def test_a_draft_accepts_missing_keys_and_no_other_problem() -> None:
    with pytest.raises(ConfigError, match=r"fetch\.retries: "):
        draft("download", None, ["fetch.retries=-1"])
    with pytest.raises(ConfigError, match=r"image\.crop: "):
        draft("download", None, [*ENDS, "image.crop=center"])


def test_the_identity_has_only_keys_that_decide_the_output() -> None:
    settings = [*COMPLETE["process"], "resolutions=[256, 512]"]
    names = identity(load("process", None, settings))
    assert names["resolutions"] == [256, 512]
    assert not {"source.uri", "output.uri", "encode.num_workers", "storage.endpoint"} & set(names)
    assert identity(load("process", None, [*settings, "encode.num_workers=3"])) == names


@pytest.mark.parametrize("job", JOBS)
def test_the_json_schema_knows_every_key_and_refuses_others(job: str) -> None:
    schema = json_schema(job)
    for key in keys(JOBS[job]):
        here = schema
        for part in key.path.split("."):
            assert here["additionalProperties"] is False
            here = here["properties"][part]
            here = schema["$defs"][here["$ref"].rpartition("/")[2]] | here if "$ref" in here else here
        assert " ".join(here["description"].split()) == key.what


def test_paths_in_a_file_are_relative_to_it_and_those_of_overrides_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my").mkdir()
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    text = "source: {uri: SOURCE, tables: [{uri: ./captions.parquet, by: file}]}\n"
    text += "output: {uri: latents}\nmodel: {source: MODEL}\n"
    for source, model, expected in (
        ("../photos/*.jpg", "builtin:tiny", ("photos/*.jpg", "builtin:tiny")),
        ("s3://bucket/photos", "owner/name@abc", ("s3://bucket/photos", "owner/name@abc")),
        ("/photos", "./weights", ("/photos", "my/weights")),
        ("photos", "builtin:tiny", ("my/photos", "builtin:tiny")),
    ):
        (tmp_path / "my/process.yaml").write_text(text.replace("SOURCE", source).replace("MODEL", model))
        config: Any = load("process", "my/process.yaml")
        assert (config.source.uri, config.model.source) == expected
        assert (config.output.uri, config.source.tables[0].uri) == ("my/latents", "my/captions.parquet")
    config = load("process", "my/process.yaml", ["output.uri=other"])
    assert config.output.uri == "other"


def test_a_models_name_at_a_server_is_a_path_only_if_a_folder_has_it(tmp_path: Path) -> None:
    text = "source: {uri: in}\noutput: {uri: out}\ncaptions: {model: owner/vlm, url: http://127.0.0.1:1/v1}\n"
    path = write(tmp_path, text)
    assert load("caption", path).captions.model == "owner/vlm"  # type: ignore[attr-defined]
    (tmp_path / "owner/vlm").mkdir(parents=True)
    assert load("caption", path).captions.model == str(tmp_path / "owner/vlm")  # type: ignore[attr-defined]
