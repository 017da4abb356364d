"""The notebooks: each runs from top to bottom, and its two files say the same."""

import subprocess
import sys

import jupytext
import pytest

from tests.base import ENV, ROOT

NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.py'))


def test_every_notebook_has_both_files():
    both = [{p.stem for p in (ROOT / 'notebooks').glob(f'*.{end}')} for end in ('py', 'ipynb')]
    assert both[0] == both[1] != set()


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_both_files_say_the_same(path):
    """After an edit: ``jupytext --to ipynb --update notebooks/X.py``, which keeps cell ids, then
    ``jupyter nbconvert --to notebook --execute --inplace notebooks/X.ipynb``, which makes outputs.
    """
    source, made = jupytext.read(path), jupytext.read(path.with_suffix('.ipynb'))
    cells = [[(c.cell_type, c.source) for c in notebook.cells] for notebook in (source, made)]
    assert cells[0] == cells[1]
    outputs = [o for c in made.cells if c.cell_type == 'code' for o in c.outputs]
    assert {o.output_type for o in outputs} <= {'stream', 'display_data'}, 'no stray Out[]'
    assert outputs
    assert not [o for o in outputs if o.get('name') == 'stderr']
    assert path.with_suffix('.ipynb').stat().st_size < 300_000


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path):
    """As a script, in its folder as Jupyter has it."""
    env = {**ENV, 'TMPDIR': str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=path.parent, env=env, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
