"""`Entry`: channels that are scored; `DEFAULT`, ours and those of others, written as texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PEERS = {  # of a text: whose codec it is
    'raw': 'none (the dense record sends bfloat16)',
    'uniform(4)': 'paper, fw4-bw8',
    'mx(4)': 'MXFP4',
    'nvfp4': 'NVFP4',
    'rotate(per_chunk(adaptive(lloyd(3), lloyd(4)), 64))': 'TAH-Quant: tiles of two widths',
    'top_k(0.1, values=fp16)': 'paper, Top10 %',
    'ef(per_chunk(top_k(0.015625, values=lloyd(2), indices=block_local), 4096), decay=0.95)': (
        'SparseLoCo: made for gradients of replicas'
    ),
}
MISSING = (
    'Subspace networks (arXiv 2506.01260) and the residual bottleneck (arXiv 2604.11947) are not '
    'in the table: they change the model, and no text of the algebra does. The published subspace '
    'record stands among the two records.'
)


class Entry(NamedTuple):
    """Channels forward and backward, and the files or modules whose words they use.

    >>> Entry('uniform(4)', 'uniform(8)').name
    'uniform_4-uniform_8'
    """

    fwd: str
    bwd: str
    codecs: str = ''

    @property
    def name(self) -> str:
        """The name of its files."""
        from jaxmp.config import default
        from jaxmp.training.command import default_workdir

        config = default()
        config.update(name='', fwd=self.fwd, bwd=self.bwd)
        said = Path(default_workdir(config)).name.removeprefix('-')
        own = re.sub(r'[^\w.]+', '_', self.codecs).strip('_')
        return f'{said}-{own}' if own else said

    @property
    def line(self) -> str:
        """Its texts, as tables show them."""
        return self.fwd if self.fwd == self.bwd else f'{self.fwd}; {self.bwd}'


def both(*texts: str) -> list[Entry]:
    """Entries with one channel for both directions."""
    return [Entry(text, text) for text in texts]


RAW = Entry('raw', 'raw')
DEFAULT = [
    RAW,
    *both('bf16', 'uniform(8)'),
    Entry('uniform(4)', 'uniform(8)'),
    *both('block(4)', 'mx(4)', 'nvfp4'),
    *both('rotate(per_chunk(adaptive(lloyd(3), lloyd(4)), 64))'),
    *both('rotate(lloyd(3))', 'top_k(0.4, values=log_scale(4))', 'top_k(0.1, values=fp16)'),
    *both('rotate(lloyd(2))', 'rotate(trellis(2))'),
    Entry('anchored(rotate(trellis(2)), vocabulary)', 'rotate(trellis(2))'),
    Entry('anchored(rotate(trellis(2)), vocabulary)', 'rotate(lloyd(1))'),
    *both(list(PEERS)[-1]),
]


def entries_of(texts: Sequence[str], backward: str) -> list[Entry]:
    """The entries that a command line names, after the uncompressed one; without a text all.

    Args:
      texts: forward channels, perhaps with the file of their words: ``mine.py:mine(2)``.
      backward: the backward channel of all of them; empty: as forward.

    >>> entries_of(['mine.py:rotate(mine(2))'], 'block(4)')[1]
    Entry(fwd='rotate(mine(2))', bwd='block(4)', codecs='mine.py')
    """
    if not texts:
        return DEFAULT
    back, of_back = parted(backward)
    found = [RAW]
    for fwd, file in map(parted, texts):
        files = dict.fromkeys(f for f in (file, of_back) if f)
        found.append(Entry(fwd, back or fwd, ','.join(files)))
    return list(dict.fromkeys(found))


def parted(text: str) -> tuple[str, str]:
    """A text and the Python file before it, or an empty one."""
    file, colon, rest = text.partition('.py:')
    return (rest.strip(), f'{file.strip()}.py') if colon else (text.strip(), '')
