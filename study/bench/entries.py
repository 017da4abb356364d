"""`Entry`: channels that are scored; `DEFAULT`, ours and those of others, written as texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxmp.grammar import parted

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
        channels = Path(default_workdir(config)).name.removeprefix('-')
        words = re.sub(r'[^\w.]+', '_', self.codecs).strip('_')
        return f'{channels}-{words}' if words else channels


def both(text: str) -> Entry:
    """An entry with one channel for both directions."""
    return Entry(text, text)


RAW = both('raw')
PAIRS = 'anchored(rotate(trellis(2)), vocabulary, pairs=65536)'
TRIPLES = 'anchored(rotate(trellis(2)), vocabulary, pairs=65536, triples=65536)'
TARGETS = (
    'anchored(rotate(trellis(2, unbiased=True)), vocabulary, window=64, pairs=65536, target=True)'
)
DEFAULT = {  # entries, and whose codecs they are
    RAW: 'no compression, as the dense record',
    both('bf16'): '',
    both('uniform(8)'): '',
    Entry('uniform(4)', 'uniform(8)'): 'paper, fw4-bw8',
    both('block(4)'): '',
    both('mx(4)'): 'MXFP4',
    both('nvfp4'): 'NVFP4',
    both('rotate(per_chunk(adaptive(lloyd(3), lloyd(4)), 64))'): 'tiles of TAH-Quant',
    both('rotate(lloyd(3))'): '',
    both('top_k(0.4, values=log_scale(4))'): '',
    both('top_k(0.1, values=fp16)'): 'paper, Top10 %',
    both('rotate(lloyd(2))'): '',
    both('rotate(trellis(2))'): '',
    Entry('anchored(rotate(trellis(2)), vocabulary)', 'rotate(trellis(2))'): '',
    Entry('anchored(rotate(trellis(2)), vocabulary)', 'rotate(lloyd(1))'): '',
    Entry(PAIRS, 'rotate(trellis(2))'): '',
    Entry(PAIRS, TARGETS): '',
    Entry(TRIPLES, TARGETS): '',
    Entry('klt(2)', 'rotate(trellis(2))'): '',
    both(
        'ef(per_chunk(top_k(0.015625, values=lloyd(2), indices=block_local), 4096), decay=0.95)'
    ): 'TopK of SparseLoCo, made for gradients',
}


def entries_of(texts: Sequence[str], backward: str) -> list[Entry]:
    """The entries that a command line names, after the uncompressed one; without a text all.

    Args:
      texts: forward channels, perhaps with the file of their words: ``mine.py:mine(2)``.
      backward: the backward channel of all of them; empty: as forward.

    >>> entries_of(['mine.py:rotate(mine(2))'], 'block(4)')[1]
    Entry(fwd='rotate(mine(2))', bwd='block(4)', codecs='mine.py')
    """
    if not texts:
        return list(DEFAULT)
    back, of_back = parted(backward)
    entries = [RAW]
    for fwd, file in map(parted, texts):
        files = dict.fromkeys(f for f in (file, of_back) if f)
        entries.append(Entry(fwd, back or fwd, ','.join(files)))
    return list(dict.fromkeys(entries))
