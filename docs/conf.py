"""Sphinx settings."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project = "poem-tta"
author = "The poem-tta maintainers"
copyright = "2026, the poem-tta maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
html_theme = "furo"
html_math_renderer = "mathml"  # no script from elsewhere: the pages can be read without a network
autosummary_generate = False
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


def _signature(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Write `Annotated[float, Range(...)]` as `float`: the range is for the check, and errors say it."""
    bounds = r"~?(?:typing\.)?Annotated\[(\w+), ~?poem\.parts\.fields\.Range\(.*?\)\]"
    return signature and re.sub(bounds, r"\1", signature), returns


def _formula(translator: Any, node: nodes.Element) -> None:
    """Write an equation as MathML, which browsers show by themselves."""
    # MathML leaves no space around the name of a function.
    written = tex2mathml(re.sub(r"\s*\\ln\s+", r"\\,\\ln\\,", node.astext()))
    if isinstance(node, nodes.math_block):
        written = written.replace("<math ", '<math display="block" displaystyle="true" ', 1)
    translator.body.append(written)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Hook into autodoc, and draw equations."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("autodoc-process-docstring", _paragraphs, priority=400)
    app.connect("autodoc-process-signature", _signature)
