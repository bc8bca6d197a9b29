"""Sphinx settings."""

from typing import Any

project = "poem-tta"
author = "The poem-tta maintainers"
copyright = "2026, the poem-tta maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"
nitpicky = False


def _paragraphs(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Give `Paper:`, `Reference code:` and `Differs:` a paragraph each."""
    heads = ("Paper:", "Reference code:", "Differs:", "Draws:")
    inside, done = False, []
    for line in lines:
        begins = line.startswith(heads)
        if begins:
            done.append("")
        inside = (inside or begins) and bool(line.strip())
        done.append(line.strip() if inside else line)
    lines[:] = done


def setup(app: Any) -> None:
    """Hook into autodoc."""
    app.connect("autodoc-process-docstring", _paragraphs, priority=400)
