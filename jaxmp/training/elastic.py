"""Training of replicas that come and go, each a process with a JAX of its own.

Replica k trains on the k-th of n cuts of every batch, as a run of one program. Between its steps
the rounds of `diloco` go by a hub (`jaxmp.training.meetings`). A replica that joins takes the
shared state from the others, its optimizer's state from its own checkpoint, and goes on at their
step. Every replica has a workdir of its own with its records; that of replica 0 is the run's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp import config as schema
from jaxmp import data
from jaxmp.boundary import Boundary
from jaxmp.config import Config
from jaxmp.distributed.address import token_of
from jaxmp.distributed.member import BehindError, Member
from jaxmp.distributed.process_group import Address, ProcessGroup, endpoint
from jaxmp.exchange import Collectives, Exchange, bytes_of
from jaxmp.training import one_program, replicas
from jaxmp.training.agreement import digests, settings_of
from jaxmp.training.engine import Engine, Epoch, Stopped, rules_of
from jaxmp.training.experiment import Experiment, experiment_of
from jaxmp.training.fingerprint import fingerprint
from jaxmp.training.loop import Prepared, train_and_evaluate
from jaxmp.training.meetings import Meetings
from jaxmp.training.one_program import never, step_of
from jaxmp.training.replicated import exchanged_shapes
from jaxmp.training.step import TrainState
from jaxmp.training.task import Task
from jaxmp.training.trackers import Callback

PATIENCE = 50.0  # seconds in which the hub must answer
ALONE = Exchange(lambda grads, n: (), lambda grads, state, key, via: (grads, state))


def train_as_member(
    config: Config,
    workdir: Path,
    address: Address,
    callbacks: Sequence[Callback] = (),
    task: Task | None = None,
) -> dict[str, Any] | None:
    """Trains one replica of an elastic run to the end; see `train_and_evaluate`.

    Args:
      config: all keys.
      workdir: folder of replica 0; the others use ``workdir/replicas/K``.
      address: host and port of the hub as the coordinator, number of replicas, and this one's.
      callbacks: called with each record of this replica.
      task: in place of the one that ``config`` names.

    Raises:
      ValueError: if the configuration cannot be elastic, or as `train_and_evaluate`.
      ProcessGroupError: if the hub does not answer, or refuses this replica.
    """
    check(config, address)
    host, port = endpoint(address)
    k, token = int(address.process or 0), token_of(address.token_file, host)
    workdir = workdir / 'replicas' / str(k) if k else workdir
    exp = experiment_of(config, task)
    meetings = Meetings(exp)
    made = Prepared(exp, elastic(exp, meetings, k, workdir))
    while True:
        meetings.member = Member((host, port), k, token, PATIENCE)
        try:
            summary = train_and_evaluate(
                config, workdir, task, ProcessGroup(), made, callbacks=callbacks, quiet=k > 0
            )
        except BehindError as error:
            print(f'replica {k}: {error}; joins again', flush=True)
            continue
        finally:
            meetings.member.leave()
        return summary


def check(config: Config, address: Address) -> None:
    """Raises ValueError unless ``config`` can be elastic, with so many processes."""
    schema.check(config)
    runtime, n = config.parallel.runtime, config.parallel.replicas
    if runtime != 'local' or n < 2:
        raise ValueError(
            f'config.parallel.elastic=True takes several replicas of one program each, got '
            f'config.parallel.replicas={n} and config.parallel.runtime={runtime!r}; stages in '
            'programs of their own end together'
        )
    if address.processes != n:
        raise ValueError(
            f'an elastic run has one process per replica, got {address.processes} processes and '
            f'config.parallel.replicas={n}; start it with jaxmp launch --elastic --processes {n}'
        )


def elastic(exp: Experiment, meetings: Meetings, k: int, workdir: Path) -> Engine:
    """The engine of replica k.

    Raises:
      ValueError: if the exchange is not in rounds, or its states do not let replicas come and go.
    """
    if any(e.rounds is None for e in (exp.exchange, *exp.exchange.by_epoch)):
        raise ValueError(
            f'config.exchange={exp.config.exchange!r} needs all replicas in every step, and '
            'config.parallel.elastic=True lets them come and go between rounds; take '
            'diloco(30, all_gather(ef(one_bit))), or diloco(30, mean, outer=sgd(1.0)) as local SGD'
        )
    meetings.take(one_program.create(exp, exp.replicas))
    meetings.check()
    score = one_program.evaluator(exp)
    via = Collectives(exp.replicas, k, *(lambda tree: tree,) * 3)

    @functools.cache
    def compiled(cuts: tuple[Boundary, ...]) -> Callable[..., Any]:
        alone = tuple(g._replace(exchange=ALONE) for g in exp.groups)
        rules = rules_of(exp, 0)._replace(groups=alone)
        return jax.jit(functools.partial(step_of(exp, cuts, rules), via), donate_argnums=0)

    steps = lambda n: compiled(exp.boundaries(n))
    public = lambda state: state.replace(
        model=state.model._replace(params=meetings.shared(state.model.params))
    )

    return Engine(
        create=lambda seeded: meetings.take(one_program.create(seeded, exp.replicas)),
        epoch=lambda n: epoch_of(exp, steps(n), meetings, k, workdir),
        evaluate=lambda state, compressed: score(public(state), compressed),
        export=lambda state: one_program.export(exp, meetings.whole(state), k),
        load=lambda state, saved: meetings.take(
            one_program.load(exp, meetings.whole(state), saved, k)
        ),
        moved=lambda: {
            'processes': exp.replicas,
            'exchange': replicas.traffic(exp, exchanged_shapes(exp), bytes_of),
        },
        weights=lambda state: one_program.variables_of(public(state)),
        enter=lambda state: enter(exp, meetings, state, steps),
        leave=lambda state, done: meetings.member.close(
            int(state.step), done, meetings.to_bytes
        ),
    )  # fmt: skip


def epoch_of(
    exp: Experiment, step: Callable[..., Any], meetings: Meetings, k: int, workdir: Path
) -> Epoch:
    """An epoch of replica k as a loop over a compiled step, with the rounds between steps."""

    def run(state: TrainState, order: np.ndarray, stopped: Stopped = never) -> Iterator:
        number = int(state.step)
        for batch in own_batches(exp, order, k):
            state, values = step(state, batch)
            number += 1
            state = meetings.turn(state, number)
            note(meetings.member, workdir)
            yield state, values, stopped()

    return run


def own_batches(exp: Experiment, order: np.ndarray, k: int) -> Iterator[dict[str, Any]]:
    """Replica k's cuts of the batches of ``order``, which may be empty."""
    each = exp.config.batch_size // exp.replicas
    if len(order):
        for batch in data.batches(exp.data.train, exp.config.batch_size, order):
            yield {name: a[k * each : (k + 1) * each] for name, a in batch.items()}


def note(member: Member, workdir: Path) -> None:
    """Appends the views of the run that are new to ``members.jsonl``."""
    if member.views:
        with (workdir / 'members.jsonl').open('a') as file:
            while member.views:
                step, members = member.views.pop(0)
                file.write(json.dumps({'step': step, 'members': members}) + '\n')


def enter(
    exp: Experiment, meetings: Meetings, state: TrainState, steps: Callable[[int], Any]
) -> TrainState:
    """The state with which this replica joins, after its program is compiled."""
    number, k = int(state.step), meetings.member.replica
    batch = next(own_batches(exp, np.arange(exp.config.batch_size), k))
    steps(number // exp.epoch_steps)(jax.tree.map(jnp.copy, state), batch)
    welcome = meetings.member.join(number, meetings.digest(), about(exp))
    if welcome.state:
        meetings.load(welcome.state)
        params = meetings.shared(state.model.params)
        state = state.replace(model=state.model._replace(params=params))
    if welcome.step != number:
        opt_state = moved(state.opt_state, welcome.step)
        state = state.replace(step=jnp.asarray(welcome.step, jnp.int32), opt_state=opt_state)
    if welcome.provide:
        meetings.member.provide(welcome.step, meetings.digest(), meetings.to_bytes())
    return jax.tree.map(jnp.copy, state)  # the first step takes its buffers


def moved(opt_state: Any, number: int) -> Any:
    """The optimizer's state with the learning rate's schedule at step ``number``."""
    kind = optax.ScaleByScheduleState
    at = lambda x: kind(jnp.asarray(number, jnp.int32)) if isinstance(x, kind) else x
    return jax.tree.map(at, opt_state, is_leaf=lambda x: isinstance(x, kind))


def about(exp: Experiment) -> dict[str, Any]:
    """What must be the same at all replicas: versions, settings, what computes, and data."""
    return {**settings_of(exp.config), **fingerprint(exp), **digests(exp.data)}
