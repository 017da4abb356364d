"""python results/migrate.py FILE ...: configurations of older versions, with every key of this one.

Rewrites the ``config`` of result files (``summary.json``, a sweep's results) and the
``config.json`` of workdirs in place: flat ones of before version 0.3 are made nested, and a key
that is missing gets its default.
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


def migrated(old: dict) -> dict:
    """A configuration with every key of the schema; one of before version 0.3 is flat."""
    if any(isinstance(value, dict) for value in old.values()):
        made = config.complete(old).to_dict()
        if 'dir' not in old.get('data', {}):
            del made['data']['dir']
        return made
    values = {NAMES.get(name, name): value for name, value in old.items() if name not in GONE}
    falling = values.get('optimizer.name', 'sgd') == 'adamw'
    cosine = 'cosine' if values.get('optimizer.cosine_epochs') else 'constant'
    values['optimizer.schedule'] = 'linear' if falling else cosine
    made = config.complete(config.nested(values)).to_dict()
    if 'data_dir' not in old:  # a result does not say where the data lay
        del made['data']['dir']
    return made


def text(value: dict, like: str) -> str:
    """``value`` as JSON, laid out as the file ``like`` is: a line per key, or indented."""
    if '\n  ' in like:
        return json.dumps(value, indent=1) + '\n'
    lines = (f' {json.dumps(k)}: {json.dumps(v)}' for k, v in value.items())
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def main(paths: list[str]) -> None:
    """Rewrites the files."""
    for path in map(Path, paths):
        before = path.read_text()
        found = json.loads(before)
        if not isinstance(found, dict):
            continue
        if path.name == 'config.json':
            after = migrated(found)
        elif isinstance(found.get('config'), dict):
            after = {**found, 'config': migrated(found['config'])}
        else:
            continue
        if after != found:
            path.write_text(text(after, before))


if __name__ == '__main__':
    main(sys.argv[1:])
