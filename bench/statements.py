"""How large and how plain the package is, by folder: statements, `Any`, names, comments, arrows.

    python bench/statements.py [FOLDER...]

With several folders, such as `jaxmp` of two checkouts, their totals side by side.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
BLANK = tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
EMPTY_NAMES = {  # they do not say what a thing is
    'own', 'at', 'found', 'made', 'known', 'kept', 'said', 'held', 'given', 'both',
}  # fmt: skip
LONG = 25  # lines of code of a function that needs a comment


def measured(source):
    """The counts of a source text."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = [n.body[0] for n in nodes if isinstance(n, DOCUMENTED) and ast.get_docstring(n)]
    code, comments = lines_of(source)
    code -= {line for node in docstrings for line in lines(node)}
    long = [f for f in nodes if isinstance(f, FUNCTION) and len(code & lines(f)) > LONG]
    return Counter(
        {
            'statements': sum(isinstance(n, ast.stmt) for n in nodes) - len(docstrings),
            'lines of code': len(code),
            'Any': sum(isinstance(n, ast.Name) and n.id == 'Any' for n in nodes),
            'empty names': sum(binding(n) in EMPTY_NAMES for n in nodes),
            'lines with a comment': len(comments),
            'long functions': len(long),
            'long without comment': sum(not comments & lines(f) for f in long),
        }
    )


def lines(node):
    """The numbers of a node's lines."""
    return set(range(node.lineno, node.end_lineno + 1))


def lines_of(source):
    """The numbers of the lines with code, and of those with a comment."""
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in BLANK:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code, comments


def binding(node):
    """The name that a node binds, of a variable, a field or an argument; else None."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def by_folder(root):
    """The counts of each folder of a package; its files at the top are one folder, ``.``."""
    counts = {}
    for file in root.rglob('*.py'):
        first, *rest = file.relative_to(root).parts
        counts.setdefault(first if rest else '.', Counter()).update(measured(file.read_text()))
    return counts


def arrows(root):
    """Which rooms, folders or files at the top, import which; entry points are none."""
    found = {}
    for file in root.rglob('*.py'):
        room = file.relative_to(root).with_suffix('').parts[0]
        if file.name != '__main__.py' and room != '__init__':
            rooms = found.setdefault(room, set())
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    inner = [f'{node.module}.{a.name}' for a in node.names]
                    names = inner if node.module == root.name else [node.module]
                    rooms |= {n.split('.')[1] for n in names if n.startswith(f'{root.name}.')}
            rooms.discard(room)
    return found


def in_circles(imports):
    """The rooms that import themselves, by way of others."""
    reached = {room: set(imports[room]) for room in imports}
    for _ in imports:
        for rooms in reached.values():
            rooms |= set().union(*(imports.get(r, set()) for r in rooms))
    return [room for room, rooms in reached.items() if room in rooms]


def totals(root):
    """The measures of a package as a whole."""
    total, imports = sum(by_folder(root).values(), Counter()), arrows(root)
    per = lambda name: 1000 * total[name] / total['lines of code']
    rooms = [path for path in root.iterdir() if path.name != '__pycache__']
    return {
        'rooms (entries of the folder)': len(rooms),
        'arrows between rooms': sum(map(len, imports.values())),
        'rooms in circles': len(in_circles(imports)),
        **total,
        'Any per 1,000 lines of code': per('Any'),
        'comments per 1,000 lines of code': per('lines with a comment'),
    }


def main():
    """Prints the table: of one folder its rooms, of several their totals."""
    roots = [Path(a) for a in sys.argv[1:] or ['jaxmp']]
    if len(roots) == 1:
        counts = by_folder(roots[0])
        columns = ['statements', 'lines of code', 'Any', 'empty names', 'long without comment']
        print(f'{"":12}', *(f'{name:>21}' for name in columns))
        for room, row in sorted(counts.items()):
            print(f'{room:12}', *(f'{row[name]:21,}' for name in columns))
    rows = [totals(root) for root in roots]
    for name in rows[0]:
        values = (row[name] for row in rows)
        print(
            f'{name:34}', *(f'{v:10,.1f}' if isinstance(v, float) else f'{v:10,}' for v in values)
        )


if __name__ == '__main__':
    main()
