"""`Phase`: epochs in which other codecs stand in for the channels.

A warm-up sends the first epochs uncompressed; a run may also wean the model off its compression at
the end, or change the number of bits on the way. The feedback states stay those of the channels,
and every message primes them (`jaxmp.warm`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmp.boundary import Boundary
from jaxmp.config import Config
from jaxmp.feedback import Channel, warm
from jaxmp.spec import NAMES, complete, read
from jaxmp.wire import Codec

FORM = re.compile(r'(?P<fwd>[^@|]+)(\|(?P<bwd>[^@|]+))?@(?P<start>-?\d+)?:(?P<stop>-?\d+)?')


class Phase(NamedTuple):
    """A phase of a run.

    Attributes:
      text: of the codecs in place of the channels: one for both directions, or two.
      epochs: counted from 0.
      boundaries: with those codecs.
    """

    text: str
    epochs: range
    boundaries: tuple[Boundary, ...]


def phases_of(
    config: Config, epochs: int, boundaries: Sequence[Boundary], names: Mapping[str, object]
) -> tuple[Phase, ...]:
    """The phases of a run in ascending order; all other epochs are trained with ``boundaries``.

    Args:
      config: ``phases``: codecs, each with its epochs as a slice in Python's form, with ``;``
        between them. ``|`` is between the codecs of forward and backward, ``&`` between those of
        boundaries. A rule such as ``klt`` may have other bits in a phase.
      epochs: of the run.
      boundaries: with the channels of the configuration.
      names: words that the texts may use besides those of the algebra.

    Raises:
      ValueError: if a text is not of that form, has no epoch, or shares an epoch with another.
    """
    texts = (_phase(t, config, epochs, boundaries, names) for t in _texts(config))
    phases = sorted(texts, key=lambda p: p.epochs.start)
    for before, after in itertools.pairwise(phases):
        if before.epochs.stop > after.epochs.start:
            raise ValueError(
                f'config.phases={config.phases!r}: epoch {after.epochs.start}, counted from 0, is '
                'in two phases; give each epoch one'
            )
    return tuple(phases)


def spans(config: Config, epochs: int) -> list[range]:
    """The epochs of each text of ``config.phases``, in their order, in a run of ``epochs``.

    >>> import jaxmp.config
    >>> spans(jaxmp.config.complete({'phases': 'raw@:1; raw@-2:'}), 5)
    [range(0, 1), range(3, 5)]
    """
    return [_epochs(FORM.fullmatch(t), epochs) for t in _texts(config)]


def _texts(config: Config) -> list[str]:
    return [t.strip() for t in config.phases.split(';') if t.strip()]


def _epochs(match: re.Match[str] | None, epochs: int) -> range:
    """The epochs that a text of `FORM` names, none if it is not of that form."""
    if not match:
        return range(0)
    return range(epochs)[slice(*(int(b) if b else None for b in match.group('start', 'stop')))]


def _phase(
    text: str,
    config: Config,
    count: int,
    boundaries: Sequence[Boundary],
    names: Mapping[str, object],
) -> Phase:
    match = FORM.fullmatch(text)
    epochs = _epochs(match, count)
    if not match or not epochs:
        raise ValueError(
            f'config.phases={config.phases!r}: {text!r} is not a codec and some of '
            f'{count} epochs, such as raw@:1 (the first), lloyd(4)@3:5, raw@-2: (the last '
            'two) or lloyd(2) | lloyd(4)@:9 (forward, backward)'
        )
    ways = [w.split('&') for w in (match['fwd'], match['bwd'] or match['fwd'])]
    if not all(t.strip() for way in ways for t in way):
        raise ValueError(f'config.phases={config.phases!r}: {text!r} lacks a codec beside | or &')
    fwd, bwd = ([read(t, {**NAMES, **names}, _for_phase) for t in way] for way in ways)
    for way in (fwd, bwd):
        if len(way) not in (1, len(boundaries)):
            raise ValueError(
                f'config.phases={config.phases!r}: {text!r} has {len(way)} codecs and the model '
                f'{len(boundaries)} boundaries; give one, or one per boundary with & between them'
            )
    # The rules of fwd and bwd stay, with their states; the codecs under them change.
    cuts = tuple(
        Boundary(_in_place(b.fwd, f), _in_place(b.bwd, g))
        for b, f, g in zip(boundaries, _each(fwd, boundaries), _each(bwd, boundaries), strict=True)
    )
    told = [' & '.join(map(str, way)) for way in (fwd, bwd)]
    return Phase(' | '.join(told) if match['bwd'] else told[0], epochs, cuts)


def _for_phase(thing: object, text: str) -> Codec | Channel:
    sender = complete(thing, text)
    if isinstance(sender, Codec) or (isinstance(sender, Channel) and sender.form is not None):
        return sender
    raise TypeError(f'{text} is not a codec; a phase keeps the feedback rules of fwd and bwd')


def _each(way: list[Codec | Channel], boundaries: Sequence[Boundary]) -> list[Codec | Channel]:
    return way * len(boundaries) if len(way) == 1 else way


def _in_place(channel: Channel, thing: Codec | Channel) -> Channel:
    """What a phase sends: a codec that primes ``channel``, or a rule that goes on from it."""
    if isinstance(thing, Codec):
        return warm(channel, thing)
    if thing.form != channel.form:
        raise ValueError(
            f'config.phases: {thing} cannot go on with the states of {channel}; give a codec, or '
            'the same rule with another number of bits'
        )
    return thing
