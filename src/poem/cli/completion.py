"""Examples:
poem completion bash > ~/.local/share/bash-completion/completions/poem
eval "$(poem completion zsh)"
poem completion fish > ~/.config/fish/completions/poem.fish

Needs shtab: pip install 'poem-tta[completion]'
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse

from poem.cli._option_checks import path_argument
from poem.cli.list import KINDS as LISTED
from poem.cli.list import names_of

ARGUMENTS = {
    "base": "bases", "model": "bases", "method": "methods", "methods": "methods", "corruption": "corruptions",
    "corruptions": "corruptions", "scenario": "scenarios", "suite": "suites", "suites": "suites", "names": "suites",
    "data": "data", "name": "data",
}  # fmt: skip
"""Arguments whose values are names that `poem list KIND` prints."""
VALUES = {"preset": ("imagenet", "cifar", "cifar10", "cifar100"), "scale": ("tiny", "cifar10", "full"), "what": LISTED}
PATHS = ("a", "b", "classes", "json", "root", "root_option", "weights")
"""Arguments that take a path but are not parsed as one."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def run(args: argparse.Namespace) -> int:
    """Print a script that completes commands, options, names and paths; the script itself does not call poem."""
    from poem.cli import COMMANDS
    from poem.cli.main import build_parser

    try:
        import shtab
    except ImportError as error:
        raise ImportError("poem completion needs shtab; type: pip install 'poem-tta[completion]'") from error

    top, parsers = build_parser(COMMANDS)
    names = {kind: list(names_of(kind)) for kind in LISTED}
    for action in [action for parser in parsers.values() for action in parser._actions]:
        if action.type is path_argument or action.dest in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.choices is None:
            action.choices = VALUES.get(action.dest) or names.get(ARGUMENTS.get(action.dest, ""))
    print(shtab.complete(top, args.shell))
    return 0
