"""`outliers`: heavy tokens and channels sent apart, the rest by a codec or by a rule."""

from __future__ import annotations

from jaxtyping import Array

from jaxmp.codecs.dense import bf16
from jaxmp.codecs.heavy import Heavy, left, put_back, taken
from jaxmp.codecs.microscaling import mx
from jaxmp.codecs.spikes import spikes
from jaxmp.codecs.view import each, per_token
from jaxmp.feedback.channel import Channel, EndState, Rx, Tx
from jaxmp.wire import Codec, Ctx, Like, Payload
from jaxmp.wire.words import check_bools, check_whole, word


@word
def outliers(
    codec: Codec | Channel,
    tokens: int = 2,
    channels: int = 4,
    values: Codec = mx(8),  # noqa: B008
    scaled: bool = True,
    causal: bool = False,
) -> Codec | Channel:
    r"""Sends the heavy tokens and channels of each sample apart, the rest by ``codec``.

    .. math:: C(x)_{tc} = V(x)_{tc} \text{ for } t \in S \text{ or } c \in K,\quad
              C(x)_{tc} = 2^{e_t} C'(2^{-e} x_{\bar S \bar K})_{tc} \text{ otherwise}

    A token is a vector along the last axis: a position of a text, a pixel of an image. S has the
    ``tokens`` of a sample with the largest magnitudes, K the ``channels`` with the largest mean
    magnitude, of both at most half. They are sent by the codec V, and what lies in both as
    bfloat16. :math:`2^{e_t}` is near the RMS of what is left of a token, and takes 8 bits. So w
    bits of a value cost, in a sample of T tokens and C channels, ``w (|S| / T + |K| / C) + 8 / C``
    bits per element besides those of ``codec``.

    In a pretrained language model the first token of a sequence, the attention sink, has up to 140
    times the norm of the others, and two channels have half of what is left. No codec of few bits
    holds there without this: see the column of errors in the table of codecs.

    Over a rule, such as `klt`, it is a rule, which remembers what is left. Take ``scaled=False``
    there: a scale per token hides from `klt` what tokens have in common. A rule over this codec,
    such as ``ef21(outliers(lloyd(2)))``, remembers the whole tensor.

    The causal form codes each token by itself: its ``channels`` largest elements with their
    positions as bfloat16, the rest by ``codec``, as ``per_token(spikes(codec, channels, bf16))``
    does. So a token's message does not depend on later tokens, as generation needs.

    Args:
      codec: codec or rule of the rest.
      tokens: number of heavy tokens per sample; 0 for none.
      channels: number of heavy channels per sample; 0 for none.
      values: codec of heavy tokens and channels; the causal form takes bfloat16.
      scaled: whether what is left of each token is divided by a power of two first.
      causal: whether each token is coded by itself, without heavy tokens.

    Raises:
      TypeError: if ``codec`` or ``values`` is no such thing, or another argument is not a bool.
      ValueError: if a number is negative, or the tensor has no axis besides the samples.

    >>> import jax, jaxmp
    >>> jnp = jax.numpy
    >>> x = jax.random.normal(jax.random.key(0), (1, 64, 32)).at[0, 0].mul(1000)
    >>> ctx, like = jaxmp.Ctx(jax.random.key(1)), jaxmp.like(x)
    >>> for C in jaxmp.lloyd(4), outliers(jaxmp.lloyd(4), tokens=1, channels=0):
    ...     error = jax.jit(lambda x: C.decode(C.encode(x, ctx), like, ctx) - x)(x)[0, 1:]
    ...     print(round(float(jnp.sqrt(jnp.mean(error**2))), 1))
    43.5
    0.1

    References:
      Massive Activations in Large Language Models, arXiv 2402.17762; Efficient Streaming Language
      Models with Attention Sinks, arXiv 2309.17453; LLM.int8(): 8-bit Matrix Multiplication for
      Transformers at Scale, arXiv 2208.07339; SmoothQuant: Accurate and Efficient Post-Training
      Quantization for Large Language Models, arXiv 2211.10438.
    """
    _check(codec, tokens, channels, values)
    check_bools('outliers', scaled=scaled, causal=causal)
    if isinstance(codec, Channel):
        if causal or codec.slots or codec.state_of == 'example':
            cure = 'causal is for a codec' if causal else 'write aqsgd(outliers(...), examples)'
            raise TypeError(f'outliers cannot be over {codec}: {cure}')
        return _over_a_rule(codec, Heavy(tokens, channels, scaled, values))
    if causal:
        return per_token(spikes(codec, channels, bf16) if channels else codec)
    return _over_a_codec(codec, Heavy(tokens, channels, scaled, values))


def _check(codec: object, tokens: object, channels: object, values: object) -> None:
    if not isinstance(codec, Codec | Channel):
        raise TypeError(f'outliers codec must be a codec or rule such as lloyd(2), got {codec!r}')
    if not isinstance(values, Codec):
        raise TypeError(f'outliers values must be a codec such as mx(8), got {values!r}')
    check_whole('outliers tokens', tokens, 'a number of tokens: 0, 1, 2, ...', 0)
    check_whole('outliers channels', channels, 'a number of channels: 0, 1, 2, ...', 0)


def _over_a_codec(codec: Codec, of: Heavy) -> Codec:
    def encode(x: Array, ctx: Ctx) -> dict[str, Payload]:
        apart, rest = taken(x, of, ctx)
        return {'apart': apart, 'rest': codec.encode(rest, ctx)}

    def decode(m: dict[str, Payload], like: Like, ctx: Ctx) -> Array:
        return put_back(m['apart'], codec.decode(m['rest'], left(like), ctx), like, of, ctx)

    return Codec(
        encode, decode, samples=max(codec.samples, each(of.values).samples),
        needs=codec.needs | of.values.needs,
    )  # fmt: skip


def _over_a_rule(rule: Channel, of: Heavy) -> Channel:
    def send(x: Array, tx: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        apart, rest = taken(x, of, ctx)
        m, tx = rule.send(rest, tx, ctx)
        return {'apart': apart, 'rest': m}, tx

    def recv(m: Payload, rx: Rx, like: Like, ctx: Ctx) -> tuple[Array, Rx]:
        y, rx = rule.recv(m['rest'], rx, left(like), ctx)
        return put_back(m['apart'], y, like, of, ctx), rx

    def warm_start(x: Array, state: EndState, ctx: Ctx) -> EndState:
        # Two programs may find other heavy channels, so equal states stay as they are.
        return state if rule.shared_state else rule.warm_start(taken(x, of, ctx)[1], state, ctx)

    return rule._replace(
        codec=_over_a_codec(rule.codec, of), init=lambda like: rule.init(left(like)), send=send,
        recv=recv, warm_start=warm_start, origin=None,
    )  # fmt: skip
