"""Mathematics of the pages as MathML, made when the pages are built: a reader needs no script.

`pymdownx.arithmatex` finds what stands between dollars; browsers lay MathML out by themselves.
"""

import html
import itertools
import re
from typing import Any

from latex2mathml.converter import convert

FOUND = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
BAR = re.compile(r'<mo[^>]*>&#x0007C;</mo>')


def on_page_content(content: str, **kwargs: Any) -> str:
    """Puts MathML in the place of each formula."""
    return FOUND.sub(
        lambda m: mathml(html.unescape(m[3]), 'inline' if m[2] == '(' else 'block'), content
    )


def mathml(latex: str, display: str) -> str:
    """A formula; one in a line of its own is broken at its wide spaces in a narrower page.

    Args:
      latex: without its dollars.
      display: ``'inline'`` or ``'block'``.

    Raises:
      ValueError: if a command of it is unknown, which would be shown as text.
    """
    if display == 'inline':
        return converted(latex, display)
    parts = [converted(part, display) for part in re.split(r'\\q?quad\b', latex)]
    return f'<div class="formula">{"".join(parts)}</div>'


def converted(latex: str, display: str) -> str:
    """``latex`` as MathML; an even number of bars are pairs, without the space of an operator."""
    made = convert(latex.strip().replace(r'\arg', r'\operatorname{arg}'), display=display)
    if '\\' in made:
        raise ValueError(
            f'latex2mathml does not know a command of {latex!r}; write it in another way'
        )
    bars = len(BAR.findall(made))
    forms = itertools.cycle(['prefix', 'postfix'] if bars % 2 == 0 else ['infix'])
    return BAR.sub(lambda m: f'<mo form="{next(forms)}" stretchy="false">&#x0007C;</mo>', made)
