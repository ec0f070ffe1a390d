"""Completion in bash, zsh and fish: `sdp completion SHELL` prints what a shell needs, argcomplete does the rest."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args, get_origin

from sdp.cli.command import LOOK, Arguments, Command, argument, command

SHELLS = ("bash", "zsh", "fish")


@command(LOOK, "completion bash >> ~/.bashrc")
@argument("SHELL", ", ".join(SHELLS), choices=SHELLS)
def completion(args: Arguments) -> None:
    """Print what bash, zsh or fish needs to complete commands, options and keys of --set."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["sdp"], shell=args.shell))


def complete(commands: Sequence[Command]) -> None:
    """Print the possible completions at the cursor for the shell, and exit."""
    import argcomplete

    root = argparse.ArgumentParser("sdp")
    groups = {"": root.add_subparsers()}
    for each in commands:
        group, _, name = each.name.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group).add_subparsers()
        parser = groups[group].add_parser(name)
        each.arguments(parser)
        for action in parser._actions:
            if action.dest == "set":
                setattr(action, "completer", partial(_settings, each.name))  # noqa: B010 - argcomplete's attribute
    argcomplete.autocomplete(root)


def _settings(command: str, parsed_args: Arguments, **_: Any) -> Iterator[str]:
    """Yield KEY= for every key of the line's job, and KEY=VALUE for keys with a few possible values."""
    from sdp.config import JOBS, keys
    from sdp.config.phrases import union_members, unwrap

    job = str(getattr(parsed_args, "job", command)).partition("-")[0]
    if job not in JOBS:
        return
    for key in keys(JOBS[job]):
        words = list[str]()
        annotation = unwrap(key.field.annotation)[0]
        for member in union_members(annotation) or [annotation]:
            if get_origin(member) is Literal:
                words += get_args(member)
            elif member is bool:
                words += ["true", "false"]
        yield from [f"{key.path}={word}" for word in words] or [f"{key.path}="]
