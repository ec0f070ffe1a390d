"""The RayJob of a submission: names, what travels in it, and what becomes of that on the other side."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sdp.config import draft
from sdp.errors import UserError
from sdp.kube.rayjob import CONFIG_ENV, as_yaml, checked_job, make_rayjob, unpacked, with_name

ROOT = Path(__file__).resolve().parents[2]


def test_without_more_words_a_job_runs_by_the_cluster_s_configuration() -> None:
    job = make_rayjob("train")
    assert job["metadata"]["generateName"] == "sdp-train-"
    assert job["spec"]["entrypoint"] == "python -m sdp.supervisor train --config /etc/sdp/jobs/train.yaml"
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": "sdp"}


def test_a_driver_has_minutes_to_end_where_ray_would_give_it_three_seconds() -> None:
    env = yaml.safe_load(make_rayjob("train")["spec"]["runtimeEnvYAML"])["env_vars"]
    assert int(env["RAY_JOB_STOP_WAIT_TIME_S"]) >= 120
    assert all(isinstance(value, str) for value in env.values()), "Ray refuses numbers in env_vars"


def test_fields_that_kuberay_refuses_beside_a_cluster_selector_are_not_set() -> None:
    spec = make_rayjob("train")["spec"]
    assert not {"backoffLimit", "suspend", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"} & spec.keys()
    assert spec["submissionMode"] == "HTTPMode"


@given(overrides=st.lists(st.text(st.characters(blacklist_characters="\0", codec="utf-8"), min_size=1), max_size=4))
def test_overrides_reach_the_job_as_they_were_typed(overrides: list[str]) -> None:
    words = shlex.split(make_rayjob("train", None, overrides=overrides)["spec"]["entrypoint"])
    assert words[6::2] == ["--set"] * len(overrides)
    assert words[7::2] == overrides


@given(text=st.text(st.characters(blacklist_characters="\0", codec="utf-8"), max_size=300))
def test_a_configuration_travels_as_it_is_whatever_is_in_it(text: str) -> None:
    job = make_rayjob("process", text)
    assert yaml.safe_load(as_yaml(job)) == job
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"][CONFIG_ENV] == text


def test_a_configuration_that_travels_can_be_read_in_the_rayjob() -> None:
    shown = as_yaml(make_rayjob("process", "limit: 5\noutput:\n  uri: s3://b/o # the usual place\n"))
    assert "\n        limit: 5\n" in shown
    assert "# the usual place\n" in shown


def test_on_the_other_side_it_is_a_file_again_and_the_overrides_go_over_it(tmp_path: Path) -> None:
    text = "# größer\nlimit: 5\nsource: {uri: s3://b/in}\noutput: {uri: s3://b/out}\n"
    job = make_rayjob("process", text, overrides=["limit=7", "model.source=builtin:tiny"])
    environ = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    python, _, module, *words = shlex.split(job["spec"]["entrypoint"])
    assert (python, module) == ("python", "sdp.supervisor")
    line = unpacked(words, environ, str(tmp_path))
    assert line == ["process", "--config", str(tmp_path / "process.yaml"), *words[3:]]
    assert Path(line[2]).read_text() == text
    sets = [word for word in line[3:] if word != "--set"]
    config = draft("process", line[2], sets).config
    assert config.limit == 7
    assert config.output.uri == "s3://b/out"


def test_a_command_line_without_a_configuration_to_unpack_stays_as_it_is(tmp_path: Path) -> None:
    words = ["train", "--config", "/etc/sdp/jobs/train.yaml", "--set", "a=b"]
    assert unpacked(words, {}, str(tmp_path)) == words
    assert list(tmp_path.iterdir()) == []


def test_a_missing_configuration_is_reported_and_not_retried(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="--config-env: expected a variable that holds the configuration, got 'NO_SUCH'"
    ):
        unpacked(["train", "--config-env", "NO_SUCH"], {}, str(tmp_path))


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("limt: 5\n", 2, "limt"),
        (None, 2, "supervisor: --config-env: expected a variable that holds the configuration"),
    ],
)
def test_the_supervisor_runs_the_job_by_the_configuration_of_its_environment(
    text: str | None, code: int, says: str
) -> None:
    environ = {name: value for name, value in os.environ.items() if name != CONFIG_ENV}
    if text is not None:
        environ[CONFIG_ENV] = text
    words = [sys.executable, "-m", "sdp.supervisor", "download", "--config-env", CONFIG_ENV]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_generated_name_is_made_here_so_that_asking_twice_makes_one() -> None:
    job = make_rayjob("generate")
    name = with_name(job)["metadata"]["name"]
    assert name.startswith("sdp-generate-")
    assert len(name) == len("sdp-generate-") + 5
    assert "generateName" not in with_name(job)["metadata"]
    assert with_name(job)["metadata"]["name"] != name
    assert with_name(make_rayjob("train", None, name="mine"))["metadata"]["name"] == "mine"


def test_a_second_configuration_of_a_kind_is_run_by_that_kind_s_job() -> None:
    job = make_rayjob("process-512", None, overrides=["limit=5"])
    assert job["metadata"]["generateName"] == "sdp-process-512-"
    assert job["metadata"]["labels"]["sdp/job"] == "process"
    config = "--config /etc/sdp/jobs/process-512.yaml"
    assert job["spec"]["entrypoint"] == f"python -m sdp.supervisor process {config} --set limit=5"
    sent = make_rayjob("train-online", "max_steps: 5\n")["spec"]["entrypoint"]
    assert sent == f"python -m sdp.supervisor train --config-env {CONFIG_ENV}"


def test_the_longest_names_of_jobs_fit_into_a_rayjob_s() -> None:
    longest = "train-" + "x" * 31
    assert len(with_name(make_rayjob(longest))["metadata"]["name"]) == 47
    with pytest.raises(UserError, match="--name: required for a job with a name as long as 'train-x"):
        make_rayjob(f"{longest}x")
    make_rayjob(f"{longest}x", None, name="short")


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (
            "trian-online",
            "expected train, process, or one of these and -NAME, got 'trian-online'; did you mean train-o",
        ),
        ("training", "expected train, process, or one of these and -NAME, got 'training'"),
        ("other", "got 'other'; see sdp submit --help"),
        ("", "got ''"),
        ("train-", "expected lower-case letters, digits and hyphens after train-, got 'train-'"),
        ("train-../x", "after train-, got 'train-../x'"),
        ("train-A", "after train-, got 'train-A'"),
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
        make_rayjob("train", None, name=name)


def test_a_configuration_that_no_environment_can_hold_is_refused() -> None:
    with pytest.raises(UserError, match="--config: expected at most 100,000 bytes"):
        make_rayjob("train", "#" * 100_001)
    make_rayjob("train", "#" * 100_000)
