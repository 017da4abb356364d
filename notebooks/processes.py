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
# # A pipeline in processes
#
# So far one program held all stages. Here every stage is a program of its own in a process of its
# own, and the packed messages are all that travels between them during a step.

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
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

EXAMPLES, EPOCHS = 640, 4
home = Path(tempfile.mkdtemp(prefix='processes-'))

# %% [markdown]
# ## One command
#
# LeNet in two stages on the digits: a buffer at both ends forward (EF21), 8 bits backward, and
# each batch in two micro-batches, so that a stage works on one while the other has the next.

# %%
SETTINGS = {
    'parallel.runtime': 'mpmd', 'parallel.num_microbatches': 2, 'model.name': 'lenet',
    'model.width': 8, 'data.train_examples': EXAMPLES, 'fwd': 'ef21(uniform(4))',
    'bwd': 'uniform(8)', 'epochs': EPOCHS, 'optimizer.schedule': f'cosine({EPOCHS})',
    'optimizer.lr': 0.05,
}  # fmt: skip


def command(name):
    """What trains in a workdir of that name, in one process."""
    given = [f'--config.{key}={value}' for key, value in SETTINGS.items()]
    return [sys.executable, '-m', 'jaxmp', 'train', f'--workdir={home / name}', *given]


def run(words):
    """Runs a command and shows what it prints."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    print(*(line for line in lines if not line.startswith('[Gloo]')), sep='\n')
    if done.returncode:
        raise SystemExit(done.stderr)


# %% [markdown]
# ## In two processes
#
# `jaxmp.launch` starts the command as often as asked, tells each process its number and where the
# first one listens, and sees that none outlives the others. Between machines it is the same
# command on each ([several machines](../docs/running.md)).

# %%
launch = [sys.executable, '-m', 'jaxmp', 'launch', '--processes', '2', '--']
run([*launch, *command('two')])

# %% [markdown]
# The last table is the proof: what was handed over is what the compiled programs move, and it is
# the packed message.

# %%
two = json.loads((home / 'two' / 'summary.json').read_text())
for sizes, moved in zip(two['bytes'], two['moved'], strict=True):
    full, sent = 2 * sizes['uncompressed'], sum(moved['payload'])
    print(
        f'{sent:,} bytes a step cross the link instead of {full:,}: {full / sent:.1f} times fewer'
    )
    assert moved['collectives'] == moved['payload'] == [sizes['forward'], sizes['backward']]

# %% [markdown]
# ## In one process
#
# The same two programs, without a link. Where the stages are does not change what is learned:

# %%
run(command('one'))

# %%
curves = {}
for name in ('one', 'two'):
    lines = (home / name / 'metrics.jsonl').read_text().splitlines()
    curves[name] = [r['loss'] for r in map(json.loads, lines) if r['kind'] == 'train']
print(
    f'largest difference: {max(abs(a - b) for a, b in zip(*curves.values(), strict=True)):.1e} nats'
)
assert all(abs(a - b) < 1e-3 for a, b in zip(*curves.values(), strict=True))

# %%
figure, axes = plt.subplots(figsize=(5, 3.5), layout='constrained')
epochs = range(1, EPOCHS + 1)
axes.plot(epochs, curves['one'], 'o-', markersize=9, fillstyle='none', label='one process')
axes.plot(epochs, curves['two'], 'x--', label='two processes')
axes.set(xlabel='epoch', ylabel='training loss, nats', title='Where the stages are changes nothing')
axes.set_xticks(epochs)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# If a process dies, the others end with its name and the reason, and the same command goes on from
# the last checkpoint. That, Slurm, Kubernetes and memory: [several machines](../docs/running.md).
# What it saves on a slow link: [speed](../docs/speed.md).
