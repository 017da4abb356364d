"""What of a pretrained model is trained: all, all but the token table, low-rank updates, or names.

``config.model.train`` is one of four forms::

    all                                     every parameter
    no_table                                all but the token table and the output layer
    lora(8, alpha=16, targets='q_proj')     low-rank updates alone
    *norm*, layers.mlp.*                    the parameters whose name a pattern matches
    stage[12].*                             all parameters of stages 1 and 2, from 0

Names are those of `jaxmp.models.decoder`, with dots: ``layers.self_attn.q_proj.weight`` is the
array of all blocks of a stage; ``stage2.`` before it is that of one stage.

References:
  LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxmp import spec
from jaxmp.models.decoder import PROJECTIONS, Lora
from jaxmp.models.pretrained import LOW_RANK
from jaxmp.runtimes.trained import Path, Select, everything
from jaxmp.terminal import hint

_TABLES = ('embed_tokens', 'lm_head')
_FORMS = (
    'all, no_table, lora(rank, alpha=, targets=), or patterns of names such as '
    "'*norm*' and 'stage1.*'"
)


class Trained(NamedTuple):
    """A choice of parameters.

    Attributes:
      select: whether the parameter of a stage and of a path in it is trained.
      lora: the low-rank updates that the stages have, or None.
      patterns: of names; empty for the other forms.
    """

    select: Select
    lora: Lora | None = None
    patterns: tuple[str, ...] = ()


def trained(text: str) -> Trained:
    """The choice that ``config.model.train`` names.

    Raises:
      ValueError: if it is none of the forms, or a target names no projection.

    >>> trained("lora(4, targets='q_proj v_*')").lora
    Lora(rank=4, alpha=8, targets=('q_proj', 'v_proj'))
    >>> trained('no_table').select(0, ('embed_tokens', 'weight'))
    False
    """
    says = f'config.model.train={text!r}'
    if text == 'all':
        return Trained(everything)
    if text == 'no_table':
        return Trained(_is_no_table)
    if '(' in text:
        try:
            chosen = spec.read(text, {'lora': lora}, lambda choice, _: choice)
        except ValueError as error:
            raise ValueError(f'{says}: {error}; allowed are {_FORMS}') from None
        return Trained(_is_low_rank, chosen)
    patterns = _words(text)
    if not patterns:
        raise ValueError(f'{says} names nothing; allowed are {_FORMS}')
    return Trained(
        lambda *place: any(_matches(n, patterns) for n in _names(*place)), None, patterns
    )


def lora(rank: int, alpha: float = 0, targets: str = '*') -> Lora:
    """Low-rank updates ``(alpha / rank) B A`` of projections.

    Args:
      rank: rows of A, at least 1.
      alpha: scale; 0 means twice the rank.
      targets: names of projections, or patterns of names, with spaces or commas between.

    Raises:
      ValueError: if the rank is no whole number from 1, or a target matches nothing.
    """
    if type(rank) is not int or rank < 1 or alpha < 0:
        raise ValueError(f'lora of rank {rank} and alpha {alpha}; give a rank from 1')
    patterns = _words(targets)
    for pattern in patterns or ('',):
        if not fnmatch.filter(PROJECTIONS, pattern):
            raise ValueError(
                f'lora targets {pattern!r}, which matches none of {", ".join(PROJECTIONS)}'
            )
    chosen = tuple(name for name in PROJECTIONS if _matches(name, patterns))
    return Lora(rank, alpha or 2 * rank, chosen)


def check(text: str, choice: Trained, paths: Iterable[tuple[int, Path]]) -> None:
    """Raises ValueError if a pattern matches no parameter; the message has their names."""
    paths = list(paths)
    names = sorted({'.'.join(path) for _, path in paths})
    every = [name for place in paths for name in _names(*place)]
    for pattern in choice.patterns:
        if not fnmatch.filter(every, pattern):
            forms = 'all', 'no_table', f'lora({re.sub(r"[^0-9]", "", pattern) or 8})'
            near = hint(pattern, [*forms, *every])
            raise ValueError(
                f'config.model.train={text!r}{near}: {pattern!r} matches no parameter; there are '
                f'{", ".join(names)}, also with stage0. to stage{max(paths)[0]}. before them; '
                f'allowed are {_FORMS}'
            )


def _names(stage: int, path: Path) -> tuple[str, str]:
    """The name of a parameter, and that with its stage."""
    name = '.'.join(path)
    return name, f'stage{stage}.{name}'


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in re.split(r'[\s,]+', text) if word)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_no_table(stage: int, path: Path) -> bool:
    return path[0] not in _TABLES


def _is_low_rank(stage: int, path: Path) -> bool:
    return path[-1] in LOW_RANK
