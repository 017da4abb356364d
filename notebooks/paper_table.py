# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reproduce a table
#
# The paper's Table 1 (quantisation) as a small study: its rows from `configs/paper_tables.py`, two
# seeds, a network that compiles at once, embedded data. Then the report beside the paper's
# numbers.

# %% [markdown]
# Open this file in the folder `notebooks/` of a clone, or upload it to Colab. The next cell
# installs jaxmp where it is missing: `SOURCE` is the clone, or `git+` and the repository's address.

# %%
import importlib.util
import subprocess
import sys

SOURCE = '..'
if importlib.util.find_spec('jaxmp') is None:
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', SOURCE], check=True)

# %%
import contextlib
import tempfile
from pathlib import Path

import flax.linen as nn
import matplotlib.pyplot as plt
from absl import logging
from IPython.display import Markdown, display

from jaxmp import plugins
from jaxmp.config import files
from jaxmp.sweep import runner as sweep
from jaxmp.sweep import study
from study.report import command as report
from study.report import page, results

paper_tables = plugins.module(files.find('paper_tables'))

logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
SEEDS, EPOCHS = 2, 8
ROWS = 'none', 'fw4-bw8', 'fw2-bw8', 'fw4-bw2'
home = Path(tempfile.mkdtemp(prefix='table1-'))

# %% [markdown]
# ## A network of your own
#
# The paper's is ResNet-18 in four stages. Here two stages stand in for it; a model is a function of
# the configuration and the data set that returns the stages, and a configuration names it by its
# import path, here `__main__:network`.


# %%
class First(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.Conv(self.width, (3, 3), strides=2)(x))


class Second(nn.Module):
    width: int
    classes: int

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(4 * self.width)(x.reshape(len(x), -1)))
        return nn.Dense(self.classes)(x)


def network(config, dataset):
    return First(config.model.width), Second(config.model.width, dataset.classes)


# %% [markdown]
# ## The plan
#
# A study is a list of seeds and configurations; a row is a configuration with its text for each
# direction.


# %%
def runs(seed):
    """The rows of Table 1 for one seed."""
    for _, c in paper_tables.get_study('smoke', tables=(1,)):
        if c.name in ROWS:
            c.model.update(name='__main__:network', width=16)
            c.update(data={'train_examples': 0}, seed=seed, epochs=EPOCHS)
            c.optimizer.schedule = f'cosine({EPOCHS})'
            yield seed, c


plan = study.jobs(
    [run for seed in range(SEEDS) for run in runs(seed)], home / 'results' / 'table1', home / 'runs'
)
sweep.show_plan(plan)

# %% [markdown]
# ## The runs
#
# Each leaves a result file. What is finished is not run again, and what was killed goes on:
# execute the cell twice to see it. From a shell, and at full size, this is `jaxmp sweep
# paper_tables --scale=cpu --tables=1`.

# %%
failed = sweep.sweep(plan)
assert not failed, failed

# %% [markdown]
# ## The table and its figure
#
# The report reads result files and nothing else. The heading and the columns *paper* are the
# paper's, the others ours, of this small network; rows that were not run are empty. *Best*: the
# best epoch of the best seed, as the paper counts; *last*: the last epoch, mean and standard error
# over seeds. Two seeds make wide intervals.

# %%
with contextlib.redirect_stdout(None):  # it says where the report is
    report.main([str(home / 'results'), f'--out={home / "report"}'])
text = (home / 'report' / 'report.md').read_text()
table = text.split('### Table 1')[1].split('![')[0].strip()
display(Markdown('Table 1' + table))

# %%
picture = plt.imread(home / 'report' / 'table1_figure2.png')
figure = plt.figure(figsize=(9, 9 * len(picture) / len(picture[0])))
axes = figure.add_axes((0, 0, 1, 1))
axes.imshow(picture)
axes.set_axis_off()

# %% [markdown]
# And what these few runs say of the paper's claims; most are undecided, as they should be after a
# minute on 8 x 8 digits.

# %%
[found] = results.load(home / 'results')
for verdict in page.judge(found):
    print(f'{verdict.verdict:12} {verdict.claim} ({verdict.where})')
