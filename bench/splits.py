"""Two machines of unlike speed: the split that `jaxmp plan --peer` chooses beside all others.

Run: python bench/splits.py [--slower=3] [--blocks=6] [--cores 0 1]
Process 0 is stopped (SIGSTOP) for all but 1/``slower`` of every period, as by a CPU quota.
`compared` measures it and its link through the port of `jaxmp pays --listen`, and chooses. Then all
splits of a small GPT-2 run in turns, ``--steps`` steps each in ``--rounds`` rounds, with raw
messages over the loopback; the median counts. The exit status is 1 if the chosen one takes more
than 1.1 times as long as the best. Each process needs a core of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timing import stem

from jaxmp.launch.__main__ import free_port
from jaxmp.plan import splits
from jaxmp.training.summary import provenance

HERE, PERIOD, BAR = Path(__file__).parent, 0.03, 1.1
ENV = {'JAXMP_TOKEN': 'bench', 'JAX_PLATFORMS': 'cpu'}


@contextlib.contextmanager
def throttled(process: subprocess.Popen, slower: float) -> Iterator[None]:
    """Lets a process run for a share of every period alone."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            for number, share in ((signal.SIGCONT, 1 / slower), (signal.SIGSTOP, 1 - 1 / slower)):
                process.send_signal(number)
                time.sleep(PERIOD * share)
        process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=run)
    if slower > 1:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if slower > 1:
            thread.join()


def started(words: list[str], core: int, **options: Any) -> subprocess.Popen:
    """A Python process on a core."""
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get('PYTHONPATH')])])
    return subprocess.Popen(
        ['taskset', '-c', str(core), sys.executable, *words],
        env={**os.environ, **ENV, 'PYTHONPATH': paths}, text=True, **options,
    )  # fmt: skip


def model(args: argparse.Namespace) -> list[str]:
    """The changes of text_gpt2."""
    return [
        f'model.blocks={args.blocks}', f'model.width={args.width}', 'model.stages=2',
        'parallel.runtime=mpmd', 'fwd=raw', 'bwd=raw', f'parallel.num_microbatches={args.each}',
    ]  # fmt: skip


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """What `compared` finds of the slow process."""
    port = free_port()
    words = [f'--config.{text}' for text in model(args)]
    where = f'=127.0.0.1:{port}'
    slow = started(
        ['-m', 'jaxmp', 'pays', '--config=text_gpt2', *words, f'--listen{where}'], args.cores[0],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert slow.stderr
        while 'listening' not in (line := slow.stderr.readline()):
            if not line:
                raise RuntimeError('the process that listens has ended')
        threading.Thread(target=slow.stderr.read, daemon=True).start()
        call = [str(HERE / 'splits.py'), '--call', where, *sys.argv[1:]]
        with throttled(slow, args.slower):
            said = started(call, args.cores[1], stdout=subprocess.PIPE).communicate()[0]
        return json.loads(said.splitlines()[-1])
    finally:
        slow.kill()
        slow.communicate()


def call(where: str, args: argparse.Namespace) -> None:
    """Measures the process that listens, and prints the choice."""
    from jaxmp.plan.asked import asked
    from jaxmp.plan.machines import compared
    from jaxmp.plan.planned import probed_experiment

    words = [f'--config.{text}' for text in model(args)]
    ask = asked(['--config=text_gpt2', *words, f'--peer{where}'], 'jaxmp plan', '', 'plan.py')
    found = compared(ask, ask.config()[0], probed_experiment)
    print(json.dumps({'slower': found.slower[0], 'link': found.link, **found.values}))


FILE = """from jaxmp.plan.asked import changed


def get_config():
    return changed('text_gpt2', {texts!r})[0]
"""


def measured(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of the steps of all splits, by cuts and place."""
    parts = splits.Parts(True, (), (), (), args.each)
    values = [
        splits.values_of(splits.Split(place, 0.0, ()), parts)
        for place in splits.places(args.blocks, 2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f'{i}.py' for i in range(len(values))]
        for file, own in zip(files, values, strict=True):
            texts = [*model(args), *(f'{key}={value}' for key, value in own.items())]
            file.write_text(FILE.format(texts=texts))
        port = free_port()
        common = [str(HERE / 'planner_worker.py'), f'--coordinator=127.0.0.1:{port}']
        common += ['--processes=2', f'--rounds={args.rounds}', f'--steps={args.steps}']
        pair = [
            started(
                [*common, f'--core={core}', f'--process={i}', *map(str, files)], core,
                stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
            )
            for i, core in enumerate(args.cores)
        ]  # fmt: skip
        try:
            with throttled(pair[0], args.slower):
                said = pair[0].communicate()[0]
        finally:
            for process in pair:
                process.kill()
                process.wait()
    rows = json.loads(said.splitlines()[-1])
    names = [', '.join(f'{k}={v!r}' for k, v in own.items()) for own in values]
    return dict(zip(names, rows, strict=True))


def main() -> None:
    """Chooses, measures all splits, writes both."""
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    ask.add_argument('--slower', type=float, default=3.0)
    ask.add_argument('--blocks', type=int, default=6)
    ask.add_argument('--width', type=int, default=96)
    ask.add_argument('--each', type=int, default=8, help='micro-batches of a step')
    ask.add_argument('--cores', nargs=2, type=int, default=[0, 1])
    ask.add_argument('--steps', type=int, default=3)
    ask.add_argument('--rounds', type=int, default=4)
    ask.add_argument('--out', type=Path)
    ask.add_argument('--call', help=argparse.SUPPRESS)
    args = ask.parse_args()
    if args.call:
        return call(args.call, args)
    choice = chosen(args)
    steps = measured(args)
    medians = {name: statistics.median(own) for name, own in steps.items()}
    name = f'model.cuts={choice["model.cuts"]!r}, parallel.place={choice["parallel.place"]!r}'
    ratio = medians[name] / min(medians.values())
    for split, seconds in sorted(medians.items(), key=lambda row: row[1]):
        print(f'{split:48}{1e3 * seconds:9.1f} ms{"  chosen" * (split == name)}')
    print(f'the chosen split takes {ratio:.2f} times as long as the best')
    saved = {
        'choice': choice, 'chosen': name, 'ratio': ratio, 'medians': medians, 'steps': steps,
        'settings': {k: v for k, v in vars(args).items() if k not in ('out', 'call')},
        'load': os.getloadavg()[0], **provenance(),
    }  # fmt: skip
    out = args.out or HERE / 'results' / f'{stem("splits")}.json'
    out.write_text(json.dumps(saved, indent=1) + '\n')
    sys.exit(ratio > BAR)


if __name__ == '__main__':
    main()
