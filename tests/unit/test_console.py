"""The progress line: as wide as the terminal, and never shown twice."""

import io
import logging
import threading
from contextlib import redirect_stderr

import pytest

from sdp import console
from sdp.console import SUBMITTED_ENV, Progress, configure, rate, rerun, say
from sdp.model.checkpoints import TrainState
from sdp.train.messages import summary_lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(file: io.StringIO, *texts: str) -> str:
    with redirect_stderr(file), Progress("job", every_s=10) as progress:
        for text in texts:
            progress.update(text)
    return file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"), [(1234.4, "1,234"), (16.2, "16"), (1.26, "1.3"), (0.034, "0.034"), (0, "0")]
)
def test_a_slow_rate_is_not_rounded_to_nothing(count: float, text: str) -> None:
    assert rate(count) == text


def test_a_command_that_is_run_again_keeps_its_configuration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["process", "--config", "my file.yaml", "--dry-run", "--changed", "--set", "a=1", "--set", "b=2"]
    monkeypatch.setattr("sys.argv", ["sdp", *words])
    assert rerun("process", "--only-failed") == (
        "sdp process --config 'my file.yaml' --set a=1 --set b=2 --only-failed"
    )
    assert rerun("download", "--only-failed") == "sdp download --only-failed"
    monkeypatch.setenv(SUBMITTED_ENV, "sdp submit process-large --set 'a=1 2'")
    assert rerun("process", "--only-failed") == "sdp submit process-large --set 'a=1 2' --only-failed"
    assert rerun("download") == "sdp download"


def test_a_job_says_what_it_does_until_its_first_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    said, twice = list[str](), threading.Event()

    def hear(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            twice.set()

    monkeypatch.setattr(console, "say", hear)
    with console.starting("train", "loading", every_s=0.001) as begun:
        assert twice.wait(60)
        begun()
    assert all(line.startswith("train: loading (") for line in said)
    assert "sdp-starting" not in [thread.name for thread in threading.enumerate()]


def test_a_line_is_cut_to_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = shown(Terminal(), "x" * 50).split("\r\x1b[2K")
    assert [line.rstrip("\n") for line in lines if line] == ["job: " + "x" * 13 + "…"]


def test_the_last_line_is_shown_once() -> None:
    assert shown(io.StringIO(), "1 of 2", "2 of 2", "2 of 2") == "job: 1 of 2\njob: 2 of 2\n"
    assert shown(io.StringIO(), "1 of 1", "1 of 1") == "job: 1 of 1\n"
    assert shown(io.StringIO(), "1 of 1 · 0.0508/s", "1 of 1 · 0.0507/s") == "job: 1 of 1 · 0.0508/s\n"


def test_what_had_no_progress_shows_no_line() -> None:
    assert shown(Terminal()) == shown(io.StringIO()) == ""


def test_a_line_cannot_control_the_terminal_or_the_direction_of_writing(capsys: pytest.CaptureFixture[str]) -> None:
    say("no column \x1b]0;a\x07\x9b2J\u202egnp.\u2066\r; it has é, 日本 👩\u200d🎨\n\tb", "error")
    assert capsys.readouterr().err == (
        "no column \\x1b]0;a\\x07\\x9b2J\\u202egnp.\\u2066\\r; it has é, 日本 👩\u200d🎨\n\tb\n"
    )
    with Progress("run") as progress:
        progress.update("for a\x9b2J")
    assert capsys.readouterr().err == "run: for a\\x9b2J\n"


def test_filters_are_chosen_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("sdp.some.part")
    before = logging.getLogger().handlers[:]
    try:
        configure(quiet=True)
        log.warning("a file is damaged")
        assert shown(io.StringIO(), "1 of 2") == shown(Terminal(), "1 of 2") == ""
        say("an error", level="error")
        assert capsys.readouterr().err == "an error\n"
        configure(verbose=True)
        log.debug("a detail")
        assert capsys.readouterr().err == "DEBUG sdp.some.part: a detail\n"
    finally:
        configure()
        logging.getLogger().handlers[:] = before
        logging.getLogger("sdp").setLevel(logging.NOTSET)


def test_a_run_of_a_cluster_is_drawn_with_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUBMITTED_ENV, "sdp submit train")
    *_, after = summary_lines(TrainState(step=1), "s3://b/run/checkpoints/step-1", "stopped")
    assert after == "next: sdp submit generate --set checkpoint=s3://b/run, or sdp export s3://b/run FOLDER"


def test_a_run_without_a_step_does_not_suggest_an_export() -> None:
    assert not any("sdp export" in line for line in summary_lines(TrainState(0), "CHECKPOINT", "stopped"))
    assert any("sdp export" in line for line in summary_lines(TrainState(step=1), "CHECKPOINT", "stopped"))
    small = summary_lines(TrainState(step=1), "CHECKPOINT", "stopped", lora=True)
    assert small[-1].endswith(" 'a prompt', or for ComfyUI, sdp export CHECKPOINT FILE.safetensors --lora")
