"""The command line: one module per command, with `add_options(parser)` and `run(args)`.

At its top a command's module imports the standard library and light modules of this package alone; the rest is imported
inside `run`, so that `poem --help` needs no torch.
"""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "demo": "methods side by side on corrupted digits, or one on your photos",
    "list": "names of methods, parts, corruptions, bases, data, scenarios, suites",
    "show": "one method: recipe, paper, differences; or a table of the paper",
    "predict": "predictions for a folder of images without labels, as a CSV file",
    "replay": "repeat a guarded run from its audit, and compare it bit for bit",
    "serve": "answer many streams over HTTP: one guarded adapter each, one model for all",
    "load": "send a service requests at a rate, and print latencies and throughput",
    "corrupt": "corrupt a folder of images into the ImageNet-C layout",
    "verify": "measure a base's source accuracy and say what is wrong",
    "train-source": "train the small source networks: digits, cifar10, cifar100",
    "data": "which files of a data set are here and which are missing; download it",
    "run": "measure one cell: a method on a base, a data set and an order",
    "bench": "measure every cell of a suite, on one machine or a cluster; resumable",
    "reproduce": "the paper's tables and figures, ours beside the paper's, as one page",
    "report": "a folder of results as Markdown and as one HTML page",
    "compare": "two folders of results: which cells differ, and by how much",
    "choose": "learning rates from the held-out corruptions, for --chosen",
    "completion": "print a script for tab completion in bash, zsh or fish",
}
"""Name and help line of every command, in the order of a user's day; its module has the name with _ for -."""
