"""The error messages for configurations that cannot work."""

import os
import re
from pathlib import Path

import pytest

from sdp.config import JOBS, keys, load, parse, read
from sdp.errors import ConfigError, Problem

ENDS = ["source.uri=in", "output.uri=out"]
MODEL = [*ENDS, "model.source=builtin:tiny"]


def lines(job: str, *overrides: str, path: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(job, path, list(overrides))
    assert refused.value.exit_code == 2
    return str(refused.value).splitlines()


def places(job: str, *overrides: str, path: str | None = None) -> list[str]:
    """Return where each problem is."""
    return [line.partition(": expected")[0] for line in lines(job, *overrides, path=path)]


WRONG = """
train filters={aesthetic: {min: 5}}
    filters: expected nothing while data.mode is offline, got a value; latents are made already: set it for sdp process
train storage.endpoint=http://u:secret@127.0.0.1:17070
    storage.endpoint: expected an address without credentials, got one with them, or with a query (http://…); set them
    in the environment, since configurations are saved with every output
train storage.endpoint=http://127.0.0.1:17070/?X-Amz-Signature=secret
    storage.endpoint: expected an address without credentials, got one with them, or with a query (http://…); set them
    in the environment, since configurations are saved with every output
train sharding_strategy=SHARD_GRAD_OP
    sharding_strategy: expected a known key, got an unknown key; did you mean strategy.shard?
process NUM-ENCODERS=40
    NUM-ENCODERS: expected a known key, got an unknown key; did you mean encode.num_workers?
dreambooth lr=1e-6 & source.caption=a cat
    lr: expected a known key, got an unknown key; did you mean learning_rate?
train scaling.num_workers={min: 1, mx: 2, max: 3}
    scaling.num_workers.mx: expected a known key, got an unknown key; did you mean scaling.num_workers.max?
download model.source=builtin:tiny
    model: expected a known key, got an unknown key; it is a key of process, train, generate and dreambooth
train strategy.kind=fdsp
    strategy.kind: expected ddp or fsdp, got 'fdsp'; did you mean fsdp?
train data.batch_size='12'
    data.batch_size: expected a whole number of 1 or more, got '12'; write it without quotes
train data.batch_size=12.0
    data.batch_size: expected a whole number of 1 or more, got 12.0; write 12
train data.batch_size=true
    data.batch_size: expected a whole number of 1 or more, got true
train data.batch_size={}
    data.batch_size: expected a whole number of 1 or more, got a mapping
train data.batch_size=
    data.batch_size: expected a whole number of 1 or more, got null; set it in the file or with --set
    data.batch_size=…
train strategy.compile=yes
    strategy.compile: expected true or false, got 'yes'
train ema.decay=1
    ema.decay: expected a number of 0 or more and below 1, or null, got 1
train optimizer.learning_rate=.nan
    optimizer.learning_rate: expected a number above 0, got nan
train encode.wait_s=1e300
    encode.wait_s: expected a number of 604800 or less above 0, got 1e+300
train scaling.num_workers=[1]
    scaling.num_workers: expected a whole number of 1 or more, or {min: N, max: N}, got a list
train scaling.num_workers={min: 4}
    scaling.num_workers.max: expected a whole number of 1 or more, got nothing; set it in the file or with --set
    scaling.num_workers.max=…
train scaling.num_workers={min: 4, max: 2}
    scaling.num_workers.min: expected at most max, which is 2, got 4; swap them or raise max
train evaluate.every_steps=2
    data.holdout: expected more than 0 while evaluate.every_steps is set and evaluate.source is not, got 0.0; hold out
    some rows, or name a dataset in evaluate.source
train evaluate.every_steps=2 & data.mode=collocated
    evaluate.source: expected a latents dataset while data.mode is not offline, got null; name one to measure on
train samples.every_steps=2
    samples.prompts: expected one or more prompts while every_steps is set, got none; list some
train max_steps=null
    max_steps: expected a whole number while max_epochs is null, got null; set one of them: a run must end
train max_steps=null & max_epochs=1 & optimizer.schedule=cosine
    optimizer.schedule: expected constant while max_steps is null, got 'cosine'; set max_steps: the schedule needs a
    last step
process resolutions=250
    resolutions: expected a list, each a whole number of 8 or more, divisible by 8, got 250; write [250]
process resolutions=[256, 250]
    resolutions.1: expected a whole number of 8 or more, divisible by 8, got 250
process resolutions=[256, 256]
    resolutions: expected each resolution once, got 256 more than once; remove the repetition
process resolutions=[256] & resolutions.4=512
    resolutions: expected one of its 1 items, from 0, got '4'
process resolutions=[256
    resolutions:1:5: expected YAML, got a syntax error (expected ',' or ']', but got '<stream end>')
process encode.batch_size=[4, 4]
    encode.batch_size: expected one for each of 1 resolutions, got 2; list as many, or set a single number
process transform.crop=buckets & resolutions=[72]
    resolutions: expected multiples of 64 with transform.crop buckets, got 72; change one
process limit=0
    limit: expected a whole number of 1 or more, or null, got 0
download source=3
    source: expected a mapping (uri, url_column, caption_column, columns), got 3
download fetch.user_agent="a\\r\\nX: 1"
    fetch.user_agent: expected some text of printable ASCII characters, got 'a\\r\\nX: 1'
download source.uri="/a\\ud800b"
    source.uri: expected text in UTF-8 without null characters, got '/a\\ud800b'; correct it
download output.uri=hf://datasets/a/b
    output.uri: expected a local path, file://, s3:// or gs://, got 'hf://datasets/a/b'
download source.uri=s3://b/in & output.uri=s3://b/in/images/
    output.uri: expected a folder outside of source.uri, which is s3://b/in, got 's3://b/in/images/'; the next run would
    read the output as its source
process source.uri=/data/images & output.uri=/data/x/../images
    output.uri: expected a folder outside of source.uri, which is /data/images, got '/data/x/../images'; the next run
    would read the output as its source
process source.uri=/data/a b & output.uri=file://localhost/data/a%20b/c
    output.uri: expected a folder outside of source.uri, which is /data/a b, got 'file://localhost/data/a%20b/c'; the
    next run would read the output as its source
score score.aesthetics=p.pth
    score.clip_model: expected the CLIP model that aesthetics was trained with, got null; name it
score score.duplicates.distance=null
    score.clip_model: expected a CLIP model, or a duplicates.distance, got neither; set one of them
score score.duplicates.distance=4
    score.duplicates.distance: expected a whole number from 0 to 3 or null, got 4
"""
UNSET = ("score.clip_model", "data.holdout", "evaluate.source", "samples.prompts")


@pytest.mark.parametrize("case", re.split(r"\n(?=\w)", WRONG.strip()), ids=lambda case: case.partition("\n")[0])
def test_a_wrong_value_is_one_line_with_its_path_the_expectation_and_the_remedy(case: str) -> None:
    settings, *message = case.splitlines()
    job, _, overrides = settings.partition(" ")
    ends = ENDS if job in ("download", "score") else MODEL
    line = " ".join(map(str.strip, message))
    place = "" if line.startswith(UNSET) else "--set "
    assert lines(job, *ends, *overrides.split(" & ")) == [place + line]


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    unknown = "expected a known key, got an unknown key"
    assert lines("download", *ENDS, "fetch.timeoutt_s=1", "url_column=1") == [
        f"--set fetch.timeoutt_s: {unknown}; did you mean fetch.timeout_s?",
        f"--set url_column: {unknown}; did you mean source.url_column?",
    ]
    assert lines("train", *MODEL, "source.image_column=cat", "resolutions=[64]") == [
        f"--set source.image_column: {unknown}; it is a key of score, caption, process and evaluate",
        f"--set resolutions: {unknown}; it is a key of process",
    ]


def test_an_abbreviation_names_its_key_and_an_unlike_name_lists_the_section() -> None:
    unknown = "--set optimizer.{}: expected a known key, got an unknown key; {}"
    assert lines("train", *MODEL, "optimizer.lr=1") == [unknown.format("lr", "did you mean optimizer.learning_rate?")]
    (line,) = lines("train", *MODEL, "optimizer.ams=1")
    assert line.startswith(unknown.format("ams", "the keys here are kind, learning_rate,"))


@pytest.mark.parametrize("name", ["aws_secret_access_key", "storage.secret_key"])
def test_a_credential_is_an_unknown_key_and_its_value_is_never_repeated(name: str) -> None:
    (line,) = lines("download", *ENDS, f"{name}=hunter2")
    assert line.startswith(f"--set {name}: expected a known key, got an unknown key")
    assert "hunter2" not in line


def test_all_missing_keys_are_named_by_path_at_once() -> None:
    assert lines("process") == [
        f"{path}: expected {what}, got nothing; set it in the file or with --set {path}=…"
        for path, what in [("source.uri", "a URI"), ("output.uri", "a URI"), ("model.source", "some text")]
    ]


def test_problems_of_several_kinds_are_reported_together() -> None:
    overrides = ["output.uri=out", "image.crop=center", "fetch.retries=-1", "fetch.timeout_s=x", "bogus=1"]
    wrong = ["fetch.timeout_s", "fetch.retries", "image.crop", "bogus"]
    assert places("download", *overrides) == ["source.uri", *(f"--set {key}" for key in wrong)]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("", "a URI, got ''"),
        (" s3://b", "a URI, got ' s3://b'"),
        ("ftp://host/x", "a local path, file://, s3://, gs://, https://, http:// or hf://, got 'ftp://host/x'"),
        ("s3:///key", "a URI, got 's3:///key'; name the bucket or host after s3://"),
        ("http://[broken", "a URI, got 'http://[broken'"),
        ("https://me:hunter2@host/x", "a URI without credentials, got one with them (https://…)"),
        ("s3://key:hunter2@bucket/x", "a URI without credentials, got one with them (s3://…)"),
        *(
            (f"https://host/x?a=1{name}=hunter2", "a URI without credentials, got one with them (https://…)")
            for name in ("&sig", "&private_token", "&X-Amz-Credential", "&apiKey", "&access_key", "#access_token")
        ),
    ],
)
def test_a_source_that_is_no_uri_or_holds_a_credential_is_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse("download", {"source": {"uri": uri}, "output": {"uri": "out"}})
    assert str(refused.value).startswith(f"source.uri: expected {message}")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("uri", ["data/images", "file:///data", "s3://b/a b", "hf://datasets/a/b@c/*"])
def test_the_usual_uris_are_accepted(uri: str) -> None:
    assert parse("download", {"source": {"uri": uri}, "output": {"uri": "o"}}).source.uri == uri


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source:\n  uri: a\n  uri: b\n", ":3:3: expected each key once, got uri a second time"),
        ("source: {uri: a\n", ":2:1: expected YAML, got a syntax error (expected ',' or '}', but got '<stream end>')"),
        ("a: b: c\n", ":1:5: expected YAML, got a syntax error (mapping values are not allowed here)"),
        (
            "\ta: 1\n",
            ":1:1: expected YAML, got a syntax error (found character '\\t' that cannot start any token); "
            "indent with spaces",
        ),
        ("a: \x01\n", ":1: expected YAML, got the character U+0001"),
        ("a: &x 1\nb: *x\n", ":1:4: expected the value written out, got the anchor &x"),
        ("b: *x\n", ":1:4: expected the value written out, got the alias *x"),
        ("a: !!python/name:os.system\n", ":1:4: expected plain values, got the tag "),
        ("1: 2\n", ":1:1: expected a key that is text, got 1"),
        ("just words\n", ": expected a mapping of keys to values, got 'just words'"),
        ("[" * 1500, ":1:21: expected at most 20 levels, got YAML that is nested deeper"),
        ("".join(f"k{n}: &a{n} [1, 2]\n" for n in range(6000)), ":1:5: expected the value written out, got the anchor"),
    ],
)
def test_a_file_that_is_not_plain_yaml_is_reported_with_line_and_column(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    (line,) = lines("download", path=str(path))
    assert line.startswith(f"{path}{message}")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    nowhere, latin, large = (tmp_path / f"{name}.yaml" for name in ("nowhere", "latin", "large"))
    latin.write_bytes(b"a: \xe9\n")
    large.write_bytes(b"#" * (1 << 17) + b"#")
    for path, problem in (
        (nowhere, "a configuration file, got nothing there; check the path"),
        (tmp_path, "a configuration file, got a directory; name a file in it"),
        (latin, "a configuration file in UTF-8, got other bytes; save it as UTF-8"),
        (large, "a configuration of at most 131,072 characters, got more"),
        ("/dev/zero", "a configuration of at most 131,072 characters, got more"),
    ):
        assert lines("download", path=str(path)) == [f"{path}: expected {problem}"]
    with pytest.raises(ConfigError, match="at most 131,072 characters"):
        load("download", "sent.yaml", text="#" * (1 << 17) + "#")
    assert len(lines("download", path="a\0b")) == 1


def test_a_pipe_is_read_but_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert lines("download", path=str(pipe)) == [
        f"{pipe}: expected a configuration file, got a pipe without content; name a file"
    ]
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)):  # lets a writer open it, and keeps what is written
        pipe.write_text("limit: many\n")
        assert f"{pipe}:1: limit: expected a whole number of 1 or more, or null, got 'many'" in lines(
            "download", path=str(pipe)
        )


FILE = """
source:
  uri: in
output: {uri: out}
optimizer:
  learning_rate: 0.1

  schedule: cosine
max_steps: null
max_epochs: 1
samples:
  prompts: [a, '']
filters: {a: {min: 2, max: 1}}
"""


def test_a_problem_names_the_line_of_its_key_and_one_of_an_option_the_option(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(FILE.strip())
    overrides = ["optimizer.learning_rate=-1", "data={batch_size: 0}", "model.denoiser=new"]
    assert places("train", *overrides, path=str(path)) == [
        f"{path}: model.source",
        f"{path}:12: filters.a.min",
        "--set data.batch_size",
        "--set optimizer.learning_rate",
        f"{path}:11: samples.prompts.1",
    ]
    path.write_text("source: {uri: in}\n\noptimizer:\n  schedule: cosine\nmax_steps: null\nmax_epochs: 1\n")
    assert places("train", "output.uri=o", path=str(path)) == [f"{path}: model.source"]
    overrides = ["output.uri=o", "model.source=m", "evaluate.every_steps=1"]
    assert places("train", *overrides, path=str(path)) == ["data.holdout", f"{path}:4: optimizer.schedule"]


def test_a_section_without_a_required_key_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "download.yaml"
    path.write_text("limit: 3\nsource:\n  url_column: URL\noutput:\n")
    assert places("download", path=str(path)) == [f"{path}:2: source.uri", f"{path}:4: output.uri"]


def test_what_a_job_finds_wrong_later_names_the_line_too(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("seed: 1\nmax_cost: 9\n")
    with pytest.raises(ConfigError) as refused, read(str(path), ["limit=8"]).placed():
        raise ConfigError([Problem(key, "null", "9") for key in ("max_cost", "limit", "max_hours")])
    assert str(refused.value).splitlines() == [
        f"{path}:2: max_cost: expected null, got 9",
        "--set limit: expected null, got 9",
        "max_hours: expected null, got 9",
    ]


def test_of_thousands_of_unknown_keys_a_hundred_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("".join(f"key{number}: 1\n" for number in range(5000)))
    *listed, last = lines("download", path=str(path))
    assert len(listed) == 100
    assert last == "configuration: expected at most 100 problems, got 5,002; the others are not listed"


def test_all_malformed_overrides_are_reported() -> None:
    assert lines("download", "limit", "=3", "a..b=1") == [
        f"--set: expected key=value, for example limit=1000, got {override}"
        for override in ["'limit'", "'=3'", "'a..b=1'"]
    ]


def test_prompts_come_from_one_place() -> None:
    checkpoint = ["output.uri=out", "checkpoint=run"]
    assert lines("generate", *checkpoint) == [
        "prompts: expected one or more prompts, here or in a file, got none; set prompts or source.uri"
    ]
    assert lines("generate", *checkpoint, "prompts=[a]", "source.uri=b.txt") == [
        "--set prompts: expected an empty list while source.uri is set, got prompts as well; remove one of them"
    ]
    assert lines("generate", *checkpoint, "prompts=['']") == ["--set prompts.0: expected some text, got ''"]


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("value", ["", "text", 0, -1, 1.5, True, None, [], [None], {}, {"a": {"b": 1}}, "x" * 500])
def test_any_value_in_the_place_of_a_key_yields_error_lines_and_no_crash(job: str, value: object) -> None:
    for key in keys(JOBS[job]):
        parts = key.path.split(".")
        for depth in range(1, len(parts) + 1):
            data: dict[str, object] = {parts[depth - 1]: value}
            for part in reversed(parts[: depth - 1]):
                data = {part: data}
            # Something required is always missing, so that there is an error in any case.
            with pytest.raises(ConfigError) as refused:
                parse(job, data)
            assert all(len(line) < 400 and ": expected " in line for line in str(refused.value).splitlines())
