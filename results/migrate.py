"""python results/migrate.py FILE ...: configurations of older versions, with every key of this one.

Rewrites the ``config`` of result files (``summary.json``, a sweep's results) and the
``config.json`` of workdirs in place: flat ones of before version 0.3 are made nested, a key
that is missing gets its default. A key that has left is said by another.
Nothing else in a file changes, and no number.
"""

import json
import sys
from pathlib import Path

from jaxmp import config

NAMES = {
    'data': 'data.name', 'data_dir': 'data.dir', 'download': 'data.download',
    'train_examples': 'data.train_examples', 'test_examples': 'data.test_examples',
    'pool': 'data.pool', 'augment': 'data.augment', 'sequence_length': 'data.sequence_length',
    'tokenizer': 'data.tokenizer', 'model': 'model.name', 'width': 'model.width',
    'stages': 'model.stages', 'blocks': 'model.blocks', 'heads': 'model.heads',
    'dropout': 'model.dropout', 'dtype': 'model.dtype', 'remat': 'model.remat',
    'init_from': 'model.path', 'optimiser': 'optimizer.name', 'lr': 'optimizer.lr',
    'cosine_epochs': 'optimizer.cosine_epochs', 'momentum': 'optimizer.momentum',
    'weight_decay': 'optimizer.weight_decay', 'clip_norm': 'optimizer.clip_norm',
    'runtime': 'parallel.runtime', 'micro_batches': 'parallel.num_microbatches',
    'replicas': 'parallel.replicas',
}  # fmt: skip
GONE = ('tensorboard',)


def renewed(values: dict) -> dict:
    """Values by dotted names, in which keys of today say what keys that have left said."""
    if count := values.pop('warmup_epochs', 0):
        texts = f'raw@:{count}', values.get('phases', '')
        values['phases'] = '; '.join(text for text in texts if text)
    count = values.pop('optimizer.cosine_epochs', 0)
    if count and values['optimizer.schedule'] == 'cosine':
        values['optimizer.schedule'] = f'cosine({count})'
    decay = values.pop('optimizer.decay', '20%')
    if values.get('optimizer.schedule') == 'wsd' and decay != '20%':
        values['optimizer.schedule'] = f'wsd({decay})'
    for name in ('data.cache', 'parallel.send_once'):  # they moved no number
        values.pop(name, None)
    if values.get('model.bottleneck') or values.get('model.embed_every_stage'):
        values['model.name'] = 'study.bottleneck:build'
    return config.current(values)


def migrated(old: dict) -> dict:
    """A configuration with keys of the schema alone; one of before version 0.3 is flat."""
    if any(isinstance(value, dict) for value in old.values()):
        return config.nested(renewed(config.flat(old)))
    values = {NAMES.get(name, name): value for name, value in old.items() if name not in GONE}
    falling = values.get('optimizer.name', 'sgd') == 'adamw'
    cosine = 'cosine' if values.get('optimizer.cosine_epochs') else 'constant'
    values['optimizer.schedule'] = 'linear' if falling else cosine
    made = config.complete(config.nested(renewed(values))).to_dict()
    if 'data_dir' not in old:  # a result does not say where the data lay
        del made['data']['dir']
    return made


def text(value: dict, like: str) -> str:
    """``value`` as JSON, laid out as the file ``like`` is: a line per key, or indented."""
    if '\n  ' in like:
        return json.dumps(value, indent=1) + '\n'
    lines = (f' {json.dumps(k)}: {json.dumps(v)}' for k, v in value.items())
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def everywhere(found: object) -> object:
    """Results, and results within results, with their configurations migrated."""
    if not isinstance(found, dict):
        return found
    has_one = isinstance(found.get('config'), dict)
    return {
        name: migrated(value) if has_one and name == 'config' else everywhere(value)
        for name, value in found.items()
    }


def main(paths: list[str]) -> None:
    """Rewrites the files."""
    for path in map(Path, paths):
        before = path.read_text()
        found = json.loads(before)
        after = migrated(found) if path.name == 'config.json' else everywhere(found)
        if after != found:
            path.write_text(text(after, before))


if __name__ == '__main__':
    main(sys.argv[1:])
