"""`Trainer`: creates, trains, scores, saves and loads a state over one runtime.

Data order is a pure function of (seed, epoch), and every key one of (seed, step), so that a resumed
run repeats to the bit. On an accelerator that holds one whole replica, the steps of an epoch are
one compiled scan with the data on the device; everywhere else they are a loop over a step.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from jaxmp import data
from jaxmp.boundary import Boundary
from jaxmp.boundary.pipeline import Variables
from jaxmp.config import Config
from jaxmp.exchange.collectives import Params, Tree
from jaxmp.exchange.hlo import interface_bytes
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes import mirrors
from jaxmp.runtimes.allocator import release_freed_pages
from jaxmp.runtimes.replicated import Replicated
from jaxmp.runtimes.types import Batch, ModelState, Runtime, Step, each
from jaxmp.training import portable, replicas
from jaxmp.training.across import Across, Between, Traffic, within
from jaxmp.training.evaluate import cuts_to_score, feedback_to_score, means, model_of, sums, totals
from jaxmp.training.experiment import Experiment
from jaxmp.training.groups import exchanged
from jaxmp.training.parallel import Build
from jaxmp.training.portable import Portable, StageTree
from jaxmp.training.step import PER_REPLICA, Rules, TrainState, create, train_step
from jaxmp.training.together import together

Values = dict[str, PyTree]  # the scores of some steps, by name
Stopped = Callable[[], bool]


def never() -> bool:
    """False: no signal asks the run to stop."""
    return False


class Trainer:
    """Trains an experiment; a process has the replicas and stages that its runtime has.

    Attributes:
      exp: the experiment.
      training: the runtime with the boundaries that are configured.
      across: what a step needs over all stages.
      say: is told what a user should know of a step, in the first process.
    """

    say: Callable[[str], object] = print
    scored = 0  # number of the replica whose feedback and weights are those of the run

    def __init__(self, exp: Experiment, group: ProcessGroup, announced: int = 0) -> None:
        """Takes the devices and opens every link, which parts that compile could not do.

        Args:
          exp: the experiment, the same in all processes.
          group: the processes.
          announced: bytes of memory that a user was told this process needs at least, or 0.

        Raises:
          ValueError: as `jaxmp.training.parallel.Parallel.builder`.
        """
        self.exp, self.group, self.announced = exp, group, announced
        self._build = self.builder()
        self._runtimes: dict[tuple[tuple[Boundary, ...], bool], Any] = {}
        self._steps: dict[tuple[Any, Rules], Callable[..., tuple[TrainState, Values]]] = {}
        self.training = self.during(exp.model.boundaries)
        self.across = self._across()
        self.sent = {'steps': 0, 'bytes': 0}
        self.sums = functools.partial(sums, exp)

    def _across(self) -> Across:
        self.between = None
        if self.training.together:
            return within(self.exp.groups)
        self.between = Between(self.exp.groups, self.group, self.training.columns, self.shapes())
        return self.between.across

    def of_seed(self, config: Config) -> Trainer:
        """The same trainer, and its compiled programs, for a config that differs in its seed."""
        other = copy.copy(self)
        other.exp = self.exp._replace(config=config)
        return other

    # Runtimes.

    def builder(self) -> Build:
        """Makes runtimes over the devices of the run."""
        return self.exp.parallel.builder(self.group)

    def during(self, cuts: tuple[Boundary, ...], train: bool = True) -> Any:
        """The runtime with some boundaries between the stages, for training or for tests."""
        if (cuts, train) not in self._runtimes:
            self._runtimes[cuts, train] = self._build(model_of(self.exp, cuts), train)
        return self._runtimes[cuts, train]

    def use(self, runtime: Any) -> None:
        """Trains over ``runtime`` where the boundaries are those that are configured."""
        self._runtimes[self.exp.model.boundaries, True] = self.training = runtime

    def rules(self, epoch: int) -> Rules:
        """What a step of an epoch does with the gradients."""
        exp = self.exp
        groups = tuple(g._replace(exchange=g.exchange.phase(epoch)) for g in exp.groups)
        return Rules(groups, exp.config.optimizer.clip_norm, exp.delays)

    def shapes(self) -> dict[int, Params]:
        """Those of the parameters of all stages."""
        return {s: stage.params for s, stage in enumerate(self.training.shapes())}

    # Training.

    def create(self) -> TrainState:
        """The state before the first step, of the stages of this process."""
        self.again()  # a run before it may have ended between its steps
        exp, runtime = self.exp, self.training
        key = jax.random.key(exp.config.seed)

        first = jax.random.fold_in(key, 0)
        model = runtime.init(first, draw=exp.task.read is None)
        params = {}
        for s, drawn in model.params.items():
            params[s] = runtime.put(s, self._params(s, drawn, first))
            release_freed_pages()  # of the files' tensors
        state = create(
            Trainer.rules(self, 0), runtime, self.across, key, model._replace(params=params)
        )
        step, key = runtime.numbered(0, jax.random.key_data(key))
        return state.replace(step=step, key=key)

    def _params(self, stage: int, drawn: Params, key: Array) -> Params:
        """Those of a replica of a stage before the first step."""
        task = self.exp.task
        if task.read:
            return task.read(stage, key)['params']
        return task.start(stage, {'params': next(iter(self.training.rows(drawn).values()))}, key)[
            'params'
        ]

    def step(self, rules: Rules) -> Step:
        """A step, as a pure function ``(runtime, state, batch) -> (state, scores)``."""

        def run(runtime: Runtime, state: TrainState, batch: Batch) -> tuple[TrainState, PyTree]:
            state, means = train_step(rules, runtime, self.across, (state, batch))
            return state, each(lambda pair: pair[1], means)

        return run

    def bound(self, runtime: Any, rules: Rules) -> Callable[..., tuple[TrainState, Values]]:
        """The step over a runtime, or a scan over many; compiled once."""
        if (runtime, rules) not in self._steps:
            x, y = self.exp.data.train
            bind = runtime.bind
            if self.scans:
                bind = functools.partial(runtime.scan, arrays={'x': x, 'y': y})
            self._steps[runtime, rules] = bind(self.step(rules), PER_REPLICA)
        return self._steps[runtime, rules]

    @property
    def scans(self) -> bool:
        """Whether an epoch is one program: on an accelerator that has all of a single process."""
        whole = isinstance(self.training, Replicated) and self.group.count == 1
        return whole and jax.default_backend() != 'cpu'

    def batches(self, order: np.ndarray) -> Iterator[Batch]:
        """The batches of a step, given the examples in their order."""
        return data.batches(self.exp.data.train, self.exp.config.batch_size, order)

    def meet(self, state: TrainState, number: int) -> TrainState:
        """The state once replicas have met after step ``number``; within a step they have."""
        return state

    def epoch(
        self, number: int, state: TrainState, order: np.ndarray, stopped: Stopped = never
    ) -> Iterator[tuple[TrainState, Values, bool]]:
        """Runs steps of an epoch.

        Args:
          number: of the epoch, from 0.
          state: before.
          order: the examples of these steps, in their order.
          stopped: whether this process was asked to stop.

        Yields:
          The state, the scores of the steps since the last time, and whether to stop.
        """
        runtime, exp = self.during(self.exp.boundaries(number)), self.exp
        configured = runtime is self.training
        step, sent = self.bound(runtime, self.rules(number)), interface_bytes()
        if self.scans:
            count = len(order) // exp.config.batch_size
            rows = order[: count * exp.config.batch_size].reshape(count, -1)
            state, values = step(state, rows)
            mean = lambda a: np.asarray(a).reshape(count, -1).mean(-1)
            yield state, {k: mean(v) for k, v in values.items()}, stopped()
            return

        def steps(state: TrainState) -> Iterator[tuple[TrainState, PyTree]]:
            for n, batch in enumerate(self.batches(order), int(state.step) + 1):
                self.group.begin(n)
                state, values = step(state, batch)
                state = self.meet(state, n)
                if self.between:
                    if n % mirrors.EVERY == 0:
                        state = self.drained(state)
                    state = state.replace(model=runtime.compared(state.model, n, self.say))
                self.sent['steps'] += configured
                yield state, values

        ends = len(order) // exp.config.batch_size, exp.task.scores
        # So many steps take as long as a message there and back, for which nobody then waits.
        late = (1 + exp.config.optimizer.delay) * (self.group.count > 1)
        yield from together(self.group, steps(state), ends, stopped, self.share, late)
        self.sent['bytes'] += (interface_bytes() - sent) * configured

    def drained(self, state: TrainState) -> TrainState:
        """The state once all batches under way have gradients, as a checkpoint holds it."""
        for runtime in self._runtimes.values():
            rows, model = runtime.drain(state.model)
            if rows:
                waiting = {s: (*row, *rows[s]) for s, row in state.waiting.items()}
                state = state.replace(model=model, waiting=waiting)
        return state

    def share(self, values: PyTree) -> dict[str, float] | None:
        """This process's part of the means over the replicas; None where there is none."""
        rows, n = self.training.rows(values).values(), self.training.replicas
        means = lambda k: sum(float(row[k]) for row in rows) / n
        return {k: means(k) for k in self.exp.task.scores} if rows else None

    # Scoring.

    def averaged(self, state: TrainState) -> dict[int, tuple[Params, Tree]]:
        """Parameters and statistics of each stage, the mean over the replicas in each of them.

        Equal parameters are their own mean; statistics (BatchNorm) differ between replicas.
        """
        model, run_at = state.model, self.training.at
        if self.training.replicas == 1:
            return {s: (model.params[s], model.model_state[s]) for s in model.params}
        mean = lambda s, tree: run_at(s, replicas.mean, tree)
        return {s: (mean(s, model.params[s]), mean(s, model.model_state[s])) for s in model.params}

    def evaluate(self, state: TrainState, compressed: bool) -> dict[str, float]:
        """Mean scores on the whole test split, of the first replica's feedback states."""
        return self.scored_later(state, compressed)()

    def tested(self, state: TrainState) -> dict[str, dict[str, float]]:
        """Those with compression off and on, waited for together; of raw messages, one test's."""
        later = {mode: self.scored_later(state, mode) for mode in self.tests}
        scores = {mode: score() for mode, score in later.items()}
        return {'off': scores[False], 'on': scores.get(True, scores[False])}

    @property
    def tests(self) -> tuple[bool, ...]:
        """Whether each test of a point compresses: one is enough where forwards stay raw."""
        off, on = (cuts_to_score(self.exp, compressed) for compressed in (False, True))
        alike = all(a.fwd == b.fwd for a, b in zip(off, on, strict=True))
        return (False,) if alike else (False, True)

    def scored_later(self, state: TrainState, compressed: bool) -> Callable[[], dict[str, float]]:
        """What gives `evaluate` when it is called; until then no process waits for another."""
        exp, training = self.exp, self.training
        runtime = self.during(cuts_to_score(exp, compressed), train=False)
        feedback = feedback_to_score(exp, compressed, training.unpack(state.model.feedback))
        stages = {}
        for s, mean in self.averaged(state).items():
            tree = *mean, feedback[s]
            rows = training.rows(tree)
            if self.scored in rows:
                stages[s] = runtime.join(s, tree, {0: rows[self.scored]})
        params, statistics, feedback = ({s: t[i] for s, t in stages.items()} for i in range(3))
        start = ModelState(params, statistics, runtime.pack(feedback))
        predict = functools.partial(runtime.predict, then=self.sums)
        total = self.group.totalled(totals(exp, start, portable.key_here(state), predict))
        return lambda: means(exp, total())

    def check(self, state: TrainState) -> None:
        """Raises DriftError if replicas that must be equal differ."""
        if self.training.replicas > 1:
            delay = self.exp.config.optimizer.delay
            for s, tree in replicas.alike(self.exp.exchange, state, delay).items():
                rows = self.training.rows(self.training.at(s, replicas.gathered_checksums, tree))
                first = next(iter(self.training.rows(tree).values()))
                checksums = np.asarray(next(iter(rows.values())))
                replicas.compare(checksums, first, int(state.step), f'stage {s}')

    def weights(self, state: TrainState) -> Variables | None:
        """The variables of all stages, where this process has them."""
        variables = {
            s: self.training.rows(t).get(self.scored) for s, t in self.averaged(state).items()
        }
        if len(variables) <= self.training.last or None in variables.values():
            return None
        return tuple({'params': params, **rest} for params, rest in variables.values())  # pyright: ignore

    # Checkpoints.

    def export(self, state: TrainState) -> Portable:
        """The state as a checkpoint holds it, this process's part."""
        return portable.export(self.exp, self._stages(state)[1], state)

    def load(self, state: TrainState, saved: Portable) -> TrainState:
        """The state that all processes exported, perhaps under another runtime.

        Args:
          state: one of this runtime's.
          saved: from all processes.
        """
        like, rows = self._stages(state)
        rows = portable.load(self.exp, rows, saved)
        runtime = self.training
        of = lambda s: {r: stages[s] for r, stages in rows.items() if s in stages}
        stages = {s: runtime.join(s, tree, of(s)) for s, tree in like.items()}
        step, key = runtime.numbered(saved.step, saved.key)
        return portable.state_of(stages, runtime.pack, step, key)

    def _stages(
        self, state: TrainState
    ) -> tuple[dict[int, StageTree], dict[int, dict[int, StageTree]]]:
        """The state of each stage here, and the same by replica and stage."""
        stages = portable.stages_of(state, self.training.unpack(state.model.feedback))
        rows: dict[int, dict[int, StageTree]] = {}
        for s, tree in stages.items():
            for r, stage_tree in self.training.rows(tree).items():
                rows.setdefault(r, {})[s] = stage_tree
        return stages, rows

    # Membership: all replicas are there from the first step to the last.

    def enter(self, state: TrainState) -> TrainState:
        """The state with which this process joins others that have gone on without it."""
        return state

    def again(self) -> None:
        """Begins anew with the compiled programs: another process was lost, or a run has ended."""
        for runtime in self._runtimes.values():
            runtime.again()
        self.sent = {'steps': 0, 'bytes': 0}

    def leave(self, state: TrainState, finished: bool) -> None:
        """Told the last state, and whether the run has finished there."""

    # Bytes.

    def moved(self) -> Traffic:
        """Bytes per step, for the summary; of the first replica, and of what replicas exchange.

        Between stages that are apart, those of the messages, of the compiled collectives, and of
        the network interface.
        """
        report = {} if self.between is None else self._links(self.between)
        if self.exp.replicas > 1:
            runtime, exp = self.training, self.exp
            trees = exchanged(exp.groups, self.shapes(), runtime.together)
            report['exchange'] = replicas.traffic(exp, trees, runtime.bytes_of)
        return {'processes': self.group.count, **report} if report else {}

    def _links(self, between: Between) -> Traffic:
        if not self.sent['steps']:
            self._step_apart()
        training, steps, first = self.training, self.sent['steps'], self.training.columns.here
        compiled = np.zeros((training.last, 2))
        for link, sizes in training.collectives().items():
            if 0 in first.get(link, ()):
                compiled[link] = np.multiply(self.exp.config.parallel.num_microbatches, sizes)
        sums = self.group.total(np.stack([training.payload() / steps, compiled]))
        sizes = enumerate(zip(*sums.astype(int).tolist(), strict=True), 1)
        rows = [{'boundary': i, 'payload': a, 'collectives': b} for i, (a, b) in sizes]
        return {'moved': rows + between.traffic(), 'interface': self.sent['bytes'] // steps}

    def _step_apart(self) -> None:
        """Makes a step with the configured boundaries and forgets it, where the run made none."""
        batch = next(self.batches(np.arange(self.exp.config.batch_size)))
        self.bound(self.training, self.rules(self.exp.points.epochs))(self.create(), batch)
        self.sent['steps'] = 1
