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
PACKAGES = ("accelerate", "engine", "parts")  # of src/poem


def tree_hash(root: Path = ROOT) -> str:
    """Sixteen hex digits over the syntax trees of the packages' Python files."""
    found = hashlib.sha256()
    for package in PACKAGES:
        folder = root / "src" / "poem" / package
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{package}/{path.relative_to(folder).as_posix()}\n{_plain(path.read_text())}\n".encode())
    return found.hexdigest()[:16]


def _plain(text: str) -> str:
    """A file's syntax tree as text, with every docstring emptied."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                first.value.value = ""
    return ast.dump(tree)


if __name__ == "__main__":
    print(tree_hash())
