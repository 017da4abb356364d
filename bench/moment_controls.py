"""What of the moments closes the gap between on and off?

    python bench/moment_controls.py RUN OUT.json

RUN is a workdir with a checkpoint that was trained with compression. It is tested with compression
(on), without (off), and without it where each open boundary has a map, estimated as by `jaxmp
evaluate --moments`. With (m, s) the means and deviations by channel of what arrives in training and
(m0, s0) those of the open boundary:

    mean        x + m - m0
    deviation   (x - m0) s / s0 + m0
    both        (x - m0) s / s0 + m
    permuted    both, of m and s another channel's (a random permutation of the seed 0)
    boundary    both, one mean and one deviation for all channels of a boundary
    covariance  (x - m0) C0^-1/2 C^1/2 + m, of the covariances C and C0 of the channels
"""

import functools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.boundary import FeedbackState, boundary
from jaxmp.codecs import raw
from jaxmp.feedback import direct
from jaxmp.training.evaluation import crosstest
from jaxmp.training.evaluation.moments import LEAST, averages
from jaxmp.training.evaluation.saved import load
from jaxmp.training.summary import provenance
from jaxmp.wire import Codec


class Linear(NamedTuple):
    """``x @ matrix + shift``, the map of a boundary."""

    matrix: Array
    shift: Array

    def after(self, codec: Codec) -> Codec:
        """``codec`` whose decoded tensor passes the map."""

        def decode(message, like, ctx):
            x = codec.decode(message, like, ctx)
            return (x @ self.matrix + self.shift).astype(x.dtype)

        return codec._replace(decode=decode)


def statistics(x: Array) -> Array:
    """Means of the channels and of their products, (C + 1, C)."""
    rows = x.reshape(-1, x.shape[-1])
    return jnp.concatenate([rows.mean(0, keepdims=True), rows.T @ rows / len(rows)])


def split(s: Array) -> tuple[Array, Array]:
    """Mean and covariance."""
    return s[0], s[1:] - jnp.outer(s[0], s[0])


def root(c: Array, power: float) -> Array:
    """``c ** power`` of a covariance; directions without energy are left out."""
    values, vectors = jnp.linalg.eigh(c)
    least = LEAST * values[-1]
    scaled = jnp.where(values > least, jnp.maximum(values, least) ** power, 0.0)
    return (vectors * scaled) @ vectors.T


def diagonal(scale: Array, mean: Array, mean0: Array) -> Linear:
    """``(x - mean0) * scale + mean``."""
    return Linear(jnp.diag(scale), mean - mean0 * scale)


def between(kind: str, wanted: Array, present: Array) -> Linear:
    """The map of a kind (see above) from the statistics of an open boundary to those wanted."""
    (m, c), (m0, c0) = split(wanted), split(present)
    s, s0 = (jnp.sqrt(jnp.maximum(jnp.diag(a), 0.0)) for a in (c, c0))
    scale = jnp.where(s0 > LEAST, s / jnp.maximum(s0, LEAST), 1.0)
    if kind == 'mean':
        return diagonal(jnp.ones_like(scale), m, m0)
    if kind == 'deviation':
        return diagonal(scale, m0, m0)
    if kind == 'both':
        return diagonal(scale, m, m0)
    if kind == 'permuted':
        order = jax.random.permutation(jax.random.key(0), len(m))
        return diagonal(jnp.where(s0 > LEAST, s[order] / jnp.maximum(s0, LEAST), 1.0), m[order], m0)
    if kind == 'boundary':
        whole = lambda m, s: (m.mean(), jnp.sqrt((s**2 + m**2).mean() - m.mean() ** 2))
        (u, v), (u0, v0) = whole(m, s), whole(m0, s0)
        return diagonal(jnp.full_like(m, v / v0), jnp.full_like(m, u), u0)
    matrix = root(c0, -0.5) @ root(c, 0.5)
    return Linear(matrix, m - m0 @ matrix)


def scores(folder: str) -> dict[str, dict[str, float]]:
    """The test scores on, off and with the maps of each kind."""
    run = load(Path(folder))
    exp, trained, key = run.exp, run.state.model, run.state.key
    cuts = exp.model.boundaries
    forgetful = trained._replace(feedback=FeedbackState(*[(((), ()),) * len(cuts)] * 2))
    opened = lambda m: boundary(direct(m.after(raw)), direct(raw))
    measure = functools.partial(averages, exp, key=key, of=statistics)
    wanted = [measure(trained, cuts=cuts[: i + 1]) for i in range(len(cuts))]
    raw_cut = boundary(direct(raw), direct(raw))
    compressed = tuple(boundary(direct(b.fwd.codec), direct(raw)) for b in cuts)
    tested = {
        'on': crosstest.scorer(exp, compressed),
        'off': crosstest.scorer(exp, (raw_cut,) * len(cuts)),
    }
    for kind in ('mean', 'deviation', 'both', 'permuted', 'boundary', 'covariance'):
        maps: list[Linear] = []
        for i in range(len(cuts)):
            present = measure(forgetful, cuts=(*map(opened, maps), raw_cut))
            maps.append(between(kind, wanted[i], present))
        tested[kind] = crosstest.scorer(exp, tuple(map(opened, maps)))
    return {kind: score(run.state) for kind, score in tested.items()}


if __name__ == '__main__':
    folder, out = sys.argv[1:]
    row = {'run': Path(folder).name, **provenance(), 'test': scores(folder)}
    Path(out).write_text(json.dumps(row, indent=1) + '\n')
    print(json.dumps(row['test'], indent=1))
