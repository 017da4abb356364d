"""Residual variance of scores between seeds, pooled over rows, and the tests that use it.

A score is the sum of a row mean, a seed effect common to all rows, and a residual. A row has too
few seeds to estimate the variance of its residual, so rows whose variances agree (Bartlett's test)
are pooled; a row that does not agree is estimated separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Column = dict[str, dict[int, float]]  # one value per row and seed
LEVEL, POWER = 0.05, 0.8
MOST = 1000  # seeds
CONFIDENCE = 1 - LEVEL


class Residual(NamedTuple):
    """The standard deviation that ``rows`` share, and its degrees of freedom."""

    deviation: float
    freedom: int
    rows: tuple[str, ...]


class Estimate(NamedTuple):
    """Mean over seeds, its standard error and Student's interval; NaN if they cannot be estimated.

    Attributes:
      mean: mean of the values of all seeds.
      error: standard error of the mean.
      low: lower end of the interval.
      high: upper end of the interval.
      seeds: number of seeds.
      freedom: degrees of freedom of the standard error.
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
      values: one value per seed.
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

    First, rows are left out one by one while an F test (with Bonferroni's correction for the number
    of rows) finds that the largest variance exceeds that of all other rows together; with two or
    three seeds per row Bartlett's test often misses a single such row. Then, while Bartlett's test
    over all rows finds a difference, the row is left out without which its p-value is largest. Rows
    with one seed, or with zero variance, are left out from the start.
    """
    left = {n: list(v.values()) for n, v in column.items() if len({*v.values()}) > 1}
    while len(left) > 1 and (name := standing_out(left) or disagreeing(left)):
        del left[name]
    return list(left)


def standing_out(rows: dict[str, list[float]]) -> str:
    """The row with the largest variance if that is significantly larger; else ``''``."""
    from scipy.special import fdtrc

    variances = {n: float(np.var(v, ddof=1)) for n, v in rows.items()}
    name = max(variances, key=lambda n: variances[n])
    freedom = {n: len(v) - 1 for n, v in rows.items()}
    others = [n for n in rows if n != name]
    rest = sum(variances[n] * freedom[n] for n in others) / sum(freedom[n] for n in others)
    p = fdtrc(freedom[name], sum(freedom[n] for n in others), variances[name] / rest)
    return name if len(rows) * p < LEVEL else ''


def disagreeing(rows: dict[str, list[float]]) -> str:
    """The row without which the variances agree best if they do not agree; else ``''``."""
    from scipy.stats import bartlett

    if bartlett(*rows.values()).pvalue >= LEVEL:
        return ''
    without = {n: [v for m, v in rows.items() if m != n] for n in rows}
    return max(rows, key=lambda n: bartlett(*without[n]).pvalue if len(without[n]) > 1 else 0)


def residual(column: Column, seeds: bool) -> Residual | None:
    """The residual of the agreeing rows without their means; None if no two rows agree.

    Args:
      column: values by row and seed.
      seeds: also subtract seed effects, as is right for differences seed by seed.
    """
    rows = agreeing(column)
    if len(rows) < 2:
        return None
    common_seeds = sorted({s for n in rows for s in column[n]}) if seeds else []
    cells = [(n, s) for n in rows for s in column[n]]
    design = np.array(
        [[n == r for r in rows] + [s == k for k in common_seeds] for n, s in cells], float
    )
    values = np.array([column[n][s] for n, s in cells])
    fitted, _, rank, _ = np.linalg.lstsq(design, values)
    freedom = len(cells) - int(rank)
    if freedom < 1:
        return None
    left = values - design @ fitted
    return Residual(float(np.sqrt(left @ left / freedom)), freedom, tuple(rows))


def intervals(column: Column) -> dict[str, Estimate]:
    """The estimate of each row: rows that agree share a deviation, any other row has its own.

    Args:
      column: values by row and seed.
    """
    shared = residual(column, seeds=False) or Residual(np.nan, 0, ())
    pooled = shared.deviation, shared.freedom
    deviation_of = {n: pooled if n in shared.rows else (None, 0) for n in column}
    return {n: estimate(list(v.values()), *deviation_of[n]) for n, v in column.items()}


def p_value(e: Estimate, bound: float) -> float:
    """Two-sided p-value of an estimate under the hypothesis that the true mean is ``bound``."""
    from scipy.special import stdtr

    if not e.error > 0:
        return np.nan if np.isnan(e.error) else float(e.mean == bound)
    return float(2 * stdtr(e.freedom, -abs(e.mean - bound) / e.error))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values with Holm's correction for the number of tests.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def detectable(e: Estimate) -> float:
    """The distance from the bound that one test alone detects with a power of 80 %.

    >>> round(detectable(estimate([0.0, 1.8385])), 1)  # of standard deviation 1.3
    15.0
    """
    from scipy.special import nctdtrinc, stdtrit

    threshold = stdtrit(e.freedom, 0.5 + CONFIDENCE / 2)
    return float(nctdtrinc(e.freedom, 1 - POWER, threshold)) * e.error


def enough(e: Estimate, bound: float) -> int:
    """The seeds with which one test alone detects the estimated distance with that power.

    Degrees of freedom are taken to grow with the seeds. From `MOST` on the number is `MOST`.

    >>> enough(estimate([0.0, 1.0, 2.0, 3.0]), 0.0), enough(estimate([0.0, 1.0]), 0.5)
    (8, 1000)
    """
    low, high = 2, MOST
    while low < high:
        n = (low + high) // 2
        more = n / e.seeds
        freedom = max(e.freedom * more, e.freedom + n - e.seeds, 1)
        then = e._replace(error=e.error / more**0.5, freedom=freedom)
        low, high = (low, n) if detectable(then) <= abs(e.mean - bound) else (n + 1, high)
    return low
