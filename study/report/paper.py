"""The paper's tables and claims (paper.json), and the claims of the experiment at equal bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

PAPER, REGISTERED = (
    json.loads((Path(__file__).parent / f'{name}.json').read_text())
    for name in ('paper', 'registered')
)
PaperTable = dict[str, Any]  # one of the paper's tables, as paper.json has it
PaperRow = dict[str, Any]  # of such a table: its name, label and scores
TRAINING = 'training'  # the mode of a training loss, which the tables do not have


def measure_of(name: str) -> str:
    """The measure of one of the paper's rows; that of any other is the accuracy."""
    return 'perplexity' if 'loss' in (paper_row(name) or {}) else 'accuracy'


def table_rows(table: PaperTable) -> dict[str, PaperRow]:
    """The rows of one of the paper's tables by name."""
    return {r['row']: r for r in table['rows']}


def paper_row(name: str) -> PaperRow | None:
    """A row of the paper's tables."""
    rows = (r for t in PAPER['tables'] for n, r in table_rows(t).items() if n == name)
    return next(rows, None)


def paper_judged(name: str) -> str:
    """The mode in which the paper judges one of its rows; that of any other is ``'on'``."""
    tables = (t for t in PAPER['tables'] if name in table_rows(t))
    return next(tables, {}).get('judged', 'on')


def paper_score(name: str, mode: str) -> float:
    """The paper's score of a row, for Table 5 its loss, which is with compression on; or NaN."""
    row = paper_row(name) or {}
    return math.nan if mode == TRAINING else row.get('loss', row.get(mode, math.nan))
