"""Training of replicas that come and go, each a process with a JAX of its own.

Replica k trains on the k-th of n cuts of every batch, as a run of one program. Between its steps
the rounds of `diloco` go by a switch (`meetings`). A replica that joins takes the
shared state from the others, its optimizer's state from its own checkpoint, and goes on at their
step. Every replica has a workdir of its own with its records; that of replica 0 is the run's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp import config as schema
from jaxmp.config import Config, Summary
from jaxmp.exchange import Collectives, Exchange
from jaxmp.exchange.collectives import Params, Tree
from jaxmp.net.connect import Address, entrance, names_of
from jaxmp.net.group import LONG, ProcessGroup
from jaxmp.net.peer import Peer
from jaxmp.net.views import Terms
from jaxmp.runtimes.replicated import Replicated
from jaxmp.runtimes.types import Batch
from jaxmp.training.across import Traffic
from jaxmp.training.agreement import Settings, digests, settings_of
from jaxmp.training.clipping import OptState
from jaxmp.training.elastic.meetings import Meetings
from jaxmp.training.elastic.member import BehindError, Member
from jaxmp.training.experiment import Experiment, experiment_of
from jaxmp.training.fingerprint import fingerprint
from jaxmp.training.loop import train_and_evaluate
from jaxmp.training.parallel import Build, apart
from jaxmp.training.portable import Portable
from jaxmp.training.step import Rules, TrainState
from jaxmp.training.tasks.task import Task
from jaxmp.training.trainer import Trainer
from jaxmp.training.workdir.trackers import Callback

ALONE = Exchange(lambda grads, n: (), lambda grads, state, key, via: (grads, state))


def train_as_member(
    config: Config,
    workdir: Path,
    address: Address,
    callbacks: Sequence[Callback] = (),
    task: Task | None = None,
) -> Summary | None:
    """Trains one replica of an elastic run to the end; see `train_and_evaluate`.

    Args:
      config: all keys.
      workdir: folder of replica 0; the others use ``workdir/replicas/K``.
      address: host and port of the switch, number of replicas, and this one's.
      callbacks: called with each record of this replica.
      task: in place of the one that ``config`` names.

    Raises:
      ValueError: if the configuration cannot be elastic, or as `train_and_evaluate`.
      ProcessGroupError: if the switch does not answer, or refuses this replica.
    """
    check(config, address)
    k, (switch, keys) = int(address.process or 0), entrance(address)
    names = names_of(range(config.parallel.replicas), 'replica')
    terms = Terms(names, 1, address.start, address.silent)
    workdir = workdir / 'replicas' / str(k) if k else workdir
    exp = experiment_of(config, task)
    trainer = ElasticTrainer(exp, k, workdir)
    meetings = trainer.meetings
    # A replica that is behind the others begins again, from what they share.
    while True:
        meetings.member = Member(Peer(switch, keys, k, terms, about(exp)))
        meetings.member.peer.announce('starting', LONG)
        try:
            summary = train_and_evaluate(
                config, workdir, task, trainer=trainer, callbacks=callbacks, quiet=k > 0
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
    if apart(config) or n < 2:
        raise ValueError(
            f'config.parallel.elastic=True takes several replicas of one program each, got '
            f'config.parallel.replicas={n} and config.parallel.runtime={runtime!r}; stages in '
            'programs of their own end together'
        )
    if address.back:
        raise ValueError(
            f'--back={address.back:g} makes all wait for a process, and config.parallel.elastic='
            'True lets the others go on; leave one of them out'
        )
    if address.processes != n:
        raise ValueError(
            f'an elastic run has one process per replica, got {address.processes} processes and '
            f'config.parallel.replicas={n}; start it with jaxmp launch --elastic --processes {n}'
        )


class ElasticTrainer(Trainer):
    """Trains replica k of several, which meet between steps."""

    def __init__(self, exp: Experiment, k: int, workdir: Path) -> None:
        """Connects to nobody yet.

        Args:
          exp: the experiment.
          k: number of the replica.
          workdir: of this replica.

        Raises:
          ValueError: if the exchange is not in rounds, or its states do not let replicas come and
            go.
        """
        if any(e.rounds is None for e in (exp.exchange, *exp.exchange.by_epoch)):
            raise ValueError(
                f'config.exchange={exp.config.exchange!r} needs all replicas in every step, and '
                'config.parallel.elastic=True lets them come and go between rounds; take '
                'diloco(30, all_gather(ef(one_bit))), or diloco(30, mean, outer=sgd(1.0)) as local '
                'SGD'
            )
        self.scored, self.workdir = k, workdir
        super().__init__(exp, ProcessGroup())
        self.meetings = Meetings(exp, super().create)
        self.create()
        self.meetings.check()

    def builder(self) -> Build:
        """One program, of one of several replicas."""
        via = Collectives(self.exp.replicas, self.scored, *(lambda tree: tree,) * 3)
        test = lambda model: Replicated(model, train=False)
        return lambda model, train: Replicated(model, via=via) if train else test(model)

    def rules(self, epoch: int) -> Rules:
        """Those of a replica by itself."""
        alone = tuple(g._replace(exchange=ALONE) for g in self.exp.groups)
        return super().rules(epoch)._replace(groups=alone)

    def batches(self, order: np.ndarray) -> Iterator[Batch]:
        """This replica's cuts of the batches of ``order``, which may be empty."""
        each = self.exp.config.batch_size // self.exp.replicas
        cut = slice(self.scored * each, (self.scored + 1) * each)
        for batch in super().batches(order) if len(order) else ():
            yield {name: a[cut] for name, a in batch.items()}

    # States: those of the exchange are with the meetings.

    def create(self) -> TrainState:
        """See `Trainer`."""
        return self.meetings.take(super().create())

    def meet(self, state: TrainState, number: int) -> TrainState:
        """See `Trainer`."""
        member = self.meetings.member
        member.peer.announce('training', 0)
        state = self.meetings.turn(state, number)
        note(member, self.workdir)
        return state

    def scored_later(self, state: TrainState, compressed: bool) -> Callable[[], dict[str, float]]:
        """See `Trainer`."""
        self.meetings.member.peer.announce('testing', LONG)
        return super().scored_later(state, compressed)

    def averaged(self, state: TrainState) -> dict[int, tuple[Params, Tree]]:
        """The shared parameters, and the statistics of this replica."""
        params = self.meetings.shared(state.model.params)
        return {s: (params[s], state.model.model_state[s]) for s in params}

    def export(self, state: TrainState) -> Portable:
        """See `Trainer`."""
        return super().export(self.meetings.whole(state))

    def load(self, state: TrainState, saved: Portable) -> TrainState:
        """See `Trainer`."""
        return self.meetings.take(super().load(self.meetings.whole(state), saved))

    # Membership.

    def enter(self, state: TrainState) -> TrainState:
        """The state with which this replica joins, after its program is compiled."""
        meetings, number = self.meetings, int(state.step)
        epoch = number // self.exp.epoch_steps
        step = self.bound(self.during(self.exp.boundaries(epoch)), self.rules(epoch))
        batch = next(self.batches(np.arange(self.exp.config.batch_size)))
        step(jax.tree.map(jnp.copy, state), batch)
        welcome = meetings.member.join(number, meetings.digest(), meetings.to_bytes)
        if welcome.state:
            meetings.load(welcome.state)
            params = meetings.shared(state.model.params)
            state = state.replace(model=state.model._replace(params=params))
        if welcome.step != number:
            opt_state = at_step(state.opt_state, welcome.step)
            state = state.replace(step=jnp.asarray(welcome.step, jnp.int32), opt_state=opt_state)
        return jax.tree.map(jnp.copy, state)  # the first step takes its buffers

    def leave(self, state: TrainState, finished: bool) -> None:
        """See `Trainer`."""
        if finished:
            self.meetings.end(int(state.step))

    def moved(self) -> Traffic:
        """See `Trainer`; each replica is a process."""
        return {**super().moved(), 'processes': self.exp.replicas}


def note(member: Member, workdir: Path) -> None:
    """Appends the views of the run that are new to ``members.jsonl``."""
    if member.views:
        with (workdir / 'members.jsonl').open('a') as file:
            while member.views:
                step, members = member.views.pop(0)
                file.write(json.dumps({'step': step, 'members': members}) + '\n')


def at_step(opt_state: OptState, number: int) -> OptState:
    """The optimizer's state with the learning rate's schedule at step ``number``."""
    kind = optax.ScaleByScheduleState
    moved = lambda x: kind(jnp.asarray(number, jnp.int32)) if isinstance(x, kind) else x
    return jax.tree.map(moved, opt_state, is_leaf=lambda x: isinstance(x, kind))


def about(exp: Experiment) -> Settings:
    """What must be the same at all replicas: versions, settings, what computes, and data."""
    return {**settings_of(exp.config), **fingerprint(exp), **digests(exp.data)}
