"""Programs of JAX's page on shard_map, with `jaxmp.lax`: python bench/public_programs.py PAGE OUT

PAGE is docs/notebooks/shard_map.md of JAX's repository. Its neural networks run as they are, and
again where each `jax.lax.NAME` of a collective is `jaxmp.lax.NAME`, which is the only change: as
they are, with raw, and inside ``with lax.codecs(...)``. OUT.json has loss, distance of the
gradient, and operand bytes of the compiled gradient; two are trained for 50 steps.
"""

import json
import os
import re
import sys
from pathlib import Path

if __name__ == '__main__':
    os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from jaxmp import lax
from jaxmp.exchange.hlo import operands
from jaxmp.training.summary import provenance

HEAD = """
import jax, jax.numpy as jnp
from functools import partial
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.sharding import AxisType
from jax.tree_util import tree_map, tree_all
Auto = AxisType.Auto
devices = jax.devices()
"""
CALLS = re.compile(r'jax\.lax\.(ppermute|all_gather|psum_scatter|psum|pmean|all_to_all)\b')
PROGRAMS = {  # a program of the page: its loss, and what that takes
    'fsdp': ('loss_fsdp', 'params', 'batch'),
    'tensor parallel': ('loss_tp', 'params', 'batch'),
    'fsdp and tensor parallel': ('loss_fsdp_tp', 'params_', 'batch_'),
    'pipeline': ('loss_pp', 'params_', 'batch_'),
}
TRAINED = 'fsdp', 'tensor parallel'
WAYS = {
    'as it is': None,
    'raw': ('raw', 'raw'),
    'coded': ('mx(8)', 'mx(8)'),
    'few': ('nvfp4', 'mx(8)'),
}
STEPS, RATE = 50, 2e-3


def programs(page: str, own: bool):
    """The names of the page after each of its sections, with `jaxmp.lax` if ``own``."""
    page = page[page.index('### Neural networks') :]
    names = {}
    exec(HEAD, names)
    for section in re.split(r'^#### ', page, flags=re.MULTILINE):
        cells = re.findall(r'```\{code-cell\}[^\n]*\n(.*?)```', section, re.DOTALL)
        code = '\n'.join(
            c for c in cells if not c.lstrip().startswith(('print(', '_ =', 'jax.set_mesh'))
        )
        if own:
            names['jaxmp_lax'] = lax
            code = CALLS.sub(r'jaxmp_lax.\1', code)
        code = re.sub(r'^\s*print\(.*(?:\n\s{6,}.*)*', '', code, flags=re.MULTILINE)
        exec(code, names)
        if 'stages' in section and 'loss_pp' in names:
            jax.set_mesh(names['mesh'])
        yield dict(names)


def measured(page: str, way: str) -> dict:
    """Loss, gradient, bytes and the loss after training of each program."""
    found = {}
    for names in programs(page, WAYS[way] is not None):
        for program, (loss, params, batch) in PROGRAMS.items():
            if program in found or loss not in names:
                continue
            both = jax.jit(jax.value_and_grad(names[loss]))
            value, grads = both(names[params], names[batch])
            text = both.lower(names[params], names[batch]).compile().as_text()
            found[program] = {'loss': float(value), 'grads': grads, 'bytes': operands(text)}
            if program in TRAINED:
                here = names[params]
                for _ in range(STEPS):
                    value, step = both(here, names[batch])
                    here = jax.tree.map(lambda p, g: p - RATE * g, here, step)
                found[program]['trained'] = float(both(here, names[batch])[0])
    return found


def apart(a, b) -> float:
    """The distance of two gradients over the size of the second."""
    flat = [
        jnp.concatenate([jnp.ravel(jax.device_get(x)) for x in jax.tree.leaves(t)]) for t in (a, b)
    ]
    known = jnp.isfinite(flat[0]) & jnp.isfinite(flat[1])
    x, y = (jnp.where(known, f, 0) for f in flat)
    return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))


def table(rows) -> str:
    """The rows in Markdown, as docs/own_collectives.md has them."""
    lines = ['| program | codecs | bytes | loss | after 50 steps |', '|---|---|--:|--:|--:|']
    programs = [row['program'] for row in rows]
    for row in sorted(rows, key=lambda r: programs.index(r['program'])):
        if row['way'] != 'raw':
            words = ', '.join(f'`{c}`' for c in row['codecs'] or ()) or 'as it is'
            trained = f'{row["trained"]:#.4g}' if row['trained'] else '\N{EN DASH}'
            cells = row['program'], words, f'{row["bytes"]:,}', f'{row["loss"]:#.4g}', trained
            lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def rows_of(runs: dict, rates: dict) -> list[dict]:
    """What each program measured in each way, next to what it measured as it is."""
    rows = []
    for way, found in runs.items():
        for program, run in found.items():
            theirs = runs['as it is'][program]
            row = {'program': program, 'way': way, 'codecs': WAYS[way], 'loss': run['loss']}
            row['gradient_off'] = apart(run['grads'], theirs['grads'])
            row |= {'bytes': sum(run['bytes'].values()), 'kinds': run['bytes']}
            row |= {'trained': run.get('trained'), 'steps': STEPS, 'rate': rates[program]}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Runs all ways, and writes the figures."""
    page, out = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
    runs = {}
    for way, codecs in WAYS.items():
        with lax.codecs(*(codecs or ('raw', 'raw'))):
            runs[way] = measured(page, way)
    rows = rows_of(runs, dict.fromkeys(PROGRAMS, RATE))
    out.write_text(json.dumps(provenance() | {'rows': rows}, indent=1) + '\n')


if __name__ == '__main__':
    main()
