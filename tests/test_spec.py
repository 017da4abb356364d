"""The text language: what it names, how it is spelt, and what it refuses with which reason."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp import Channel, Ctx, SpecError, canonical, codecs, exchange, parse
from jaxmp.spec import LONGEST, NAMES
from tests import laws

SPELLINGS = {
    ' top_k( 0.10,values = fp16 ) ': 'top_k(0.1, values=fp16)',
    'ef21(top_k(0.1,values=fp16,indices=bitmap))': 'ef21(top_k(0.1, values=fp16, indices=bitmap))',
    '(raw)': 'raw',
    'uniform(4,\n  rounding=stochastic)': 'uniform(4, rounding=stochastic)',
    'top_k(1e-2) # one in a hundred': 'top_k(0.01)',
}


@pytest.mark.parametrize('text', [*laws.SPECS, *laws.FLOAT32_SPECS, *SPELLINGS])
def test_round_trip(text):
    spelt = canonical(text)
    assert canonical(spelt) == spelt == SPELLINGS.get(text, spelt)
    x = jax.ShapeDtypeStruct((4, 33), 'float32')
    at, once, again = laws.context(x), parse(text), parse(spelt)
    assert isinstance(once, Channel)
    assert once.shared_state == again.shared_state
    assert jaxmp.bits(once, x, at) == jaxmp.bits(again, x, at)
    shapes = [jax.eval_shape(lambda c=c: c.init(x)) for c in (once, again)]
    assert shapes[0] == shapes[1]
    assert parse(str(once)) == once == again
    assert hash(parse(str(once))) == hash(once)
    assert (once != again) is False  # a tuple has its own


def test_what_equal_calls_made_is_equal_and_its_text_says_the_call():
    c = jaxmp.ef21(jaxmp.top_k(0.1, jaxmp.fp16, indices=jaxmp.bitmap))
    assert repr(c) == str(c) == 'ef21(top_k(0.1, values=fp16))', 'without what is the default'
    assert c == parse('ef21(top_k(0.1, values=fp16))') == parse(' ef21(top_k( 0.1,fp16,bitmap ))')
    assert parse('direct(raw)') == parse('raw') == jaxmp.direct(jaxmp.raw) != parse('fp16')
    assert str(parse('raw')) == 'raw' != str(jaxmp.warm(c)) == f'warm({c})'
    assert jaxmp.polar(0.5, search=jaxmp.scl(8)) == jaxmp.polar(0.5, 1024, jaxmp.scl(8))
    assert [str(x) for x in (jaxmp.bitmap, jaxmp.argmax, jaxmp.raw)] == ['bitmap', 'argmax', 'raw']
    unlike = ('top_k(0.1)', 'top_k(0.2)', 'ef(top_k(0.1))', 'uniform(4)', 'uniform(4, stochastic)')
    assert len({parse(t) for t in (*unlike, *unlike)}) == len(unlike)
    other = jaxmp.raw._replace(encode=lambda x, ctx: 2 * x)
    assert other != jaxmp.raw
    assert str(other) == 'Codec(<lambda>, ...)', 'another function: no longer what the word says'


def test_equal_channels_share_a_compiled_program():
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def send(channel, x):
        traced.append(channel)
        return channel.send(x, (), Ctx())[0]

    for text in ('top_k(0.5)', 'top_k(0.5, values=raw)', 'top_k(0.4)'):
        send(parse(text), jnp.ones((1, 8)))
    assert [str(c) for c in traced] == ['top_k(0.5)', 'top_k(0.4)']


def test_exchanges_are_known_by_their_text_too():
    for text in ('mean', 'momentum(all_gather(ef21(top_k(0.1))), m=0.5)', 'local_sgd(2)'):
        e = exchange.parse(text)
        assert str(e) == text
        assert exchange.parse(str(e)) == e
    assert exchange.parse('power_sgd(2)') != exchange.parse('power_sgd(3)')
    assert exchange.parse('all_gather(own)', {'own': jaxmp.raw}) == exchange.parse(
        'all_gather(raw)'
    )


def test_every_public_codec_and_rule_is_a_word():
    rules = {'direct', 'ef', 'ef21', 'ef_mixed', 'aqsgd', 'anchored', 'klt', 'outliers'}
    young = {'adaptive', 'dct', 'k_means'}
    assert set(NAMES) == rules | young | {n for n in codecs.__all__ if n != 'IndexCoding'}


FORM = 'not an expression of names, numbers and calls such as ef21'
WORDS = 'is not allowed; write names, numbers and calls such as'
REFUSED = {
    # words
    'topk(0.1)': r"unknown word 'topk' \(did you mean top_k\?\); allowed are adapt.*, uniform$",
    'top_k(0.1, values=pf16)': r"unknown word 'pf16' \(did you mean fp16\?\); allowed are ",
    'zip': "unknown word 'zip'",
    '__import__("os")': "unknown word '__import__'",
    'IndexCoding(int32, int32)': "unknown word 'IndexCoding'",
    'warm(raw)': "unknown word 'warm'",
    # arity
    'top_k()': r"top_k: missing a required argument: 'fraction'; its form is top_k\(fraction, va",
    'top_k(0.1, raw, int32, 3)': r'top_k: too many positional arguments; its form is top_k\(',
    'top_k(0.1, value=raw)': "top_k: got an unexpected keyword argument 'value'; its form",
    'top_k(0.1, fraction=0.1)': "top_k: multiple values for argument 'fraction'; its form",
    'top_k(0.1, values=raw, values=fp16)': 'top_k: an argument is given twice; its form',
    'ef21(raw, raw)': r'ef21: too many positional arguments; its form is ef21\(codec\)',
    'aqsgd(raw)': r"missing a required argument: 'examples'; its form is aqsgd\(codec, ex",
    'fp16()': 'fp16 takes no arguments; write fp16',
    'raw(3)': 'raw takes no arguments; write raw',
    'top_k': r'top_k needs its arguments: top_k\(fraction, values=raw, indices=bitmap\)',
    'ef(top_k)': r'top_k needs its arguments: top_k\(fraction',
    'ef21': r'ef21 needs its arguments: ef21\(codec\)',
    'nearest': 'nearest needs its arguments',
    # nesting
    'ef21(ef(raw))': 'ef21 takes a codec and got a feedback rule; rules do not nest',
    'ef(direct(raw))': 'ef takes a codec and got a feedback rule; rules do not nest',
    'aqsgd(ef21(raw), 9)': 'aqsgd takes a codec and got a feedback rule; rules do not nest',
    'ef_mixed(aqsgd(raw, 9))': 'ef_mixed takes a codec and got a feedback rule',
    'direct(ef(raw))': 'direct takes a codec and got a feedback rule',
    'top_k(0.1, values=ef(raw))': 'top_k values must be a codec such as fp16, got a feedback rule',
    # kinds of parts
    'top_k(0.1, values=bitmap)': 'top_k values must be a codec such as fp16, got an index coding',
    'top_k(0.1, values=3)': 'top_k values must be a codec such as fp16, got 3',
    'top_k(0.1, values=nearest)': 'top_k values must be a codec such as fp16, got nearest',
    'top_k(0.1, indices=fp16)': 'int32, packed, bitmap, block_local or elias_fano; got a codec',
    'random_k(0.1, values=int32)': 'random_k values must be a codec such as fp16, got an index cod',
    'same_support(0.1)': 'same_support values must be a codec such as fp16, got 0.1',
    'uniform(4, rounding=raw)': 'uniform rounding must be nearest or stochastic, got Codec',
    'block(4, rounding=3)': 'block rounding must be nearest or stochastic, got int',
    'uniform(raw)': 'uniform bits .* is not an integer from 1 to 8',
    'top_k(raw)': r'top_k fraction must be a number in \(0, 1\], got',
    'top_k(True)': r'top_k fraction must be a number in \(0, 1\], got True',
    'ef(3)': r'ef takes a codec such as top_k\(0.1\), got 3',
    'bitmap': 'bitmap is not a codec or feedback rule by itself',
    '3': '3 is not a codec or feedback rule by itself',
    'nearest(3, 4, 5)': 'nearest takes no arguments; write nearest',
    'uniform(4, rounding=stochastic(1, 2, 3))': 'stochastic takes no arguments; write stochastic',
    # numbers
    'top_k(10)': r'top_k fraction 10 is not in \(0, 1\]; for 10 % write top_k\(0.1\)$',
    'random_k(2.5)': r'2.5 is not in \(0, 1\]; for 2.5 % write random_k\(0.025\)$',
    'top_k(0)': r'top_k fraction 0 is not in \(0, 1\]$',
    'top_k(-0.1)': r'top_k fraction -0.1 is not in \(0, 1\]$',
    'top_k(150)': r'top_k fraction 150 is not in \(0, 1\]$',
    'top_k(1e400)': r'top_k fraction inf is not in \(0, 1\]$',
    f'top_k({"9" * 400})': r'is not in \(0, 1\]$',
    'uniform(0)': r'uniform bits 0 is not an integer from 1 to 8; for 4 bits write uniform\(4\)',
    'uniform(9)': 'uniform bits 9 is not an integer from 1 to 8',
    'uniform(2.0)': 'uniform bits 2.0 is not an integer from 1 to 8',
    'uniform(True)': 'uniform bits True is not an integer from 1 to 8',
    'max_scaled(1)': 'max_scaled bits 1 is not an integer from 2 to 8',
    'log_scale(1)': 'log_scale bits 1 is not an integer from 2 to 8',
    'log_scale(9)': 'log_scale bits 9 is not an integer from 2 to 8',
    'block(0)': 'block bits 0 is not an integer from 1 to 8',
    'block(4, size=48)': r'block size 48 is not 32, 64 or 128; write block\(4, size=64\)',
    'block(4, size=64.0)': 'block size 64.0 is not 32, 64 or 128',
    'trellis(2, states=8.0)': 'trellis states 8.0 is not one of 4, 8, 16, 32',
    'trellis(2, states=True)': 'trellis states True is not one of 4, 8, 16, 32',
    'aqsgd(raw, examples=0)': 'aqsgd examples 0 is not the number of training examples',
    'aqsgd(raw, examples=1.5)': 'aqsgd examples 1.5 is not the number of training examples',
    'aqsgd(raw, examples=True)': 'aqsgd examples True is not the number of training examples',
    'aqsgd(raw, 9, table=8.0)': 'aqsgd table 8.0 is not 32, 8, 4 or 2 bits per element',
    # what is not names, numbers and calls
    '': FORM,
    '  \n ': FORM,
    'top_k(0.1': FORM,
    'raw; raw': FORM,
    'raw\nraw': FORM,
    'x := raw': FORM,
    'import os': FORM,
    'a\0b': FORM,
    '(' * 300: FORM,
    '-' * 900 + '1': 'in ',
    'x' + '.y' * 400: 'in ',
    'raw.encode': f"'raw.encode' {WORDS}",
    'raw.encode.__globals__': WORDS,
    'codecs.raw()': WORDS,
    '().__class__': WORDS,
    'lambda: 0': WORDS,
    '"raw"': WORDS,
    'b"raw"': WORDS,
    'f"{raw}"': WORDS,
    'None': WORDS,
    '1j': WORDS,
    '[raw]': WORDS,
    'raw,': WORDS,
    '{raw}': WORDS,
    '{}': WORDS,
    'ef([raw])': WORDS,
    'top_k(*[0.1])': WORDS,
    'top_k(**{})': WORDS,
    'top_k(**raw)': 'top_k: .*; its form is',
    'top_k(0.1)(raw)': WORDS,
    'top_k(0.1 + 0.1)': WORDS,
    'raw if True else fp16': WORDS,
    '[x for x in raw]': WORDS,
    'raw[0]': WORDS,
    'raw == raw': WORDS,
    'not raw': WORDS,
    # too much
    'ef(' * 400: f'a channel text has at most {LONGEST} characters, got 1200',
    ' ' * 10_000_000 + 'raw': 'has at most',
}


@pytest.mark.parametrize('text', REFUSED, ids=lambda t: ascii(t[:40]))
def test_refused(text):
    with pytest.raises(SpecError, match=REFUSED[text]) as caught:
        parse(text)
    assert len(str(caught.value)) < 3 * LONGEST
    with pytest.raises(SpecError):
        canonical(text)


@pytest.mark.parametrize(
    'text', [None, 3, b'raw', ['raw'], jaxmp.raw], ids=lambda t: type(t).__name__
)
def test_not_a_text(text):
    with pytest.raises(
        SpecError, match=r'a channel is named by a text such as "top_k\(0.1\)", got'
    ):
        parse(text)


def test_own_words():
    def sign(scale):
        return jaxmp.Codec(
            lambda x, ctx: jnp.sign(x), lambda m, like, ctx: (scale * m).astype(like.dtype)
        )

    names = {'sign': sign, 'half': jaxmp.bf16, 'N': 9, 'k': 0.1}
    text = 'aqsgd(sign( k ),N)'
    assert canonical(text, names) == 'aqsgd(sign(k), N)'
    assert str(parse(text, names)) == 'aqsgd(sign(0.1), 9)'
    names['own'] = sign(0.5)
    for own in (text, 'ef(own)', 'own', 'top_k(0.1, values=own)', 'half'):
        channel = parse(own, names)
        again = parse(str(channel), names)
        assert channel == again, own
        assert hash(channel) == hash(again)
    assert parse('own', names) != parse('own', {'own': sign(0.5)}), 'of other functions'
    assert parse('sign(1)', names) != parse('sign(2)', names)
    like = jax.ShapeDtypeStruct((4, 5), 'float32')
    assert jax.eval_shape(lambda: parse(text, names).init(like)[0]).shape == (9, 5)
    assert parse('half', names).codec == jaxmp.bf16
    laws.check('sign(0.5)', inputs={'normal': laws.INPUTS['normal']}, names=names)
    with pytest.raises(SpecError, match="unknown word 'sign'"):
        parse(text)
    with pytest.raises(SpecError, match=r'sign: missing a required argument: .* sign\(scale\)'):
        parse('sign()', names)
    with pytest.raises(SpecError, match='N takes no arguments; write N'):
        parse('N(3)', names)


def test_own_words_may_replace_ours():
    assert parse('fp16', {'fp16': jaxmp.raw}).codec == jaxmp.raw
