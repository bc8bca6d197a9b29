"""Examples:
poem completion bash > ~/.local/share/bash-completion/completions/poem
source <(poem completion zsh)
poem completion fish > ~/.config/fish/completions/poem.fish
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse

NAMES = {"show": "methods", "verify": "bases", "bench": "suites", "reproduce": "suites"}
"""Commands whose first word is one of a kind that `poem list` knows."""

BASH = """_poem() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"
  else case "$command" in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ ${{#COMPREPLY[@]}} -eq 0 ] && COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _poem poem
"""


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def run(args: argparse.Namespace) -> int:
    """Print a script that completes commands, options and names; it is made of words and calls nothing."""
    from poem.cli import COMMANDS

    words = {command: completions(command) for command in COMMANDS}
    if args.shell == "fish":
        print(f"complete -c poem -f -n __fish_use_subcommand -a '{' '.join(COMMANDS)}'")
        for command, each in words.items():
            print(f"complete -c poem -n '__fish_seen_subcommand_from {command}' -a '{' '.join(each)}'")
        return 0
    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    cases = "\n".join(f'    {command}) words="{" ".join(each)}";;' for command, each in words.items())
    print(BASH.format(commands=" ".join(COMMANDS), cases=cases))
    return 0


def completions(command: str) -> list[str]:
    """Options and names that may follow a command."""
    from importlib import import_module

    from poem.cli.list import KINDS, named

    found = list(KINDS) if command == "list" else list(named(NAMES[command])) if command in NAMES else []
    asked = argparse.ArgumentParser()
    import_module(f"poem.cli.{command.replace('-', '_')}").options(asked)
    return found + [option for action in asked._actions for option in action.option_strings if option[:2] == "--"]
