"""Docstrings as Markdown: doctests become code, for `>>>` is three quotations, and what stands in
`.. math::` and `:math:` stands between dollars, from which `docs/mathml.py` makes formulas. Fields
that a docstring does not list follow it.
"""

import ast
import re
from typing import Any

import griffe

DOCTEST = re.compile(r'^>>> .*\n?(?:^.*\S.*\n?)*', re.MULTILINE)
BLOCK = re.compile(r'^\.\. math:: *(.*(?:\n +\S.*)*)', re.MULTILINE)
ROLE = re.compile(r':math:`([^`]+)`')


class Docstrings(griffe.Extension):
    """Docstrings of the API pages."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Is called with each module, class and function."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_class_members(self, *, node: Any, cls: griffe.Class, **kwargs: Any) -> None:
        """Is called with each class when its members are known."""
        if not isinstance(node, ast.ClassDef) or not cls.docstring:
            return
        named = 'NamedTuple' in map(ast.unparse, node.bases)
        if named and 'Attributes:\n' not in cls.docstring.value:
            fields = [f'    {ast.unparse(a)}' for a in node.body if isinstance(a, ast.AnnAssign)]
            code = '\n'.join([f'class {node.name}(NamedTuple):', *fields])
            cls.docstring.value += f'\n\n```python\n{code}\n```'


def markdown(text: str) -> str:
    """``text`` with its doctests as code and its formulas between dollars."""
    text = DOCTEST.sub(lambda m: f'```pycon\n{m[0].rstrip()}\n```\n', text)
    text = BLOCK.sub(lambda m: f'$$\n{m[1]}\n$$', text)
    return ROLE.sub(lambda m: f'${m[1]}$', text)
