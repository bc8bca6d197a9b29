"""The hash of the code that a measured speed is a claim about.

    python benchmarks/tree_hash.py

Every file of results/speed/ records it, and a page quotes a file only while the hash is today's (`speed_docs.py`).
Comments, docstrings and layout are no part of it.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ("accelerate", "adapter.py", "engine", "parts", "recipes")  # packages and files of src/poem
GUARDED = ("guarded",)
"""What the speed of a guarded method is about, besides those; other rows run none of it."""
STACKED = ("serve/stack*.py",)
"""What a speed of stacked streams is about, besides those: without HTTP, and these import no other file of it."""


def tree_hash(root: Path = ROOT, names: tuple[str, ...] = MEASURED) -> str:
    """Sixteen hex digits over the syntax trees of the Python files of these packages, or that fit these patterns."""
    found, source = hashlib.sha256(), root / "src" / "poem"
    for name in names:
        paths = sorted(source.glob(name) if name.endswith(".py") else (source / name).rglob("*.py"))
        if not paths:
            raise FileNotFoundError(
                f"expected Python files at {name} in {source}, got none: a hash of nothing never ages"
            )
        for path in paths:
            if path.is_file():
                found.update(
                    f"{path.relative_to(source).as_posix()}\n{plain_tree(ast.parse(path.read_text()))}\n".encode()
                )
    return found.hexdigest()[:16]


def plain_tree(node: object) -> str:
    """A syntax tree as text, the same in every version of Python that parses the file.

    Fields without a value, which versions add and `ast.dump` shows or not, are left out, and so is every string that
    stands alone: docstrings of modules, classes, functions and attributes.
    """
    if isinstance(node, list):
        return f"[{','.join(plain_tree(each) for each in node if not _is_text(each))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    if isinstance(node, ast.Constant):  # its value may be None; `kind` is that of u"text"
        fields = iter([("value", node.value)])
    return f"{type(node).__name__}({','.join(f'{name}={plain_tree(value)}' for name, value in fields)})"


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    print(tree_hash())
