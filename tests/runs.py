"""Small runs of train.py, in this process and as processes."""

import functools
import importlib.util
import json
import subprocess
import sys
import time

import jax
import pytest

from jaxmp import config, exchange
from jaxmp.config import KEYS
from jaxmp.net.group import ProcessGroup
from jaxmp.plan import candidates, crossings, planned, stages, steps
from jaxmp.runtimes.replicated import Replicated
from jaxmp.training import evaluate, groups, step
from jaxmp.training.tasks import named as tasks
from jaxmp.training.trainer import Trainer
from tests.base import ENV, ROOT, STARTED

SHORT = {n.rpartition('.')[2]: n for n in KEYS if not n.endswith(('.name', '.schedule'))}
SHORT |= {n: f'{n}.name' for n in ('data', 'model', 'optimizer')} | {'data_dir': 'data.dir'}


def keyed(changes):
    """Short names of keys (``lr``, ``model``) as the schema's; ``cosine`` has epochs, or 0."""
    values = {SHORT.get(k, k): v for k, v in changes.items() if k != 'cosine'}
    if (length := changes.get('cosine')) is not None:
        values.setdefault('optimizer.schedule', f'cosine({length})' if length else 'constant')
    return values


def config_of(name='digits_resnet', **changes):
    spec = importlib.util.spec_from_file_location(name, ROOT / 'configs' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.get_config()
    made.update_from_flattened_dict(keyed(changes))
    return made


def known_model(monkeypatch, name, build):
    """Lets ``config.model.name`` be ``name``; ``build`` is called with classes and width."""
    key = config.KEYS['model.name']
    monkeypatch.setitem(config.KEYS, 'model.name', key._replace(words=(*key.words, name)))
    monkeypatch.setitem(tasks.MODELS, name, lambda classes, model: build(classes, model.width))


def hurry_the_probe(monkeypatch):
    """Lets `jaxmp plan` and `jaxmp pays` take few turns of few candidates."""
    monkeypatch.setattr(candidates, 'ALIKE', ('uniform(8)', 'ef21(uniform(4))'))
    monkeypatch.setattr(crossings, 'HANDOVERS', 3)
    monkeypatch.setattr(steps, 'STEPS', 2)
    monkeypatch.setattr(stages, 'MOST', 2)
    monkeypatch.setattr(planned, 'EACH', 1)


LAUNCH = (sys.executable, '-m', 'jaxmp.launch', '--processes', '2', '--')

SMALL = {'width': 2, 'train_examples': 160, 'batch_size': 32, 'epochs': 2, 'cosine': 4}
SMALL |= {'test_examples': 72}  # of 360, and as those no multiple of the batch


def command(workdir, name='digits_resnet', **changes):
    """The command line of a small run without a picture, which takes a third as long as it."""
    flags = [f'--config={ROOT / "configs" / name}.py', f'--workdir={workdir}', '--nocurves']
    flags += [f'--config.{k}={v}' for k, v in keyed({**SMALL, **changes}).items()]
    return [sys.executable, str(ROOT / 'train.py'), *flags]


def start(workdir, *before, **changes):
    """A small run as a process, perhaps behind another command."""
    args = [*before, *command(workdir, **changes)]
    process = subprocess.Popen(args, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    STARTED.append(process)
    return process


def wait_for_steps(process, workdir, step):
    """Waits until a checkpoint of at least ``step`` is complete."""
    limit = time.time() + 120
    while time.time() < limit and process.poll() is None:
        done = [int(p.name) for p in (workdir / 'checkpoints').glob('*') if p.name.isdigit()]
        if max(done, default=0) >= step:
            return
        time.sleep(0.02)
    pytest.fail(f'no checkpoint {step}: {process.stdout.read().decode()[-2000:]}')


def damage_newest(workdir):
    """Flips eight bytes of the last checkpoint's state; returns its step."""
    step = max(int(p.name) for p in (workdir / 'checkpoints').glob('*') if p.name.isdigit())
    state = workdir / 'checkpoints' / str(step) / 'state'
    for path in (state / 'ocdbt.process_0' / 'd').iterdir():
        content = bytearray(path.read_bytes())
        for i in range(0, len(content), 1 + len(content) // 8):
            content[i] ^= 0x55
        path.write_bytes(content)
    return step


def text_of(process, limit=300):
    """Output to the end, and the status."""
    out = process.communicate(timeout=limit)[0].decode()
    return out, process.returncode


def pids(workdir, index):
    """Process ``index`` of the run in ``workdir``, not its launcher."""
    found = subprocess.run(
        ['pgrep', '-f', f'train.py .*{workdir}.*--process={index}$'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [int(p) for p in found.stdout.split()]


def records(workdir):
    """What a run measured, without the time it took."""
    lines = (workdir / 'metrics.jsonl').read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != 'seconds'} for line in lines]


def handed(exp, batch):
    """Bytes that a step of one of two replicas hands to collectives, and what it exchanges."""
    made, counts = Trainer(exp, ProcessGroup()), {}
    model, rules = evaluate.model_of(exp, exp.model.boundaries), made.rules(0)
    one = lambda counts: Replicated(model, via=exchange.metered(2, counts))
    key = jax.random.key(0)
    state = jax.eval_shape(lambda: step.create(rules, one({}), made.across, key))
    jax.eval_shape(functools.partial(made.step(rules), one(counts).local), state, batch)
    return counts, groups.exchanged(exp.groups, made.shapes(), together=True)
