"""`call`: one collective with codecs, and `codecs`, which sets those of a program.

A call is a `jaxmp.boundary.crossing` over two routes, of the operand and of its gradient.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxmp.boundary import FeedbackState, crossing
from jaxmp.feedback import Channel
from jaxmp.lax.ways import Axes, Key, Route, shape_of, size, varying
from jaxmp.spec import SpecError, parse

Routes = tuple[Route, Route]  # of the operand and of its gradient
Routing = Callable[..., Routes]  # of an operand's shape
Channels = tuple[Channel, Channel]  # of both directions
FIRST: Any = object()  # in place of a state: what `init` asks for
ROTATE = {'rotate', 'polar', 'polar_sign'}  # which need a key, but not another one in each step


class Codecs(NamedTuple):
    """What a program's calls send; see `codecs`."""

    fwd: str = 'raw'
    bwd: str = 'raw'
    axes: tuple[str, ...] | None = None
    least: int = 0


class How(NamedTuple):
    """What a call says itself."""

    fwd: str | Channel | None
    bwd: str | Channel | None
    state: Any
    key: Key
    theirs: bool = False  # whether it has arguments of `jax.lax` that jaxmp does not know
    enter: bool = True  # whether the operand varies along the axis before it is sent
    more: tuple[Array, ...] = ()  # integers on which the routes depend


_program = jax.make_user_context(default_value=Codecs())  # a part of the keys of JAX's caches


def codecs(
    fwd: str = 'raw', bwd: str = 'raw', axes: tuple[str, ...] | None = None, least: int = 0
) -> AbstractContextManager[Any]:
    """Sets the channels of all calls traced inside: ``with lax.codecs('nvfp4', 'mx(8)'):``.

    The channels that a call names itself win. JAX compiles a function again for other codecs.

    Args:
      fwd: channel of operands.
      bwd: channel of their gradients.
      axes: only of calls along these mesh axes; default all.
      least: only of arrays with as many elements.

    Raises:
      jaxmp.SpecError: if a text is no channel.
      ValueError: if a channel has a state, which a call must be given, draws, for which a call
        needs a key, or needs what a collective does not know.
    """
    for text in (fwd, bwd):
        channel = _known(parse(text))
        if jax.tree.leaves(channel.init(jax.ShapeDtypeStruct((2, 64), jnp.float32))):
            raise ValueError(f'{text} has a state; give it to each call, with state=lax.init(...)')
        if draws(channel):
            raise ValueError(f'{text} draws; give it to each call, with key=')
    axes = (axes,) if isinstance(axes, str) else axes
    return _program(Codecs(fwd, bwd, axes, least))


def call(x: PyTree, axis: Axes, routes: Routing, plain: Callable, how: How) -> Any:
    """A collective of ``x``: as coded, or ``plain`` where it is sent as it is.

    Args:
      x: arrays; with a state, one.
      axis: names of mesh axes.
      routes: of an operand of a shape, and of what more the call says.
      plain: that of `jax.lax`.
      how: what the call says.

    Raises:
      NameError: if there is no such axis here.
      TypeError: if a state is given with several arrays.
      ValueError: if a codec draws and there is no key, has a state and is given none or another
        call's, or needs what a collective does not know.
    """
    if how.theirs:
        return plain(x)
    size(axis)
    leaves, form = jax.tree.flatten(x)
    if len(leaves) != 1 or not hasattr(leaves[0], 'dtype'):
        if how.state is not None:
            raise TypeError(f'a state is of one array, got {len(leaves)}; call for each')
        if not leaves or any(not hasattr(a, 'dtype') for a in leaves):
            return plain(x)
        return form.unflatten([call(a, axis, routes, plain, how) for a in leaves])
    (array,) = leaves
    channels = channels_of(axis, array, how)
    if channels is None:
        return plain(x)
    x = array if how.state is FIRST else jnp.asarray(array)  # a state needs a shape alone
    y = _cross(x, axis, routes, channels, how)
    return form.unflatten([y]) if how.state is None else y


def channels_of(axis: Axes, x: Array, how: How) -> Channels | None:
    """The channels of a call, or None where the operand is sent as it is."""
    program = _program.value
    names = {axis} if isinstance(axis, str) else {*axis}
    elsewhere = program.axes is not None and not names <= {*program.axes}
    default = Codecs() if elsewhere or x.size < program.least else program
    texts = how.fwd or default.fwd, how.bwd or default.bwd
    fwd, bwd = (parse(c) if isinstance(c, str) else c for c in texts)
    for channel in (fwd, bwd):
        if not isinstance(channel, Channel):
            raise TypeError(f"{channel!r} is no channel; give a text such as 'mx(8)', or a Channel")
        _known(channel)
    if not (how.state is None or how.state is FIRST or isinstance(how.state, FeedbackState)):
        raise TypeError(f'state={type(how.state).__name__}; give what lax.init(...) returned')
    codable = x.ndim and jnp.issubdtype(x.dtype, jnp.floating)
    if how.state is None and (not codable or (str(fwd), str(bwd)) == ('raw', 'raw')):
        return None
    return fwd, bwd


def _cross(x: Array, axis: Axes, routes: Routing, channels: Channels, how: How) -> Any:
    fwd, bwd = channels
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    there, back = routes(like, *how.more)
    key = _key(channels, how)
    arrives = lambda x: there.carry(fwd, key, x, there.states(fwd, like))[0]
    result = shape_of(arrives, x)
    first = FeedbackState(there.states(fwd, like), back.states(bwd, result))
    if how.state is FIRST:
        return first
    states = first if how.state is None else how.state
    for channel, way, needs in zip(channels, FeedbackState._fields, first, strict=True):
        if how.state is None and jax.tree.leaves(needs):
            raise ValueError(f'{channel} has a state; give state=lax.init(...) of this call')
        if (came := _arrays(getattr(states, way))) != _arrays(needs):
            raise ValueError(
                f'state.{way} is {came}, and {way}={channel} of this call needs {_arrays(needs)}; '
                'give what lax.init returned for this collective, operand and codecs'
            )

    def forward(x: Array, states: FeedbackState, ctx: tuple) -> tuple:
        key, more = ctx
        return (*routes(like, *more)[0].carry(fwd, key, x, states.fwd), None)

    def backward(g: Array, state: PyTree, ctx: tuple, _: None) -> tuple:
        key, more = ctx
        later = None if key is None else jax.random.fold_in(key, 1 << 29)
        return routes(like, *more)[1].carry(bwd, later, g, state)

    x = varying(x, axis) if how.enter else x
    y, states = crossing(forward, backward, x, states, (key, how.more))
    return y if how.state is None else (y, states)


def _known(channel: Channel) -> Channel:
    """``channel``, unless it needs what a collective does not know; raises ValueError then."""
    if lacks := channel.needs - {'key'}:
        raise ValueError(
            f'{channel} needs the {", ".join(sorted(lacks))} of a batch, of which a collective '
            'knows nothing; use ef, ef21 or top_k, or send by jaxmp.boundary'
        )
    return channel


def _arrays(state: PyTree) -> str:
    """A state's form, its arrays by dtype and shape."""
    name = lambda a: f'{a.dtype}{[*a.shape]}'
    return str(jax.tree.map(name, state)).replace("'", '')


def _key(channels: Channels, how: How) -> Key:
    """The key of a call; a fixed one serves a rotation, which needs no other in each step."""
    if how.key is not None or not any('key' in c.needs for c in channels):
        return how.key
    if drawing := [str(c) for c in channels if draws(c)]:
        raise ValueError(f'{drawing[0]} draws; give key=, another one in every step and call')
    return jax.random.key(0)


class _Unrotated(ast.NodeTransformer):
    """A channel's text without its rotations."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) not in ROTATE:
            return node
        inner = node.args[0]  # of polar a rate, and no codec
        return ast.Name('raw') if isinstance(inner, ast.Constant) else inner


def draws(channel: Channel) -> bool:
    """Whether a channel needs another key in each step; a rotation may be the same in all.

    Of a word of one's own that needs a key it is not known, so that it does.

    >>> [draws(parse(text)) for text in ('ef(rotate(lloyd(4)))', 'rotate(qsgd(4))', 'mx(8)')]
    [False, True, False]
    """
    if 'key' not in channel.needs:
        return False
    try:
        rest = _Unrotated().visit(ast.parse(str(channel), mode='eval'))
        return 'key' in parse(ast.unparse(rest)).needs
    except (SyntaxError, SpecError):
        return True
