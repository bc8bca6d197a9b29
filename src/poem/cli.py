"""The command `poem`."""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from poem._version import __version__
from poem.commands import COMMANDS

DESCRIPTION = "Test-time adaptation as sentences. Commands in the order of a user's day:"


def parser(chosen: str | None = None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser | None]:
    """The whole command line, and the chosen command's own part; only that command's module is imported."""
    top = argparse.ArgumentParser(
        prog="poem",
        description=DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=20, width=100),
        epilog="poem COMMAND --help explains one of them; poem completion bash prints shell completion.",
    )
    top.add_argument("--version", action="version", version=f"poem-tta {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="say more while working")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    asked = None
    for name, help_line in COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=help_line)
        if name == chosen:
            module = import_module(f"poem.commands.{name.replace('-', '_')}")
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            command.epilog = module.__doc__
            module.options(command)
            asked = command
    return top, asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of use are one line that ends with what to type."""
    words = list(sys.argv[1:] if argv is None else argv)
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        near = difflib.get_close_matches(first, COMMANDS, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(f'poem {name}' for name in near)}?" if near else "see poem --help"
        print(f"poem: there is no command {first!r}; {hint}", file=sys.stderr)
        return 2
    top, asked = parser(first)
    args, unknown = top.parse_known_args(words)
    if unknown:
        (asked or top).error(_unknown(unknown, asked or top))
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="poem: %(message)s")
    module = import_module(f"poem.commands.{args.command.replace('-', '_')}")
    try:
        return int(module.run(args))
    except KeyboardInterrupt:
        print("poem: stopped", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, ImportError) as error:
        if args.verbose:
            raise
        print(f"poem {args.command}: {error}", file=sys.stderr)
        return 2


def _unknown(words: Sequence[str], command: argparse.ArgumentParser) -> str:
    """What was not understood, with the nearest option."""
    known = [option for action in command._actions for option in action.option_strings]
    near = difflib.get_close_matches(words[0].split("=")[0], known, n=1, cutoff=0.5)
    return f"not understood: {' '.join(words)}" + (f"; did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    sys.exit(main())
