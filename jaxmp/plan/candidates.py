"""The codecs that a plan chooses from, by what the probe sees of a tensor, and their channels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxmp import spec
from jaxmp.feedback import Channel
from jaxmp.plan.seen import Seen
from jaxmp.wire import Like, bits

RAW = 'raw'  # always fits
ALIKE = (  # tokens and channels of about one size; first those of the paper, which are compared
    'uniform(8)',
    'uniform(4)',
    'top_k(0.1)',
    'fp16',
    'rotate(lloyd(4))',
    'rotate(lloyd(3))',
    'rotate(lloyd(2))',
    'uniform(6)',
    'rotate(lloyd(1))',
    'top_k(0.3)',
    'top_k(0.1, values=fp16, indices=packed)',
)
APART = (  # a few heavy tokens or channels: they are sent apart, or no scale is of many elements
    'outliers(asinh(6), channels=4, causal=True)',
    'outliers(rotate(lloyd(4), 64), causal=True)',
    'nvfp4',
    'outliers(asinh(5), channels=4, causal=True)',
    'outliers(rotate(lloyd(5), 64), causal=True)',
    'outliers(asinh(7), channels=4, causal=True)',
    'per_token(asinh(8))',
    'outliers(rotate(trellis(3)))',
    'outliers(rotate(trellis(2)))',
    'outliers(asinh(8), channels=4, causal=True)',
    'bf16',
)
COMPONENTS = (  # most of the energy in few components, beside heavy tokens or channels
    'outliers(klt(3, entropy=True), channels=2, scaled=False)',
    'outliers(klt(2, entropy=True), channels=2, scaled=False)',
)


def texts_for(seen: Seen, pretrained: bool = False) -> tuple[str, ...]:
    """The candidates for a tensor, those that matter most first.

    With a heavy token or heavy channels none has one scale for the tensor, which is spoilt for all
    other elements. Only there `klt` is one: heavy elements are of trained models, whose components
    stay as they are, and those of a model that begins turn faster than it learns them.

    Args:
      seen: what the probe saw.
      pretrained: whether it is an activation of a pretrained model, whose channels differ.

    >>> texts_for(Seen(token=140.0, channel=13.0, components=0.3))[:3]
    ('raw', 'outliers(asinh(6), channels=4, causal=True)', \
'outliers(klt(3, entropy=True), channels=2, scaled=False)')
    """
    if not (pretrained or seen.has_sink or seen.has_heavy_channel):
        return RAW, *ALIKE
    return RAW, APART[0], *(COMPONENTS if seen.falls else ()), *APART[1:]


def channels(texts: Iterable[str], names: Mapping[str, Any], like: Like) -> dict[str, Channel]:
    """The channels that texts name.

    Args:
      texts: of the algebra.
      names: further words.
      like: shape and dtype of what crosses.

    Raises:
      ValueError: if a text names no channel, or one that does not stand by itself.
    """
    return {text: channel(text, names, like) for text in texts}


def channel(text: str, names: Mapping[str, Any], like: Like) -> Channel:
    """The channel that a text names; see `channels`."""
    found = spec.parse(text, names)
    if found.is_table:
        raise ValueError(
            f'--codecs: {text} keeps a state per example, which a probe cannot fill; give '
            'codecs, or rules of feedback such as ef21'
        )
    if 'spread' in found.needs:
        raise ValueError(
            f'--codecs: {text} is for activations whose gradient returns through klt, and a '
            'plan has each crossing by itself; give it without by_gradient'
        )
    try:
        bits(found, like)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'--codecs: {text} does not stand by itself at a boundary ({error}); give channels '
            'that do, as `jaxmp codecs` lists them'
        ) from None
    return found
