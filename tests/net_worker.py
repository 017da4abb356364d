"""A process of the tests of `jaxmp.net`: the switch, or one that trains a vector with the others.

It imports the package without its first file, and so without JAX, to start in a third of a second.
"""

import hashlib
import os
import pathlib
import sys
import time
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == '__main__':  # and not where pytest looks for doctests
    sys.path[0] = str(ROOT)  # and not this folder, which has a numbers.py
    sys.modules['jaxmp'] = package = types.ModuleType('jaxmp')
    package.__path__ = [str(ROOT / 'jaxmp')]

import numpy as np  # noqa: E402

from jaxmp.launch.switch import main as switch  # noqa: E402
from jaxmp.net.address import ProcessGroupError  # noqa: E402
from jaxmp.net.arrays import buffers, filled  # noqa: E402
from jaxmp.net.group import ProcessGroup  # noqa: E402
from jaxmp.net.keys import keys_of  # noqa: E402
from jaxmp.net.peer import Peer  # noqa: E402
from jaxmp.net.views import Terms, ViewChangedError  # noqa: E402

HOST, EVERY, LAST, SIZE = '127.0.0.1', 5, 60, 2000


def say(*words):
    """A line for the test."""
    print(*words, flush=True)


def saved(folder, i):
    """The steps of which this process has snapshots."""
    return sorted(int(path.stem) for path in pathlib.Path(folder).glob(f'*.{i}'))


def save(folder, i, step, x):
    """Keeps a snapshot and the one before."""
    (path := pathlib.Path(folder) / f'new-{i}').write_bytes(x.tobytes())
    path.rename(path.with_name(f'{step}.{i}'))
    for old in saved(folder, i)[:-2]:
        path.with_name(f'{old}.{i}').unlink()


def steps(group, start, x, folder, options):
    """Trains from a step to the last; the sum of all processes scales what each has."""
    i, n = group.index, group.count
    for step in range(start + 1, LAST + 1):
        group.peer.send(group.view, (i + 1) % n, step, 'x', *buffers([x]))
        [other] = filled(group.peer.receive(group.view, (i - 1) % n, step, 'x'), [x])
        x = x / 2 + np.sin(other + i)
        x = x * (1 + 1e-3 * np.tanh(group.total(x[:3]).sum()))
        say('step', step)
        if step % EVERY == 0:
            save(folder, i, step, x)
        if step == int(options.get('hang', -1)):
            time.sleep(1000)
        time.sleep(float(options.get('pace', 0.02)))
    group.barrier()
    return x


def train(i, n, port, folder, **options):
    """The process ``i`` of ``n``; prints a digest of its state at the end."""
    names = tuple(f'process {k} (stage {k})' for k in range(n))
    limits = [float(options.get(k, d)) for k, d in (('start', 20), ('silent', 6), ('back', 12))]

    def end(why):
        time.sleep(0.5)  # the main thread says it, unless it hangs
        say('ended:', why)
        os._exit(3)

    x = np.linspace(0, 1, SIZE) + i
    if not saved(folder, i):
        save(folder, i, 0, x)
    place, direct = (options.get('host', HOST), port), options.get('direct') != 'no'
    peer = Peer(place, keys_of('secret'), i, Terms(names, n, *limits), {'steps': LAST}, end, direct)
    while True:
        view = peer.ready(saved(folder, i))
        start = max(set.intersection(*map(set, view.values.values())))
        say('view', view.number, 'from', start)
        x = np.frombuffer((pathlib.Path(folder) / f'{start}.{i}').read_bytes())
        try:
            x = steps(ProcessGroup(peer, view), start, x, folder, options)
            break
        except ViewChangedError as error:
            say('changed:', error)
    say('digest', hashlib.sha256(x.tobytes()).hexdigest())
    peer.close()


if __name__ == '__main__':
    if sys.argv[1] == 'switch':
        sys.exit(switch(sys.argv[2:]))
    try:
        i, n, port = map(int, sys.argv[1:4])
        train(i, n, port, sys.argv[4], **dict(word.split('=') for word in sys.argv[5:]))
    except ProcessGroupError as error:
        say('ended:', error)
        sys.exit(1)
