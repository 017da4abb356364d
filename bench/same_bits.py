"""Digests of short runs, to compare two commits: python bench/same_bits.py [OUT.json]

On one machine. Each run trains a few steps; its digest is of all that metrics.jsonl measured, to
the last bit, but the time. With OUT.json from another commit, says which runs differ, and ends
with 1 if one does.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxmp import train_and_evaluate
from jaxmp.config import load

FEW = {'epochs': 2, 'batch_size': 32, 'data.train_examples': 128, 'data.test_examples': 64}
TWO = {'fwd': 'ef21(top_k(0.1))', 'bwd': 'uniform(6)'}
RUNS = {  # a configuration and its changes
    'digits local': ('digits_resnet', {**FEW, **TWO}),
    'digits mpmd': ('digits_resnet', {**FEW, **TWO, 'parallel.runtime': 'mpmd'}),
    'digits spmd': ('digits_resnet', {**FEW, **TWO, 'parallel.runtime': 'spmd'}),
    'two replicas': (
        'digits_resnet',
        {**FEW, 'parallel.replicas': 2, 'exchange': 'all_gather(ef21(top_k(0.1)))'},
    ),
    'late': ('digits_resnet', {**FEW, 'parallel.runtime': 'mpmd', 'optimizer.delay': 1}),
    'late by stage': (
        'digits_resnet',
        {**FEW, 'parallel.runtime': 'mpmd', 'parallel.num_microbatches': 2, 'optimizer.delay': 2,
         'optimizer.delay_by_stage': True},
    ),
    'text_gpt2': (
        'text_gpt2',
        {'steps': 20, 'batch_size': 8, 'fwd': 'anchored(rotate(lloyd(2)), vocabulary)',
         'bwd': 'block(4)', 'data.train_examples': 400, 'data.test_examples': 40},
    ),
    'lora': (
        'finetune',
        {'steps': 8, 'batch_size': 4, 'model.train': 'lora(2)', 'model.stages': 2,
         'data.sequence_length': 16, 'data.tokenizer': 'bytes', 'data.train_examples': 64,
         'data.test_examples': 16},
    ),
}  # fmt: skip


def digest(name: str, folder: Path) -> str:
    """The digest of a run."""
    file, changes = RUNS[name]
    config = load(file)
    config.update_from_flattened_dict(changes)
    if name == 'lora':
        from tests.test_pretrained import tiny

        tiny(folder / 'model')
        config.model.path = str(folder / 'model')
    train_and_evaluate(config, folder / 'run', quiet=True, draw=False)
    lines = (folder / 'run' / 'metrics.jsonl').read_text().splitlines()
    told = [{k: v for k, v in json.loads(line).items() if k != 'seconds'} for line in lines]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def main() -> None:
    """Prints the digests, or compares them with those of a file."""
    digests = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                digests[name] = digest(name, Path(folder))
            except Exception as error:  # so that the others are still compared
                digests[name] = f'{type(error).__name__}: {error}'
        print(name, digests[name], file=sys.stderr)
    print(json.dumps(digests, indent=1))
    if sys.argv[1:]:
        before = json.loads(Path(sys.argv[1]).read_text())
        different = [name for name in RUNS if digests[name] != before[name]]
        sys.exit(f'different: {", ".join(different)}' if different else 0)


if __name__ == '__main__':
    main()
