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
# From a clone of the repository, with Jupyter installed: open this file in its folder `notebooks/`
# and run the cells in their order. In Colab: *File, Upload notebook*, then clone the repository in
# a cell of your own and `%cd` into its `notebooks/`. The next cell installs jaxmp from the clone.

# %%
# %pip install -q ..

# %%
import sys
import tempfile
from pathlib import Path

import flax.linen as nn
import matplotlib.pyplot as plt
from absl import logging

from jaxmp import study, sweep, task
from jaxmp.report import __main__ as report
from jaxmp.report import page, results

sys.path.insert(0, '..')  # for the study
from configs import paper_tables

logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
SEEDS, EPOCHS = 2, 8
ROWS = 'none', 'fw4-bw8', 'fw2-bw8', 'fw4-bw2'
home = Path(tempfile.mkdtemp(prefix='table1-'))

# %% [markdown]
# ## A network of your own
#
# The paper's is ResNet-18 in four stages. Here two stages stand in for it; a model is a name and a
# function of classes and width that gives the stages.


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


task.MODELS['two'] = lambda classes, width: (First(width), Second(width, classes))

# %% [markdown]
# ## The plan
#
# A study is a list of seeds and configurations; a row is a configuration with its text for each
# direction.


# %%
def runs(seed):
    """The rows of Table 1 for one seed."""
    for _, config in paper_tables.get_study('smoke', tables=(1,)):
        if config.name in ROWS:
            config.update(model='two', width=16, train_examples=0, seed=seed)
            config.update(epochs=EPOCHS, cosine_epochs=EPOCHS)
            yield seed, config


plan = study.jobs(
    [run for seed in range(SEEDS) for run in runs(seed)], home / 'results' / 'table1', home / 'runs'
)
sweep.show_plan(plan)

# %% [markdown]
# ## The runs
#
# Each leaves a result file. What is finished is not run again, and what was killed goes on:
# execute the cell twice to see it. From a shell, and at full size, this is `python -m jaxmp.sweep
# configs/paper_tables.py --scale=cpu --tables=1`.

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
report.main([str(home / 'results'), f'--out={home / "report"}'])
text = (home / 'report' / 'report.md').read_text()
table = text.split('### Table 1')[1].split('![')[0].strip()
print('Table 1' + table)

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
