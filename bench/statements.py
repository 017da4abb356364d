"""How large the package is: statements (nodes of `ast.stmt`), docstrings apart, by folder.

    python bench/statements.py [FOLDER...]

With several folders, such as `jaxmp` of two checkouts, a column each.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def statements(source):
    """How many a source text has."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = (n for n in nodes if isinstance(n, DOCUMENTED) and ast.get_docstring(n))
    return sum(isinstance(n, ast.stmt) for n in nodes) - sum(1 for _ in docstrings)


def by_folder(root):
    """Statements of each folder of a package."""
    counts = Counter()
    for file in root.rglob('*.py'):
        first, *rest = file.relative_to(root).parts
        counts[first if rest else '.'] += statements(file.read_text())
    return counts


def main():
    """Prints the table."""
    found = [by_folder(Path(a)) for a in sys.argv[1:] or ['jaxmp']]
    for name in sorted(set().union(*found)):
        print(f'{name:12}', *(f'{c[name]:8,}' for c in found))
    print(f'{"all":12}', *(f'{c.total():8,}' for c in found))


if __name__ == '__main__':
    main()
