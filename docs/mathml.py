"""Mathematics of the pages as MathML, made when the pages are built: a reader needs no script.

`pymdownx.arithmatex` finds what stands between dollars; browsers lay MathML out by themselves.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FOUND = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Puts MathML in the place of each formula."""
    return FOUND.sub(
        lambda m: mathml(html.unescape(m[3]), 'inline' if m[2] == '(' else 'block'), content
    )


def mathml(latex: str, display: str) -> str:
    """A formula; one in a line of its own scrolls where it is wider than the page.

    Args:
      latex: without its dollars.
      display: ``'inline'`` or ``'block'``.

    Raises:
      ValueError: if a command of it is unknown, which would be shown as text.
    """
    made = convert(latex.strip(), display=display)
    if '\\' in made:
        raise ValueError(
            f'latex2mathml does not know a command of {latex!r}; write it in another way'
        )
    return made if display == 'inline' else f'<div class="formula">{made}</div>'
