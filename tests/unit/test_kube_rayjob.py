"""The RayJob of a submission: names, what travels in it, and what becomes of that on the other side."""

import os
import shlex
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sdp.errors import ConfigError, UserError
from sdp.kube.rayjob import CONFIG_ENV, as_yaml, checked_job, config_in, make_rayjob
from sdp.kube.submit import Submission
from tests.programs import ROOT, ended


def test_a_job_runs_by_the_clusters_configuration_under_the_supervisor() -> None:
    spec = make_rayjob(Submission(job="process-512", overrides=["limit=5"]))["spec"]
    config = "--config /etc/sdp/jobs/process-512.yaml"
    assert spec["entrypoint"] == f"python -m sdp.supervisor process {config} --set limit=5"
    assert spec["clusterSelector"] == {"ray.io/cluster": "sdp"}
    assert spec["submissionMode"] == "HTTPMode"
    assert not {"backoffLimit", "suspend", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"} & spec.keys(), (
        "KubeRay refuses them beside a cluster selector"
    )
    env = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert int(env["RAY_JOB_STOP_WAIT_TIME_S"]) >= 120, "Ray would give the driver three seconds"
    assert all(isinstance(value, str) for value in env.values()), "Ray refuses numbers in env_vars"


@given(overrides=st.lists(st.text(st.characters(blacklist_characters="\0", codec="utf-8"), min_size=1), max_size=4))
def test_overrides_reach_the_job_as_they_were_typed(overrides: list[str]) -> None:
    words = shlex.split(make_rayjob(Submission(job="train", overrides=overrides))["spec"]["entrypoint"])
    assert words[6::2] == ["--set"] * len(overrides)
    assert words[7::2] == overrides


@given(text=st.text(st.characters(blacklist_characters="\0", codec="utf-8"), max_size=300))
def test_a_configuration_travels_as_it_is_whatever_is_in_it(text: str) -> None:
    job = make_rayjob(Submission(job="process"), text)
    assert yaml.safe_load(as_yaml(job)) == job
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"][CONFIG_ENV] == text


def test_on_the_other_side_it_is_read_from_the_environment_and_the_overrides_go_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "# größer\nlimit: 5\nsource: {uri: s3://b/in}\noutput: {uri: s3://b/out}\n"
    job = make_rayjob(Submission(job="process", overrides=["limit=7", "model.source=builtin:tiny"]), text)
    python, _, module, *words = shlex.split(job["spec"]["entrypoint"])
    assert (python, module, words[:2]) == ("python", "sdp.supervisor", ["process", "--config"])
    monkeypatch.setenv(CONFIG_ENV, yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"][CONFIG_ENV])
    config = config_in(words)
    assert (config.limit, config.output.uri) == (7, "s3://b/out")
    monkeypatch.setenv(CONFIG_ENV, "limit: 5\nlimt: 5\n")
    with pytest.raises(ConfigError, match=f"env:{CONFIG_ENV}:2: limt: expected a known key"):
        config_in(words)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [("limt: 5\n", 2, "limt"), (None, 2, "sdp: env:SDP_JOB_CONFIG: expected a variable that holds a configuration")],
)
def test_the_supervisor_runs_the_job_by_the_configuration_of_its_environment(
    text: str | None, code: int, says: str
) -> None:
    environ = {name: value for name, value in os.environ.items() if name != CONFIG_ENV}
    if text is not None:
        environ[CONFIG_ENV] = text
    words = [sys.executable, "-m", "sdp.supervisor", "download", "--config", f"env:{CONFIG_ENV}"]
    done = ended(words, cwd=ROOT, env=environ)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_names_are_generated_and_fit_into_a_rayjobs() -> None:
    longest = "train-" + "x" * 31
    first, second = (make_rayjob(Submission(job=longest))["metadata"]["name"] for _ in range(2))
    assert first != second
    assert first[:-5] == second[:-5] == f"sdp-{longest}-"
    assert len(first) == 47
    with pytest.raises(UserError, match=r"--name: expected at most 47 .*, got 'sdp-train-x"):
        make_rayjob(Submission(job=f"{longest}x"))
    assert make_rayjob(Submission(job=f"{longest}x", name="short"))["metadata"]["name"] == "short"


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("trian-online", "or one of these and -NAME, got 'trian-online'; did you mean train-o"),
        ("other", "got 'other'; see sdp submit --help"),
        ("", "got ''"),
        ("train-", "expected lower-case letters, digits and hyphens after train-, got 'train-'"),
        ("train-../x", "after train-, got 'train-../x'"),
        ("train-a b", "after train-, got 'train-a b'"),
    ],
)
def test_a_job_that_no_chart_could_hold_is_refused_with_the_kinds(job: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        checked_job(job, ["train", "process"])
    assert str(refused.value).startswith("submit: JOB: expected ")
    assert says in str(refused.value)
    assert checked_job("train-2-b", ["train"]) == "train-2-b"


@pytest.mark.parametrize("name", ["A", "1st", "a_b", "a-", "", "a" * 48, "a.b"])
def test_a_name_that_kuberay_would_refuse_is_refused_here(name: str) -> None:
    with pytest.raises(UserError, match="--name: expected at most 47 lower-case letters"):
        make_rayjob(Submission(job="train", name=name))


def test_a_configuration_that_no_environment_can_hold_is_refused() -> None:
    with pytest.raises(UserError, match="--config: expected at most 100,000 bytes"):
        make_rayjob(Submission(job="train"), "#" * 100_001)
    make_rayjob(Submission(job="train"), "#" * 100_000)
