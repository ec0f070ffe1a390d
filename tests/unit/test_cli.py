"""The command line: what is printed, what is refused, and with which exit code."""

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
import yaml

from sdp import __version__, console
from sdp.__main__ import main as begin
from sdp.cli import COMMANDS, main
from sdp.cli.command import LOOK, Command, CommandParser
from sdp.cli.table import job_command
from sdp.config import load
from sdp.errors import SdpError, UserError
from tests.programs import ROOT, ended

ENDS = ["--set", "source.uri=in", "--set", "output.uri=out"]


def command_with(run: object) -> Sequence[Command]:
    assert callable(run)
    return [Command("go", LOOK, "Does it.", lambda _: None, lambda _: run())]


def test_help_names_every_command_with_a_sentence_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command in COMMANDS:
        assert f"  {command.name} " in out
        assert command.summary in out
        assert command.summary.endswith(".")
        assert command.example.startswith(command.name)
        assert main([*command.name.split(), "--help"]) == 0
        own = " ".join(capsys.readouterr().out.split())
        assert command.summary in own
        assert f"example: sdp {command.example}" in own
    examples = [shlex.split(line, comments=True)[1:] for line in out.partition("Examples:\n")[2].splitlines()[:3]]
    assert [words[0] for words in examples] == ["init", "train", "generate"]
    for words in examples:
        (command,) = [each for each in COMMANDS if each.name == words[0]]
        assert CommandParser(command).parse_known_args(words[1:])[1] == []
    assert max(map(len, out.splitlines())) <= 110
    assert main([]) == 2
    assert capsys.readouterr() == ("", out)


def test_the_version_is_the_packages_with_those_that_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"sdp {__version__}"
    assert lines[1].startswith(f"python {sys.version_info.major}.{sys.version_info.minor}.")
    named = dict(line.split(" ", 1) for line in lines[2:])
    assert list(named) == ["torch", "ray", "diffusers", "transformers", "pyarrow"]
    assert named["pyarrow"] == metadata.version("pyarrow")


def completions(line: str, tmp_path: Path) -> list[str]:
    """Return bash's completions at the end of a line, by argcomplete's protocol."""
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"),
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    (tmp_path / "out").touch()
    command = [sys.executable, "-m", "sdp"]
    subprocess.run(command, cwd=ROOT, env=environment, timeout=60, check=True)
    return [word.strip() for word in (tmp_path / "out").read_text().split("\n")]


def test_shells_complete_commands_options_and_the_keys_of_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "zsh"]) == 0
    assert "_ARGCOMPLETE" in capsys.readouterr().out
    assert completions("sdp config s", tmp_path) == ["show", "schema"]
    assert "--dry-run" in completions("sdp train --", tmp_path)
    assert completions("sdp train --set optimizer.lea", tmp_path) == ["optimizer.learning_rate="]
    assert completions("sdp submit train-online --set data.mode=", tmp_path) == ["offline", "online", "collocated"]
    assert completions("sdp config show download --set image.en", tmp_path) == [
        "image.enlarge=true", "image.enlarge=false",
    ]  # fmt: skip


@pytest.mark.parametrize("store", ["", "s3://bucket/mine"])
def test_init_writes_valid_configurations_and_overwrites_none(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my data"
    assert main(["init", str(folder), *(["--store", store] if store else [])]) == 0
    for job in ("download", "process", "train", "generate"):
        file = folder / f"{job}.yaml"
        config = load(job, str(file))
        assert config.output.uri.startswith(store or str(folder))
        assert len([line for line in file.read_text().splitlines() if not line.strip().startswith("#")]) < 50
    assert main(["init", str(folder)]) == 2
    assert "download.yaml exists; choose another folder" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "new"), "--store", "bucket/mine"]) == 2
    assert "--store: expected s3://… or gs://…, got 'bucket/mine'" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / "file" / "my")]) == 2
    assert "my: cannot be written (Not a directory); choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize(("recipe", "steps"), [("article", (550_000, 850_000)), ("fast", (280_000, 55_000))])
def test_init_writes_the_two_phases_of_a_recipe(recipe: str, steps: tuple[int, int], tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "my"), "--recipe", recipe]) == 2, "not for a laptop"
    assert main(["init", str(tmp_path / "my"), "--recipe", recipe, "--store", "s3://bucket/mine"]) == 0
    phases = load("train", str(tmp_path / "my/train.yaml")).phases
    assert tuple(phase.max_steps for phase in phases) == steps
    assert [(phase.data.resolution, phase.data.batch_of(32)) for phase in phases] == [(256, 2048), (512, 2048)]


def test_pictures_of_ones_own_are_processed_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my", "--pictures", "./cats"]) == 2
    assert "--pictures: expected a folder of pictures, got './cats'" in capsys.readouterr().err
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "a.jpg").touch()
    assert main(["init", "new/my", "--pictures", "./cats", "--caption", "a cat: {sleeping}"]) == 0
    assert not (tmp_path / "new/my/download.yaml").exists()
    source = load("process", "new/my/process.yaml").source
    assert (source.uri, source.caption) == ("cats", "a cat: {sleeping}"), "relative to the file"
    assert main(["init", "two", "--pictures", "./cats", "--caption", "a {klass}"]) == 2
    assert "--caption: only {class} is replaced, not {klass}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("urls.csv", 'URL,TEXT\nhttps://a.example/1,2020-01-01\nhttps://a.example/2,"a, cat"\n'),
        ("urls.tsv", "url\tcaption\nhttps://a.example/1\t2020-01-01\nhttps://a.example/2\ta, cat\n"),
        (
            "urls.jsonl",
            '{"url": "https://a.example/1", "text": "2020-01-01", "n": 5}\n'
            '{"url": "https://a.example/2", "text": "a, cat"}',
        ),
    ],
)
def test_urls_in_any_usual_table_become_parquet_that_download_reads(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert main(["init", str(tmp_path / "my"), "--urls", str(tmp_path / name)]) == 0
    source = load("download", str(tmp_path / "my/download.yaml")).source
    table = pq.read_table(source.uri)
    assert table[source.url_column].to_pylist() == ["https://a.example/1", "https://a.example/2"]
    assert table[source.caption_column].to_pylist() == ["2020-01-01", "a, cat"]
    assert load("generate", str(tmp_path / "my/generate.yaml")).prompts == ("2020-01-01", "a, cat")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"url": "b", "z": ' + "[" * 100_000 + "]" * 100_000 + "}", "urls.jsonl:2: a value in too many others; "),
        ('{"url": "b", "caption": ["a cat", "a small cat"]}', "urls.jsonl: not readable after row 0 (JSON parse error"),
    ],
    ids=["100,000 levels", "a list of captions"],
)
def test_a_line_of_json_that_cannot_be_taken_is_refused(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "urls.jsonl").write_text(f'{{"url": "a", "caption": "2020-01-01"}}\n{line}\n')
    assert main(["init", str(tmp_path / "my"), "--urls", str(tmp_path / "urls.jsonl")]) == 2
    assert says in capsys.readouterr().err


def test_odd_captions_become_prompts_that_generate_reads(tmp_path: Path) -> None:
    (tmp_path / "urls.csv").write_text(f"url,caption\nhttps://a.example/1,a\0b\nhttps://a.example/2,{'x' * 140_000}\n")
    assert main(["init", str(tmp_path / "my"), "--urls", str(tmp_path / "urls.csv")]) == 0
    assert load("generate", str(tmp_path / "my/generate.yaml")).prompts == ("a b", "x" * 300)


def test_a_table_that_does_not_say_where_its_urls_are_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jpg").touch()
    table = tmp_path / "urls.csv"
    for urls, text, says in (
        (table, "a,caption\n//b,c\n", "urls.csv: no column url or image_url or img_url or link; it has a, caption"),
        (table, "", "or link; it is empty"),
        (table, '"' + "x" * 140_000, "urls.csv: not readable after row 0 (field larger"),
        (tmp_path, "", f"is a folder of pictures; use --pictures {tmp_path}"),
    ):
        table.write_text(text)
        assert main(["init", str(tmp_path / "my"), "--urls", str(urls)]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "my/train.yaml").exists()


def test_ctrl_c_before_the_command_line_handles_it_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sdp.cli.main", interrupt)
    assert begin() == 130
    assert capsys.readouterr().err == "sdp: stopped by SIGINT; run it again\n"


def test_config_show_can_print_changes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "train", "--changed", "--set", "data.batch_size=12", "--set", "seed=0"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"data": {"batch_size": 12}}


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Undo the settings that a command line makes for its process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    console.configure()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("logging_as_before")
def test_quiet_leaves_errors_and_results_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "a"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["config", "show", "train", "--quiet", "--set", "limit=0"]) == 2
    assert "limit: expected" in capsys.readouterr().err
    assert main(["train", "--quiet", "--verbose"]) == 2
    assert "not allowed with" in capsys.readouterr().err


MISTYPED = """
conifg: expected a command, got the unknown command 'conifg'; did you mean sdp config?
xyzzy: expected a command, got the unknown command 'xyzzy'; see sdp --help
--hlep: expected a command, got the unknown option '--hlep'; did you mean sdp --help?
config: config: expected show or schema, got nothing; see sdp config --help
config shwo: config: expected show or schema, got 'shwo'; did you mean sdp config show?
config show trian: config show: JOB: expected download, score, caption, process, train, generate, evaluate or \
dreambooth, got 'trian'; did you mean train?
config show train --cofnig x: config show: expected one of its options, got '--cofnig'; did you mean --config?
config show train --bogus=1: config show: expected one of its options, got '--bogus=1'; see sdp config show --help
config show train limit=3: config show: expected no further argument, got 'limit=3'; did you mean --set limit=3?
config schema train x: config schema: expected no further argument, got 'x'; see sdp config schema --help
audit x --row y: audit: argument --row: expected a whole number, got 'y'; see sdp audit --help
config show: config show: the following arguments are required: JOB; see sdp config show --help
config show train --set: config show: argument --set: expected one argument; see sdp config show --help
config show train --set strategy.kind=zero: --set strategy.kind: expected ddp or fsdp, got 'zero'
"""
"""Command lines, each with its error."""


@pytest.mark.parametrize("case", MISTYPED.strip().splitlines())
def test_a_mistyped_line_is_one_line_with_the_nearest_thing_and_exit_code_2(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, _, message = case.partition(": ")
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"sdp: {message}\n")


def test_config_show_prints_yaml_that_can_be_used_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "show", "download", *ENDS, "--set", "limit=7"]) == 0
    shown, err = capsys.readouterr()
    assert err == ""
    (tmp_path / "job.yaml").write_text(shown, encoding="utf-8")
    assert main(["config", "show", "download", "--config", "job.yaml"]) == 0
    assert capsys.readouterr().out == shown
    assert "limit: 7\n" in shown


def test_config_show_without_a_file_prints_a_template_and_config_schema_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "show", "download"]) == 0
    out, err = capsys.readouterr()
    assert "  uri:  # REQUIRED, for example s3://bucket/laion-metadata\n" in out
    assert err == "sdp: still to be set: output.uri, source.uri\n"
    assert main(["config", "schema", "train"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "sdp train"


def test_a_refusal_by_a_command_has_its_own_exit_code_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("a: wrong\nb: wrong")

    def fail() -> None:
        raise SdpError("the store is away")

    assert main(["go"], command_with(lambda: 1)) == 1
    assert main(["go"], command_with(lambda: None)) == 0
    assert main(["go"], command_with(refuse)) == 2
    assert capsys.readouterr().err == "sdp: a: wrong\nsdp: b: wrong\n"
    assert main(["go"], command_with(fail)) == 1
    assert capsys.readouterr().err == "sdp: the store is away\n"


def test_a_bug_keeps_its_traceback() -> None:
    def bug() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        main(["go"], command_with(bug))


@pytest.mark.parametrize("line", ["--version", "config schema train"])
def test_output_to_a_closed_pipe_is_not_an_error(line: str) -> None:
    # A pipe whose reader is gone before the first byte, as `| head` is for a slow command; output that fits into
    # a buffer fails when that is flushed, and longer output before.
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sdp", *line.split()]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, cwd=ROOT, env=buffered, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def loaded_by(code: str) -> set[str]:
    done = ended([sys.executable, "-c", f"{code}\nimport sys; print('\\n'.join(sys.modules))"], cwd=ROOT, check=True)
    return {module.partition(".")[0] for module in done.stdout.splitlines()}


HEAVY = {"torch", "ray", "diffusers", "transformers", "pyarrow", "numpy", "PIL", "kubernetes", "obstore", "matplotlib"}


def test_help_and_usage_errors_import_nothing_that_takes_time() -> None:
    slow = HEAVY | {"pydantic", "yaml", "typer", "click", "rich", "asyncio", "http", "email"}
    assert not slow & loaded_by("from sdp.cli import main; main(['--help'])")
    assert not slow & loaded_by("from sdp.cli import main; main(['config', 'show', 'trian'])")


def test_a_configuration_error_imports_nothing_heavy() -> None:
    modules = loaded_by("from sdp.cli import main; main(['config', 'show', 'train', '--set', 'limit=0'])")
    assert not HEAVY & modules
    assert "pydantic" in modules


def test_a_job_gets_its_configuration_and_its_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_job: dict[str, object] = {}
    job = ModuleType("sdp.download.job")
    job.run = lambda config, **flags: fake_job.update(config=config, **flags)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sdp.download.job", job)
    (tmp_path / "d.yaml").write_text("source: {uri: in}\noutput: {uri: out}\n", encoding="utf-8")
    commands = [job_command("download", "Fetch.", only_failed="again")]
    arguments = ["download", "--config", str(tmp_path / "d.yaml"), "--set", "limit=5"]
    assert main(arguments, commands) == 0
    config = fake_job["config"]
    assert getattr(config, "limit", None) == 5
    assert (fake_job["dry_run"], fake_job["only_failed"]) == (False, False)
    assert main([*arguments, "--dry-run", "--only-failed"], commands) == 0
    assert (fake_job["dry_run"], fake_job["only_failed"]) == (True, True)
    fake_job.clear()
    assert main(["download", "--set", "source.uri=in"], commands) == 2
    assert capsys.readouterr().err.startswith("sdp: output.uri: expected a URI, got nothing")
    assert fake_job == {}, "a configuration that cannot work starts no job"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("line", ["--help", "config schema download"])
def test_a_disk_that_is_full_is_one_line(line: str) -> None:
    command = [sys.executable, "-m", "sdp", *line.split()]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    message = "sdp: there is no space left (No space left on device); make room, then run the same command again"
    assert (done.returncode, done.stderr.splitlines()) == (2, [message])


def test_a_job_in_the_base_installation_names_the_extra_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray.data")

    assert main(["go"], command_with(run)) == 2
    assert "sdp: sdp go: ray is not installed; pip install '.[worker]'" in capsys.readouterr().err
