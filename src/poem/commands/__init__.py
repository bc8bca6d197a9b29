"""One file per command, in the order of a user's day.

A command's module imports the standard library alone; what it needs beyond that is imported inside `run`, so that
`poem --help` answers at once.
"""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "demo": "watch source, tent and poem on a stream of corrupted digits",
    "list": "names of methods, one line each",
    "show": "a method as a sentence: its recipe, paper and differences",
    "corrupt": "a folder of images to the ImageNet-C layout",
    "verify": "measure a base's source accuracy and say what is wrong",
    "train-source": "train the small source networks: digits, cifar10",
    "data": "what of a data set is here, what is missing, where it comes from",
}
"""Name and help line of every command; `poem.commands.<name with _ for ->` holds `options(parser)` and `run(args)`."""
