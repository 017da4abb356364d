"""`stage`: an `nnx.Module` as a pipeline stage, by the interface that Linen modules have.

A stage is static and its variables are an argument, so that runtimes can compile it, place it and
checkpoint it. An nnx module holds its variables itself. Therefore a stage keeps how the module is
made; every application makes it anew inside the caller's trace, replaces its variables, and reads
them afterwards. What the initializers compute there is used by nothing, and JAX removes it before
it lowers the program.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.traverse_util
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from jaxmp.nnx.crossing import Crossing

Path = tuple[str, ...]
Variables = dict[str, PyTree]  # by collection: `params`, `state`
Rngs = Mapping[str, Array]  # random keys by name: `params`, `dropout`


@dataclass(frozen=True)
class ModuleStage:
    """An nnx module as a pipeline stage; see `stage`.

    Attributes:
      make: class of the module, or a function.
      args: its positional arguments.
      kwargs: its keyword arguments but ``rngs``, as sorted items.
    """

    make: Callable[..., nnx.Module]
    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...]

    @property
    def name(self) -> str:
        """Name of the class or function, as errors have it."""
        return getattr(self.make, '__name__', repr(self.make))

    def init(self, rngs: Rngs, x: PyTree = None, **kwargs: object) -> Variables:
        """The variables of a new module; ``rngs['params']`` is the key of its `nnx.Rngs`."""
        del x, kwargs  # nnx modules know their shapes
        return self.variables(self._new(rngs['params']))

    def init_with_output(self, rngs: Rngs, x: Array, **kwargs: Any) -> tuple[Array, Variables]:
        """The output for ``x``, and the variables as `init` makes them."""
        variables = self.init(rngs)
        return self.apply(variables, x, rngs=rngs, **kwargs), variables

    def apply(
        self,
        variables: Variables,
        x: Array,
        *,
        mutable: Sequence[str] | Literal[False] = False,
        rngs: Rngs | None = None,
        **kwargs: object,
    ) -> PyTree:
        """The output for ``x``; with ``mutable`` also the collections that it names.

        Args:
          variables: from `init`.
          x: input, axis 0 the sample.
          mutable: names of collections to return, or False.
          rngs: ``rngs['dropout']`` is the key of all random streams of the module.
          **kwargs: passed to ``__call__``; ``train`` becomes ``module.train()`` or
            ``module.eval()`` if ``__call__`` has no such parameter.

        Raises:
          ValueError: if the module draws random numbers and there is no key.
        """
        module, key = self.module(variables), (rngs or {}).get('dropout')
        paths, counts = list(_held(module)), _seed(module, key)
        if 'train' in kwargs and 'train' not in _parameters(type(module)):
            (module.train if kwargs.pop('train') else module.eval)()
        y = module(x, **kwargs)
        if key is None and any(v.get_raw_value() is not count for v, count in counts):
            raise ValueError(
                f'{self.name} draws random numbers and got no key; pass '
                'ctx=jaxmp.Ctx(key), or train=False'
            )
        if mutable is False:
            return y
        after = _held(module)
        changed = _nested({path: after[path] for path in paths})
        return y, {name: changed[name] for name in mutable}

    def module(self, variables: Variables) -> nnx.Module:
        """A new module that holds ``variables``, for example those of a trained stage.

        Raises:
          ValueError: if one is missing.
        """
        module = self._new(jax.random.key(0))
        for path, variable in _held(module).items():
            try:
                variable.set_raw_value(functools.reduce(operator.getitem, path, variables))
            except KeyError:
                raise ValueError(
                    f'{self.name} has a variable {"/".join(path)}, which the given variables have '
                    'not; give those of init, or of a module by stage.variables(module)'
                ) from None
        return module

    def variables(self, module: nnx.Module) -> Variables:
        """The variables of a module of this stage, for example of a trained one.

        Returns:
          ``{'params': ..., 'state': ...}``, each a nested dict by the names of attributes:
          `nnx.Param`, and all other variables but random streams (none: no ``'state'``).
        """
        return _nested(_held(module))

    def _new(self, key: Array) -> nnx.Module:
        module = self.make(*self.args, **dict(self.kwargs), rngs=nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f'stage takes what makes an nnx.Module, and {self.name} made an object '
                f'of type {type(module).__name__}'
            )
        if any(isinstance(node, Crossing) for _, node in nnx.iter_graph(module)):
            raise TypeError(
                f'{self.name} holds a jaxmp.nnx.Crossing, whose feedback states are not '
                'those of a pipeline; cut the module there into two stages'
            )
        return module


def _held(module: nnx.Module) -> dict[Path, nnx.Variable]:
    """Variables by collection and names of attributes."""
    variables = {}
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState):
            collection = 'params' if isinstance(node, nnx.Param) else 'state'
            variables[collection, *map(str, path)] = node
    return variables


def _nested(variables: dict[Path, nnx.Variable]) -> Variables:
    values = {path: variable.get_raw_value() for path, variable in variables.items()}
    return {'params': {}, **flax.traverse_util.unflatten_dict(values)}


def _seed(module: nnx.Module, key: Array | None) -> list[tuple[nnx.Variable, Array]]:
    """Gives every random stream a key of its own and count 0; returns the counts."""
    key, counts = jax.random.key(0) if key is None else key, []
    streams = (node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.RngStream))
    for number, stream in enumerate(streams):
        stream_key, shape = jax.random.fold_in(key, number), stream.key.get_raw_value().shape
        stream.key.set_raw_value(jax.random.split(stream_key, shape) if shape else stream_key)
        count = jnp.zeros(shape, jnp.uint32)
        stream.count.set_raw_value(count)
        counts.append((stream.count, count))
    return counts


def _parameters(module: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.__call__).parameters


def stage(make: Callable[..., nnx.Module], /, *args: Hashable, **kwargs: Hashable) -> ModuleStage:
    """A pipeline stage whose module is ``make(*args, **kwargs, rngs=nnx.Rngs(key))``.

    `jaxmp.pipeline` and every runtime take it where they take a Linen module. Stages of equal
    ``make`` and arguments are equal, and share compiled programs. Only the variables of the module
    are state; bare arrays that it holds are constants, made again from a fixed key.

    Args:
      make: class of the module; or a function of the arguments and of ``rngs``.
      *args: positional arguments, hashable.
      **kwargs: keyword arguments, hashable.

    Raises:
      TypeError: if ``make`` is a module and not what makes one, or an argument is not hashable.

    >>> import jax.numpy as jnp, jaxmp
    >>> front, back = stage(nnx.Linear, 8, 4), stage(nnx.Linear, 4, 2)
    >>> pipe = jaxmp.pipeline([front, back], jaxmp.parse('uniform(4)'), jaxmp.parse('uniform(8)'))
    >>> variables, feedback = pipe.init(jax.random.key(0), jnp.ones((3, 8)))
    >>> pipe.apply(variables, feedback, jnp.ones((3, 8)))[0].shape
    (3, 2)
    >>> back == stage(nnx.Linear, 4, 2), jax.tree.map(jnp.shape, variables[1])
    (True, {'params': {'bias': (2,), 'kernel': (4, 2)}})
    """
    if isinstance(make, nnx.Module) or not callable(make):
        raise TypeError(
            f'stage takes a class or function that makes an nnx.Module, got an object of type '
            f'{type(make).__name__}; write stage({type(make).__name__}, ...) with its arguments'
        )
    module_stage = ModuleStage(make, args, tuple(sorted(kwargs.items())))
    try:
        hash(module_stage)
    except TypeError as error:
        raise TypeError(
            f'stage({module_stage.name}, ...) takes hashable arguments, since compiled programs '
            f'are known by them ({error}); give tuples for lists, and make arrays inside the '
            'module'
        ) from error
    return module_stage
