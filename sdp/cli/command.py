"""A command of `sdp`, and its parser, whose errors are one line long and suggest the nearest name.

It uses argparse because importing a nicer library takes a third of a second on a busy machine. `sdp --help`, and an
error in an option or a configuration, may take no longer than that in all.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sdp import console
from sdp.errors import UserError

JOBS = ("download", "score", "caption", "process", "train", "generate", "evaluate", "dreambooth")

PIPELINE = "The pipeline, in order"
LOOK = "Before and after a job"
CLUSTER = "On Kubernetes"

Arguments = argparse.Namespace
Parser = argparse.ArgumentParser
RunCommand = Callable[[Arguments], int | None]
_ARGUMENTS = "arguments"


def say(line: str, level: str = "info") -> None:
    """Print a line that begins with the program's name."""
    console.say(f"sdp: {line}", level=level)


class UsageError(UserError):
    """An invalid command line."""


class HelpPrinted(Exception):
    """The end of a command that has printed its help."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `sdp` and the function that runs it."""

    name: str
    group: str
    summary: str
    """One sentence, shown by `sdp --help`."""
    arguments: Callable[[Parser], object]
    run: RunCommand
    example: str = ""
    """A typical command line, without `sdp`."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One or more arguments of a command, which decorate its function."""

    add: Callable[[argparse._ActionsContainer], object]

    def __call__(self, run: RunCommand) -> RunCommand:
        vars(run).setdefault(_ARGUMENTS, []).insert(0, self)  # the decorator nearest to the function comes first
        return run


class CommandParser(argparse.ArgumentParser):
    """A command's parser."""

    def __init__(self, command: Command) -> None:
        self._command = command
        example = f"example: sdp {command.example}" if command.example else None
        super().__init__(f"sdp {command.name}", description=command.summary, epilog=example, allow_abbrev=False)
        output = self.add_argument_group("output").add_mutually_exclusive_group()
        output.add_argument("-q", "--quiet", action="store_true", help="print only errors and results")
        output.add_argument("-v", "--verbose", action="store_true", help="also print the log of sdp and its libraries")
        command.arguments(self)

    def error(self, message: str) -> NoReturn:
        for kind, words in (("int", "a whole number"), ("float", "a number")):
            message = message.replace(f"invalid {kind} value:", f"expected {words}, got")
        raise UsageError(f"{self._command.name}: {message}; see {self.prog} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:  # noqa: ARG002 - argparse's signature
        raise HelpPrinted

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
            near = nearest(str(value), choices, self.prog)
            raise UsageError(f"{self._command.name}: {name}: expected {console.either(choices)}, got {value!r}; {near}")


_OF_OTHERS = {
    **dict.fromkeys(("resume", "resume_from_checkpoint"), "sdp continues by itself: run the same command again"),
    **dict.fromkeys(("max_steps", "max_train_steps", "steps"), "use --set max_steps=N"),
    **dict.fromkeys(("epochs", "num_train_epochs", "max_train_epochs"), "use --set max_epochs=N, and max_steps=null"),
    **dict.fromkeys(("lr", "learning_rate"), "use --set optimizer.learning_rate=1e-5"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "use --set data.batch_size=N"),
    **dict.fromkeys(("output_dir", "output_folder", "output"), "use --set output.uri=FOLDER"),
    **dict.fromkeys(("model", "pretrained_model_name_or_path"), "use --set model.source=MODEL"),
    **dict.fromkeys(("input", "url_list", "train_data_dir", "instance_data_dir"), "use --set source.uri=FOLDER"),
    **dict.fromkeys(("rank", "network_dim"), "use --set lora.rank=N"),
    **dict.fromkeys(("prompt", "validation_prompt", "instance_prompt"), "see the prompts in `sdp config show JOB`"),
    "image_size": "use --set image.size=N",
    "seed": "use --set seed=N",
}
"""Options of other programs, and what to use here."""


def unknown_argument(unknown: str, parser: Parser, command: Command) -> str:
    """Return the error message for an argument that a command does not have."""
    options = [option[2:] for action in parser._actions for option in action.option_strings if option[:2] == "--"]
    if unknown.startswith("-"):
        name = unknown.partition("=")[0].lstrip("-")
        hint = _OF_OTHERS.get(name.replace("-", "_")) if "set" in options else None
        hint = hint or nearest(name, options, parser.prog, "--")
        return f"{command.name}: expected one of its options, got {unknown!r}; {hint}"
    is_setting = "=" in unknown and "set" in options
    hint = f"did you mean --set {unknown}?" if is_setting else f"see {parser.prog} --help"
    return f"{command.name}: expected no further argument, got {unknown!r}; {hint}"


def nearest(word: str, known: Sequence[str], program: str, prefix: str = "") -> str:
    """Return a hint for a misspelt word: the known word nearest to it, or the program's help."""
    near = console.nearest(word, known)
    return f"did you mean {prefix}{near}?" if near else f"see {program} --help"


def argument(usage: str, description: str, **more: Any) -> Argument:
    """Return an argument by its usage: `--rows N` takes a value, `--json` is a switch, `URI` is a positional one."""
    name, _, metavar = usage.partition(" ")
    if metavar:
        more["metavar"] = metavar
    elif not name.startswith("-"):
        name, more["metavar"] = name.lower(), name
    else:
        more["action"] = "store_true"
    return Argument(lambda parser: parser.add_argument(name, help=description, **more))


def all_of(*arguments: Argument) -> Argument:
    """Return several arguments as one."""
    return Argument(lambda parser: [each.add(parser) for each in arguments])


def one_of(*arguments: Argument, required: bool = False) -> Argument:
    """Return arguments that exclude one another; if `required`, one must be given."""
    return Argument(lambda parser: all_of(*arguments).add(parser.add_mutually_exclusive_group(required=required)))


def command(group: str, example: str) -> Callable[[RunCommand], Command]:
    """Make the function below a command with the function's name and arguments, and its docstring as the summary."""

    def made(run: RunCommand) -> Command:
        arguments = all_of(*vars(run).get(_ARGUMENTS, ()))
        return Command(run.__name__.replace("_", " "), group, run.__doc__ or "", arguments.add, run, example)

    return made


JOB = argument("JOB", ", ".join(JOBS), choices=JOBS)
SET = argument(
    "--set KEY=VALUE",
    "set one key of the configuration by its dotted path; may be repeated",
    action="append",
    default=[],
)
SETTINGS = all_of(argument("--config FILE", "the job's YAML file; without one, defaults apply"), SET)
JSON = argument("--json", "print JSON")
