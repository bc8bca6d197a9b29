"""One file per command, in the order of a user's day.

A command's module imports the standard library alone; what it needs beyond that is imported inside `run`, so that
`poem --help` answers at once.
"""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "demo": "methods side by side on corrupted digits, or one on your photos",
    "list": "names of methods, parts, corruptions, bases, data, scenarios, suites",
    "show": "a method as a sentence: its recipe, paper and differences",
    "predict": "answers for a folder of images without labels, as a CSV file",
    "corrupt": "a folder of images to the ImageNet-C layout",
    "verify": "measure a base's source accuracy and say what is wrong",
    "train-source": "train the small source networks: digits, cifar10",
    "data": "what of a data set is here, what is missing, where it comes from",
    "run": "measure one cell: a method on a base, a data set and an order",
    "bench": "measure every cell of a suite, on one machine or a cluster; resumable",
    "reproduce": "the paper's tables and figures, ours beside the paper's, as one page",
    "report": "a folder of results as Markdown and as one HTML page",
    "compare": "two folders of results: which cells differ, and by how much",
    "choose": "learning rates from the held-out corruptions, for --chosen",
    "completion": "a script that completes these in your shell",
}
"""Name and help line of every command; `poem.cli.<name with _ for ->` holds `options(parser)` and `run(args)`."""
