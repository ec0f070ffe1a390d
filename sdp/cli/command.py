"""A command, and a parser with one-line errors that suggest the nearest name, without a usage dump.

argparse rather than a nicer library: importing one of those takes a third of a second on a busy machine, which is all
that `sdp --help`, a mistyped option or a mistyped configuration may take.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sdp import console
from sdp.errors import UserError

JOBS = ("download", "process", "train", "generate", "evaluate", "dreambooth")

PIPELINE = "The pipeline, in its order"
LOOK = "Look before and after"
CLUSTER = "On Kubernetes"

Arguments = argparse.Namespace
Parser = argparse.ArgumentParser


def say(line: str, level: str = "info") -> None:
    """Say something by this program's name."""
    console.say(f"sdp: {line}" if not console.as_json() else line, level=level)


class UsageError(UserError):
    """A command line that cannot be meant."""


class HelpPrinted(Exception):
    """--help was asked for, and is on the screen."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `sdp` and the function that runs it."""

    name: str
    group: str
    summary: str
    """One sentence, shown by `sdp --help`."""
    arguments: Callable[[Parser], None]
    run: Callable[[Arguments], int | None]
    example: str = ""
    """A typical command line, without `sdp`."""


class CommandParser(argparse.ArgumentParser):
    """A command's parser."""

    def __init__(self, command: Command) -> None:
        self._command = command
        super().__init__(
            prog=f"sdp {command.name}",
            description=command.summary,
            epilog=f"example: sdp {command.example}" if command.example else None,
            allow_abbrev=False,
        )
        output = self.add_argument_group("what is shown").add_mutually_exclusive_group()
        output.add_argument("-q", "--quiet", action="store_true", help="errors and results alone")
        output.add_argument("-v", "--verbose", action="store_true", help="what sdp and its libraries log as well")
        self.add_argument(
            "--log-format", metavar="FORMAT", choices=console.FORMATS, help="text, or json: an object a line"
        )

    def error(self, message: str) -> NoReturn:
        for kind, words in (("int", "a whole number"), ("float", "a number")):
            message = message.replace(f"invalid {kind} value:", f"expected {words}, got")
        raise UsageError(f"{self._command.name}: {message}; see {self.prog} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:  # noqa: ARG002 - argparse's signature
        raise HelpPrinted

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            *most, last = choices
            words = f"{', '.join(most)} or {last}"
            name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
            near = nearest(str(value), choices, self.prog)
            raise UsageError(f"{self._command.name}: {name}: expected {words}, got {value!r}; {near}")


def unknown_argument(unknown: str, parser: Parser, command: Command) -> str:
    options = [option[2:] for action in parser._actions for option in action.option_strings if option[:2] == "--"]
    if unknown.startswith("-"):
        near = nearest(unknown.partition("=")[0].lstrip("-"), options, parser.prog, "--")
        return f"{command.name}: expected an option it has, got {unknown!r}; {near}"
    known = "=" in unknown and "set" in options
    hint = f"did you mean --set {unknown}?" if known else f"see {parser.prog} --help"
    return f"{command.name}: expected no further argument, got {unknown!r}; {hint}"


def nearest(word: str, known: Sequence[str], program: str, prefix: str = "") -> str:
    import difflib

    near = difflib.get_close_matches(word, known, 1, 0.6)
    return f"did you mean {prefix}{near[0]}?" if near else f"see {program} --help"


def settings(parser: Parser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the job's YAML; without one, the defaults")
    set_argument(parser)


def set_argument(parser: Parser) -> None:
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set one key of the configuration by its dotted path; may be given again",
    )


def job_argument(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", choices=JOBS, help=", ".join(JOBS))


def without(error: ModuleNotFoundError, command: str) -> Exception:
    """Return the error for a missing library; a missing module of our own is a bug."""
    missing = (error.name or "").partition(".")[0]
    if missing == "sdp":
        return error
    return UserError(
        f"sdp {command}: expected an installation for workers, got one without {missing}; "
        "pip install 'sdp[worker]', or submit the job to a cluster"
    )
