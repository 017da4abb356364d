"""The processes of a bench over slow links: one in every namespace, orders in, answers out.

A script of a bench is run by `workers` and calls `serve`; orders and answers are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import emulated_network
from emulated_network import Lab

from jaxmp.training.summary import provenance

HERE = Path(__file__).parent
PORT = 7078
UNSAID = {
    'delay': 0,
    'by_stage': False,
    'microbatches': 1,
    'schedule': '1f1b',
    'cores': 2,
    'sequence_length': 0,
    'num_microbatches': 0,
}  # of rows from before these were settings


class Rows:
    """Measured rows, in a file from the moment they are measured."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self.path = path
        if fresh:
            path.unlink(missing_ok=True)
        self.rows = [json.loads(l) for l in path.read_text().splitlines()] if path.exists() else []

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these entries."""
        return any(all(row.get(k) == v for k, v in key.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        """Keeps a row."""
        self.rows.append(row)
        with self.path.open('a') as file:
            file.write(json.dumps(row) + '\n')

    def start(self, text: str = '', **settings: Any) -> None:
        """Notes what is run, and beside how much; refuses to add to rows of other settings."""
        first = next(({**UNSAID, **r} for r in self.rows if r['kind'] == 'run'), None)
        if first and any(first[k] != v for k, v in settings.items()):
            was = {k: first[k] for k in settings}
            raise SystemExit(f'{self.path} was made with {was}, not {settings}; use --fresh')
        load = round(os.getloadavg()[0], 1)  # processes that wanted a core in the last minute
        settings |= {'text': text} if text else {}
        self.add(kind='run', **settings, **provenance(), load=load, command=shlex.join(sys.argv))


class Crew:
    """A process in every namespace of a lab, given orders as lines of JSON."""

    def __init__(self, lab: Lab, script: str, log: Any) -> None:
        self.log, self.members = log, []
        paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get('PYTHONPATH')])])
        for s in range(lab.stages):
            words = f'{emulated_network.address(0)}:{PORT}', str(lab.stages), str(s)
            member = subprocess.Popen(
                lab.inside(s, sys.executable, str(HERE / script), *words),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, 'PYTHONPATH': paths, 'JAXMP_TOKEN': 'bench'},
                start_new_session=True,
            )  # fmt: skip
            self.members.append(member)

    def ask(self, do: str, only: int | None = None, **order: Any) -> list[Any]:
        """Gives an order to all stages, or to one, and waits for the answers."""
        asked = self.members if only is None else [self.members[only]]
        for member in asked:
            with contextlib.suppress(BrokenPipeError):
                member.stdin.write(json.dumps({'do': do, **order}) + '\n')
                member.stdin.flush()
        return [self._answer(m) for m in asked]

    def sent(self) -> int:
        """Bytes that left all namespaces so far."""
        return sum(a['bytes'] for a in self.ask('sent'))

    def _answer(self, member: subprocess.Popen) -> Any:
        assert member.stdout
        line = member.stdout.readline()
        if not line:
            self.log.seek(0)
            end = ''.join(self.log.readlines()[-15:])
            raise RuntimeError(f'stage {self.members.index(member)} ended:\n{end}')
        return json.loads(line)

    def close(self) -> None:
        """Ends all of them."""
        for member in self.members:
            member.kill()
            member.communicate()


@contextlib.contextmanager
def workers(lab: Lab, script: str) -> Iterator[Crew]:
    """``script`` in every namespace of a lab, ended with the block."""
    with tempfile.TemporaryFile('w+') as log:
        made = Crew(lab, script, log)
        try:
            yield made
        finally:
            made.close()


def steady(windows: Sequence[float], share: float = 0.05) -> bool:
    """Whether the last three agree within ``share``."""
    last = windows[-3:]
    return len(last) == 3 and max(last) <= min(last) * (1 + share)


def machine_seconds() -> float:
    """CPU-seconds of this machine until now, of its kernel and interrupts too."""
    user, nice, system, _, _, irq, soft, *_ = map(
        int, Path('/proc/stat').read_text().split('\n', 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / os.sysconf('SC_CLK_TCK')


def serve(make: Any, coordinator: str, count: str, index: str, apart: bool = False) -> None:
    """Joins the other processes, then answers orders until there are no more.

    Args:
      make: ``count -> worker``, or ``(count, group) -> worker`` where all are apart; its methods
        are the orders.
      coordinator: host:port of process 0.
      count: how many processes there are.
      index: of this one.
      apart: whether each has a JAX of its own.
    """
    import jax
    from timing import keep_freed_pages

    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # gloo prints
    keep_freed_pages()
    jax.config.update('jax_platforms', 'cpu')
    if apart:
        from jaxmp.net.connect import Address, connect

        address = Address(coordinator, int(count), int(index))
        worker = make(int(count), connect(address, range(int(count)), {}))
    else:
        jax.config.update('jax_cpu_collectives_implementation', 'gloo')
        jax.distributed.initialize(coordinator, int(count), int(index), initialization_timeout=60)
        jax.devices()  # the processes meet here; else the first to need one waits for the others
        worker = make(int(count))
    try:
        for line in sys.stdin:
            order = json.loads(line)
            answer = getattr(worker, order.pop('do'))(**order)
            print(json.dumps(answer), file=answers, flush=True)
    except Exception:
        traceback.print_exc()
    os._exit(0)  # no barrier with processes that may be gone


def interfaces() -> dict[str, int]:
    """Bytes that left this namespace by any interface but its own loopback."""
    devices = [d for d in Path('/sys/class/net').iterdir() if d.name != 'lo']
    return {'bytes': sum(int((d / 'statistics/tx_bytes').read_text()) for d in devices)}
