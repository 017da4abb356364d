"""Doctests of docstrings as code on the pages: to Markdown, `>>>` is three quotations."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r'^>>> .*\n?(?:^.*\S.*\n?)*', re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts every paragraph that begins with a prompt between fences."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Is called with each module, class and function."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """``text`` with its doctests as code."""
    return DOCTEST.sub(lambda m: f'```pycon\n{m[0].rstrip()}\n```\n', text)
