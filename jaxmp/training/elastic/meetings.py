"""`Meetings`: the shared part of an elastic replica's state, and the rounds that are under way.

A replica trains alone, and after certain steps its pseudo-gradients go through the rule of `diloco`
to the others, by the switch (`member`). A thread does this, so that with a delay the
inner steps go on meanwhile. The result depends on the messages of all members only, so that the
shared parameters have the same bits at all of them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.exchange.collectives import Collectives, Grads, Params, Tree
from jaxmp.exchange.layout import State
from jaxmp.exchange.pieces import Pieces, in_pieces
from jaxmp.exchange.rounds import Plan, applied, change
from jaxmp.exchange.settled import reduced
from jaxmp.runtimes.mirrors import checksums
from jaxmp.training.elastic.member import Gather, Member, Members
from jaxmp.training.experiment import Experiment
from jaxmp.training.groups import Home, by_home, equal, homes, is_first, joined, split
from jaxmp.training.step import TrainState

Fragment = dict[str, Tree]  # the state of one: 'start', 'memory', 'flying' and 'held'
Reduced = tuple[Grads, State]  # the shared pseudo-gradient, and the rule's next state
SHARED = ('start', 'memory', 'flying')  # of a fragment's state, what is the same at all members


class Meetings:
    """The states of `diloco` of one replica, by stage and group (`jaxmp.training.groups`).

    Attributes:
      member: the place among the others.
      held: the states.
    """

    def __init__(self, exp: Experiment, create: Callable[[], TrainState]) -> None:
        """Starts without states and without a connection.

        Args:
          exp: the experiment, whose exchange is in rounds.
          create: the state before the first step of one of its replicas.
        """
        self.exp, self.groups, self._create = exp, exp.groups, create
        self.member: Member
        self.held: dict[int, list[State]] = {}
        self._thread = ThreadPoolExecutor(1, 'rounds')
        self._under_way: dict[int, Future] = {}
        self._pieces: dict[tuple[Plan, int, int], Pieces] = {}
        self._compiled: dict[tuple[Plan, int], tuple[Callable, Callable]] = {}

    # States.

    def take(self, state: TrainState) -> TrainState:
        """Takes the states of the exchange out of a train state, and forgets rounds under way."""
        self.held, self._under_way = state.exchange, {}
        self.key = np.asarray(jax.random.key_data(state.key))
        return state.replace(exchange={s: [() for _ in x] for s, x in self.held.items()})

    def whole(self, state: TrainState) -> TrainState:
        """The train state with the states of the exchange, once all rounds under way have ended."""
        self._settle_all()
        number = jnp.asarray(state.step, jnp.int32)
        put = lambda x: {**x, 'step': number} if x else x
        return state.replace(exchange={s: [put(x) for x in xs] for s, xs in self.held.items()})

    def shared(self, params: dict[int, Params]) -> dict[int, Params]:
        """The shared parameters, in the form of a replica's own ``params``."""
        plan = self._plan(0)

        def one(tree: Params, state: State) -> Params:
            parts = zip(plan.cut(tree), state['parts'], strict=True)
            whole = lambda a, x: jax.tree.unflatten(jax.tree.structure(a), x['start'])
            return plan.join([whole(*part) for part in parts], tree)

        pairs = zip(self._own(params), self._states(), strict=True)
        return self._put(params, [one(*pair) for pair in pairs])

    def digest(self) -> int:
        """A number that is equal where the shared states are."""
        return _digest(_checksums(self._leaves()))

    def to_bytes(self) -> bytes:
        """The shared states, once all rounds under way have ended."""
        self._settle_all()
        return b''.join(np.asarray(a).tobytes() for a in self._leaves())

    def load(self, content: bytes) -> None:
        """Takes the shared states of another member; the memory of the rule begins anew.

        Raises:
          ValueError: if they are of another size.
        """
        leaves = self._leaves()
        sizes = np.cumsum([0, *(a.nbytes for a in leaves)])
        if sizes[-1] != len(content):
            raise ValueError(f'shared states of {len(content)} bytes, not {sizes[-1]}')
        rows = iter(
            jnp.asarray(np.frombuffer(content[i:j], a.dtype).reshape(a.shape))
            for a, i, j in zip(leaves, sizes, sizes[1:], strict=False)
        )
        first = self._states(self._create().exchange)
        for state, anew in zip(self._states(), first, strict=True):
            for part, new in zip(state['parts'], anew['parts'], strict=True):
                shared = {name: part[name] for name in SHARED}
                form = jax.tree.structure(shared)
                part.update(form.unflatten([next(rows) for _ in range(form.num_leaves)]))
                part['held'] = new['held']

    # Rounds.

    def turn(self, state: TrainState, number: int) -> TrainState:
        """The state after the rounds that begin or end after step ``number``.

        Raises:
          BehindError: if the others go on without this replica.
        """
        plan, last = self._plan((number - 1) // self.exp.epoch_steps), 0
        for p, first in enumerate(plan.sends):
            since = number - first
            if since % plan.steps == 0:
                self._send(plan, p, state, number)
            if since >= 0 and since % plan.steps == plan.delay:
                self._settle(p)
                params = self._apply(plan, p, state.model.params)
                state = state.replace(model=state.model._replace(params=params))
                last = number - plan.delay
        if last:
            self.member.applied(number, last, self.to_bytes)
        return state

    def end(self, number: int) -> None:
        """Waits for all others after the last step; those who have just come get the state."""
        self._settle_all()
        gather = lambda members, gather: gather(b'')
        self.member.gathering(number + 1, self.digest(), gather)
        self.member.applied(number, number + 1, self.to_bytes)

    def _send(self, plan: Plan, p: int, state: TrainState, number: int) -> None:
        """Begins the round of fragment p."""
        parts = self._parts(p)
        begin, _ = self._programs(plan, p)
        changes, words, sums = begin(state.model.params, parts, self.key, number)
        memory = [part['held'] for part in parts]

        def run(members: Members, gather: Gather) -> list[Reduced]:
            args, index = (words, changes, memory), members.index(self.member.replica)
            pieces = self._reduce(plan, p, len(members), args)
            return pieces.run({index: args}, lambda rows: gather(rows[0]))[index]

        member = self.member
        round_ = lambda: jax.block_until_ready(member.gathering(number, _digest(sums), run))
        self._under_way[p] = self._thread.submit(round_)

    def _settle(self, p: int) -> None:
        """Waits for the round of fragment p, if one is under way, and takes its result."""
        if p in self._under_way:
            for part, (shared, memory) in zip(
                self._parts(p), self._under_way[p].result(), strict=True
            ):
                part.update(held=memory, flying=jax.tree.leaves(shared))
            del self._under_way[p]

    def _settle_all(self) -> None:
        for p in list(self._under_way):
            self._settle(p)

    def _apply(self, plan: Plan, p: int, params: dict[int, Params]) -> dict[int, Params]:
        """The parameters after the outer step of fragment p."""
        parts = self._parts(p)
        params, after = self._programs(plan, p)[1](params, parts)
        for part, new in zip(parts, after, strict=True):
            part.update(new)
        return params

    def check(self) -> None:
        """Traces the rounds of all replicas.

        Raises:
          ValueError: if members could not come and go with the exchange.
        """
        n, text = self.exp.replicas, self.exp.config.exchange
        same = self._shapes(n) == self._shapes(n + 1)
        for p in range(len(self._plan(0).sends)) if same else ():
            args = jax.eval_shape(lambda *a: a, *self._arguments(p))
            pieces = self._reduce(self._plan(self.exp.points.epochs), p, n, args)
            same = same and not any(jax.tree.leaves([shared for shared, _ in pieces.private]))
        if not same:
            raise ValueError(
                f'config.exchange={text!r} keeps states that depend on who was there before, and '
                'in an elastic run replicas come and go; take diloco of mean, or of all_gather or '
                'all_reduce of a codec or of ef of one'
            )

    # Parts.

    def _plan(self, epoch: int) -> Plan:
        return self.exp.exchange.phase(epoch).rounds

    def _homes(self) -> list[Home]:
        """The groups that are exchanged, each in its first home."""
        return [home for home in homes(self.groups, self.held) if is_first(home)]

    def _states(self, exchange: dict[int, list[State]] | None = None) -> list[State]:
        """The state of each of these groups, of a train state's or those that are held."""
        states = by_home(self.groups, self.held if exchange is None else exchange)
        return [states[home] for home in self._homes()]

    def _parts(self, p: int) -> list[Fragment]:
        """The states of fragment p."""
        return [state['parts'][p] for state in self._states()]

    def _leaves(self) -> list[Array]:
        """The shared states as arrays."""
        rows = [part for state in self._states() for part in state['parts']]
        return jax.tree.leaves([{name: part[name] for name in SHARED} for part in rows])

    def _own(self, params: dict[int, Params]) -> list[Params]:
        """The parameters of each state."""
        parts = split(self.groups, params)
        return [parts[home] for home in self._homes()]

    def _put(self, params: dict[int, Params], trees: list[Params]) -> dict[int, Params]:
        """Inverse of `_own`; further copies of a group are those of its first home."""
        parts = dict(zip(self._homes(), trees, strict=True))
        return equal(self.groups, joined(params, parts))

    def _programs(self, plan: Plan, p: int) -> tuple[Callable, Callable]:
        """The compiled beginning and end of a round of fragment p."""

        def begin(
            params: dict[int, Params], parts: list[Fragment], key: Array, number: int
        ) -> tuple[list[Grads], Array, Array]:
            rows = zip(self._own(params), parts, strict=True)
            changes = [change(plan.cut(trees)[p], part) for trees, part in rows]
            key = jax.random.fold_in(jax.random.wrap_key_data(key), number)
            words = jax.random.key_data(jax.random.fold_in(key, 2))  # the stream of `train_step`
            shared = [part[name] for part in parts for name in ('start', 'memory')]
            return changes, words, checksums(shared)

        def apply(
            params: dict[int, Params], parts: list[Fragment]
        ) -> tuple[dict[int, Params], list[Fragment]]:
            trees, after = self._own(params), []
            for i, part in enumerate(parts):
                cut = plan.cut(trees[i])
                if jax.tree.leaves(cut[p]):
                    cut[p], part = applied(plan, (cut[p], part))
                trees[i] = plan.join(cut, trees[i])
                after.append(part)
            return self._put(params, trees), after

        if (plan, p) not in self._compiled:
            self._compiled[plan, p] = jax.jit(begin), jax.jit(apply)
        return self._compiled[plan, p]

    def _arguments(self, p: int) -> tuple[Array, list[Grads], list[State]]:
        """Arguments of `_reduce`, of the right shapes."""
        zeros = self._create().model.params
        parts = self._parts(p)
        changes, words, _ = self._programs(self._plan(0), p)[0](zeros, parts, self.key, 0)
        return words, changes, [part['held'] for part in parts]

    def _reduce(self, plan: Plan, p: int, n: int, args: tuple) -> Pieces:
        """The exchange of the pseudo-gradients of fragment p between n members."""
        streams = [group.stream for _, group in self._homes()]  # as in `train_step`

        def reduce(
            via: Collectives, words: Array, changes: list[Grads], memory: list[State]
        ) -> list[Reduced]:
            out, run = [], jax.random.wrap_key_data(words)
            for stream, tree, state in zip(streams, changes, memory, strict=True):
                key = jax.random.fold_in(jax.random.fold_in(run, stream), p)
                some = jax.tree.leaves(tree)
                done = reduced(plan.exchange, tree, state, key, via) if some else (tree, state)
                out.append(done)
            return out

        if (plan, p, n) not in self._pieces:
            self._pieces[plan, p, n] = in_pieces(reduce, n, *args)
        return self._pieces[plan, p, n]

    def _shapes(self, n: int) -> Tree:
        """Shapes of the states of one of n replicas."""
        parts = split(self.groups, jax.eval_shape(self._create).model.params)
        init = lambda group, params: group.exchange.phase(0).init(params, n)
        states = [jax.eval_shape(functools.partial(init, h[1]), parts[h]) for h in self._homes()]
        return jax.tree.map(lambda a: (a.shape, a.dtype), states)


_checksums = jax.jit(checksums)


def _digest(sums: Grads) -> int:
    return zlib.crc32(np.asarray(sums).tobytes())
