"""The command `poem`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from poem._version import __version__
from poem.commands import COMMANDS


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The whole command line; only the chosen command's module is imported."""
    top = argparse.ArgumentParser(prog="poem", description="Test-time adaptation as sentences.")
    top.add_argument("--version", action="version", version=f"poem-tta {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="say more while working")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_line in COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=help_line)
        if name == chosen:
            module = import_module(f"poem.commands.{name.replace('-', '_')}")
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            command.epilog = module.__doc__
            module.options(command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of use are one line that ends with what to type."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if word in COMMANDS), None)
    args = parser(chosen).parse_args(words)
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


if __name__ == "__main__":
    sys.exit(main())
