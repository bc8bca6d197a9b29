"""The command `poem`."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

from poem._util.files import printable, printable_lines
from poem._util.malloc import keep_freed_memory
from poem._util.nearest import nearest_hint, nearest_names
from poem._version import __version__
from poem.cli import COMMANDS


class _PrintableFormatter(logging.Formatter):
    """Shows control characters of file names as escapes, so that a name cannot move a terminal's cursor."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record, and escape what cannot be printed."""
        return printable_lines(super().format(record))


DESCRIPTION = "Test-time adaptation of image classifiers. Commands in the order of a user's day:"


class Parser(argparse.ArgumentParser):
    """An argument parser whose error for an invalid choice names the nearest one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(each) for each in action.choices]
            hint = nearest_hint(str(value), choices, most=2, cutoff=0.5, otherwise=f"one of: {', '.join(choices)}")
            raise argparse.ArgumentError(action, f"there is no choice {str(value)!r}; {hint}")


def build_parser(commands: Collection[str]) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Build the parser of the command line, and return those of some commands by name.

    Only the modules of these commands are imported; the others appear in the help with their help line alone.
    """
    top = Parser(
        prog="poem",
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=20, width=100),
        epilog="poem COMMAND --help explains one of them; poem completion bash prints shell completion.",
    )
    top.add_argument("--version", action="version", version=f"poem-tta {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="log more, and print tracebacks")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, help_line in COMMANDS.items():
        command = subparsers.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        if name in commands:
            module = _module(name)
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            command.epilog = module.__doc__
            module.add_options(command)
            parsers[name] = command
    return top, parsers


def _module(command: str) -> Any:
    return import_module(f"poem.cli.{command.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a closed pipe, as in `poem list | head`, ends it silently."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # so that any file name can be printed, whatever the encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _dispatch(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:  # discard what is buffered, or the interpreter's own flush at exit fails
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + 13  # a shell's exit code for SIGPIPE


def _dispatch(argv: Sequence[str] | None) -> int:
    """Parse the arguments and run the command; an error is printed as one line that ends with what to type."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = next((word for word in arguments if not word.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        hint = nearest_hint(first, COMMANDS, most=2, cutoff=0.5, show="poem {}".format, otherwise="see poem --help")
        print(f"poem: there is no command {first!r}; {hint}", file=sys.stderr)
        return 2
    top, parsers = build_parser([] if first is None else [first])
    if not arguments:
        top.print_help()
        return 2
    if first is not None:
        _check_option_names(arguments, parsers[first])
    args = top.parse_args(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("poem: %(message)s"))
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, handlers=[handler])
    keep_freed_memory()
    try:
        return int(_module(args.command).run(args))
    except KeyboardInterrupt:
        print("poem: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:
        if args.verbose:
            raise
        print(f"poem {args.command}: {printable_lines(str(error))}", file=sys.stderr)
        return 2
    except Exception as error:  # unforeseen: images that do not fit the network, no memory, a bug
        if args.verbose:
            raise
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        hint = f"poem -v {args.command} prints the traceback"
        print(f"poem {args.command}: {type(error).__name__}: {printable(reason)}; {hint}", file=sys.stderr)
        return 2


def _check_option_names(arguments: Sequence[str], command: argparse.ArgumentParser) -> None:
    """Report an unknown option with the nearest one; argparse would first complain about its value."""
    options = [option for action in command._actions for option in action.option_strings]
    options += ["--verbose", "--version"]
    for word in arguments:
        name = word.split("=")[0]
        if name == "--":
            return
        if name.startswith("--") and name not in options:
            alike = nearest_names(name, options, cutoff=0.85)  # --method for --methods, --batch_size for --batch-size
            if "--set" in options and not alike and (field := _settable_field(name)):
                command.error(f"there is no option {name}; it is a field of the cell: --set {field}=VALUE")
            near = alike or nearest_names(name, options, cutoff=0.5)
            command.error(f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else ""))


def _settable_field(option: str) -> str:
    """The field of a cell that an option would be named after and that `--set` takes; empty where there is none."""
    from poem.bench.cell import settable_fields

    word = option.removeprefix("--").replace("-", "_")
    return word if word in settable_fields() else ""


if __name__ == "__main__":
    sys.exit(main())
