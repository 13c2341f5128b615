"""Lines of code by folder, without blank lines, comments and docstrings: ``python tests/lines.py [TREE]``."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FOLDERS = ("zerorun", "ops", "launcher", "tests", "examples", "bin")


def code_lines(text: str) -> int:
    """Lines of Python that have a token which is neither layout nor part of a docstring."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(text)):  # those of fields, too
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            inside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - inside)


def by_folder(tree: Path) -> dict[str, tuple[int, int]]:
    """Folder -> (files, lines of code)."""
    files, lines = Counter[str](), Counter[str]()
    for folder in FOLDERS:
        for path in sorted((tree / folder).rglob("*.py")):
            name = str(path.parent.relative_to(tree))
            files[name] += 1
            lines[name] += code_lines(path.read_text())
    return {name: (files[name], lines[name]) for name in files}


def main() -> None:
    tree = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    found = by_folder(tree)
    for name, (files, lines) in found.items():
        print(f"{name:<40}{files:>6} files{lines:>8} lines")
    for title, chosen in (("product", FOLDERS[:3]), ("tests", ("tests",))):
        rows = [row for name, row in found.items() if name.split("/")[0] in chosen]
        print(f"{title:<40}{sum(row[0] for row in rows):>6} files{sum(row[1] for row in rows):>8} lines")


if __name__ == "__main__":
    main()
