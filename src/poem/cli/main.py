"""The command `poem`."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from poem._util.malloc import keep_freed_memory
from poem._util.nearest import nearest_hint, nearest_names
from poem._version import __version__
from poem.cli import COMMANDS

DESCRIPTION = "Test-time adaptation as sentences. Commands in the order of a user's day:"


class Parser(argparse.ArgumentParser):
    """Names the nearest choice where an option has none like the word given."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(each) for each in action.choices]
            hint = nearest_hint(str(value), choices, most=2, cutoff=0.5, otherwise=f"one of: {', '.join(choices)}")
            raise argparse.ArgumentError(action, f"there is no choice {str(value)!r}; {hint}")


def parser(chosen: str | None = None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser | None]:
    """The whole command line, and the chosen command's own part; only that command's module is imported."""
    top = Parser(
        prog="poem",
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=20, width=100),
        epilog="poem COMMAND --help explains one of them; poem completion bash prints shell completion.",
    )
    top.add_argument("--version", action="version", version=f"poem-tta {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="say more while working")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    asked = None
    for name, help_line in COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        if name == chosen:
            module = import_module(f"poem.cli.{name.replace('-', '_')}")
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            command.epilog = module.__doc__
            module.options(command)
            asked = command
    return top, asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; one whose reader goes away, as in `poem list | head`, ends without a word."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of any bytes can be printed, on a terminal of any encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:  # what is left in it goes nowhere, so that the interpreter can end in peace
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + 13  # as a shell says of a process that SIGPIPE ended


def _run(argv: Sequence[str] | None) -> int:
    """Errors of use are one line that ends with what to type."""
    words = list(sys.argv[1:] if argv is None else argv)
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        hint = nearest_hint(first, COMMANDS, most=2, cutoff=0.5, show="poem {}".format, otherwise="see poem --help")
        print(f"poem: there is no command {first!r}; {hint}", file=sys.stderr)
        return 2
    top, asked = parser(first)
    if not words:
        top.print_help()
        return 2
    if asked is not None:
        _refuse_unknown(words, asked)
    args = top.parse_args(words)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="poem: %(message)s")
    keep_freed_memory()
    module = import_module(f"poem.cli.{args.command.replace('-', '_')}")
    try:
        return int(module.run(args))
    except KeyboardInterrupt:
        print("poem: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:
        if args.verbose:
            raise
        print(f"poem {args.command}: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # nobody foresaw it: a network and images that do not fit, no memory, a bug
        if args.verbose:
            raise
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        said = f"{type(error).__name__}: {reason}; poem -v {args.command} prints the traceback"
        print(f"poem {args.command}: {said}", file=sys.stderr)
        return 2


def _refuse_unknown(words: Sequence[str], command: argparse.ArgumentParser) -> None:
    """An option that the command has not is its own error, with the nearest one, before its value is taken for more."""
    known = [option for action in command._actions for option in action.option_strings] + ["--verbose", "--version"]
    for word in words:
        name = word.split("=")[0]
        if name == "--":
            return
        if name.startswith("--") and name not in known:
            near = nearest_names(name, known, cutoff=0.5)
            command.error(f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else ""))


if __name__ == "__main__":
    sys.exit(main())
