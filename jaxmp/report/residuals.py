"""How far chance alone moves a difference: the residual that rows of equal variance share.

A score is its row's mean, plus what its seed gives all rows, plus a residual. Few seeds tell little
of one row's residual, so rows whose variances agree (Bartlett's test) are taken together; a row
that does not agree keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Column = dict[str, dict[int, float]]  # a value for each row and seed
LEVEL, POWER = 0.05, 0.8
CONFIDENCE = 1 - LEVEL


class Residual(NamedTuple):
    """Standard deviation that ``rows`` share, and its degrees of freedom."""

    deviation: float
    freedom: int
    rows: tuple[str, ...]


class Estimate(NamedTuple):
    """Mean over seeds, its standard error and Student's interval; NaN where nothing tells them.

    Attributes:
      mean: of the seeds' values.
      error: its standard error.
      low: lower end of the interval.
      high: upper end of the interval.
      seeds: how many there are.
      freedom: degrees of freedom of the error.
    """

    mean: float
    error: float
    low: float
    high: float
    seeds: int
    freedom: int


def estimate(values: Sequence[float], deviation: float | None = None, freedom: int = 0) -> Estimate:
    """Mean of ``values`` with its standard error and interval.

    Args:
      values: one a seed.
      deviation: standard deviation of a value; default that of ``values``.
      freedom: degrees of freedom of ``deviation``.

    >>> [round(v, 2) for v in estimate([1.0, 2.0, 3.0])]
    [2.0, 0.58, -0.48, 4.48, 3, 2]
    """
    from scipy.special import stdtrit

    n, mean = len(values), float(np.mean(values))
    if deviation is None:
        if n == 1:
            return Estimate(mean, np.nan, np.nan, np.nan, 1, 0)
        deviation, freedom = float(np.std(values, ddof=1)), n - 1
    error = deviation / n**0.5
    half = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error
    return Estimate(mean, error, mean - half, mean + half, n, freedom)


def agreeing(column: Column) -> list[str]:
    """The rows whose variances agree.

    A row whose variance stands out from those of all others together is left out (F, times the
    number of rows: among many rows of two or three seeds Bartlett's test overlooks a single one).
    Then, while Bartlett's test over all finds a difference, the row without which it finds least.
    A row of one seed, or one that does not vary at all, tells nothing.
    """
    left = {n: list(v.values()) for n, v in column.items() if len({*v.values()}) > 1}
    while len(left) > 1 and (name := standing_out(left) or disagreeing(left)):
        del left[name]
    return list(left)


def standing_out(rows: dict[str, list[float]]) -> str:
    """The row of the largest variance, if it is larger than chance explains; else nothing."""
    from scipy.special import fdtrc

    variances = {n: float(np.var(v, ddof=1)) for n, v in rows.items()}
    name = max(variances, key=lambda n: variances[n])
    freedom = {n: len(v) - 1 for n, v in rows.items()}
    others = [n for n in rows if n != name]
    rest = sum(variances[n] * freedom[n] for n in others) / sum(freedom[n] for n in others)
    p = fdtrc(freedom[name], sum(freedom[n] for n in others), variances[name] / rest)
    return name if len(rows) * p < LEVEL else ''


def disagreeing(rows: dict[str, list[float]]) -> str:
    """The row without which the variances agree best, if they do not agree; else nothing."""
    from scipy.stats import bartlett

    if bartlett(*rows.values()).pvalue >= LEVEL:
        return ''
    without = {n: [v for m, v in rows.items() if m != n] for n in rows}
    return max(rows, key=lambda n: bartlett(*without[n]).pvalue if len(without[n]) > 1 else 0)


def residual(column: Column, seeds: bool) -> Residual | None:
    """What is left of the agreeing rows without their means; None if no two rows agree.

    Args:
      column: values by row and seed.
      seeds: also without what a seed gives all rows, as is right for differences seed by seed.
    """
    rows = agreeing(column)
    if len(rows) < 2:
        return None
    known = sorted({s for n in rows for s in column[n]}) if seeds else []
    cells = [(n, s) for n in rows for s in column[n]]
    design = np.array([[n == r for r in rows] + [s == k for k in known] for n, s in cells], float)
    values = np.array([column[n][s] for n, s in cells])
    fitted, _, rank, _ = np.linalg.lstsq(design, values)
    freedom = len(cells) - int(rank)
    if freedom < 1:
        return None
    left = values - design @ fitted
    return Residual(float(np.sqrt(left @ left / freedom)), freedom, tuple(rows))


def p_value(e: Estimate, bound: float) -> float:
    """Probability of an estimate so far from ``bound``, on either side, were that the truth."""
    from scipy.special import stdtr

    if not e.error > 0:
        return np.nan if np.isnan(e.error) else float(e.mean == bound)
    return float(2 * stdtr(e.freedom, -abs(e.mean - bound) / e.error))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values as they count among so many tests (Holm).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def detectable(e: Estimate) -> float:
    """How far from its bound a truth must lie for one test alone to find it with a power of 80 %.

    >>> round(detectable(estimate([0.0, 1.8385])), 1)  # of standard deviation 1.3
    15.0
    """
    from scipy.special import nctdtrinc, stdtrit

    threshold = stdtrit(e.freedom, 0.5 + CONFIDENCE / 2)
    return float(nctdtrinc(e.freedom, 1 - POWER, threshold)) * e.error
