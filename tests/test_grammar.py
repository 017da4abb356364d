"""The words of the algebra as the code has them: listed, measured, and as the page shows them."""

import textwrap

import pytest

from jaxmp import codecs, exchange, grammar, spec
from jaxmp.codecs.__main__ import grammar as grammar_of
from jaxmp.codecs.__main__ import main, renew, table
from tests.base import ROOT

N = 16 * 16 * 64  # elements of each of 32 examples
K = 1639  # the largest 10 %
FACTORS = 2 * (32 * 16 * 16 + 64)  # of rank 2
BITS = {
    'raw': 32,
    'bf16': 16,
    'natural': 9,
    'one_bit': (N + 32) / N,
    'uniform': 4,  # the two ends are 64 bits of 524,288 elements
    'block': 4 + 32 / 64,
    'top_k': (32 * K + N) / N,
    'random_k': 32 * K / N,
    'same_support': 32 * K / N,
    'packed': (32 + 14) * K / N,
    'elias_fano': (32 * K + 3 * 1640 + 3712) / N,  # low bits in runs of 8, high bits in words
    'int32': (32 + 32) * K / N,
    'ef21': (32 * K + N) / N,
    'mean': 32,
    'local_sgd': 32 / 8,
    'diloco': (32 * K + N) / N / 8,
    'sgd': 32 / 30,
    'power_sgd': 32 * FACTORS / (32 * N),
    'all_gather': 1,
    'all_reduce': 32 * 0.1,
}


@pytest.fixture(scope='module')
def words():
    return {w.form.partition('(')[0]: w for w in [*grammar.ours(), *grammar.young()]}


def test_every_word_is_listed_and_measured(words):
    assert set(words) == {*spec.NAMES, *exchange.RULES}
    assert all(w.line.endswith('.') for w in words.values())
    assert [name for name, w in words.items() if w.bits is None] == ['fitted']  # of a file
    kinds = {k: [n for n, w in words.items() if w.kind == k] for k in grammar.KINDS}
    assert kinds['index'] == ['bitmap', 'block_local', 'elias_fano', 'int32', 'packed']
    assert kinds['rounding'] == ['nearest', 'stochastic']
    assert kinds['channel'] == sorted(spec.RULES)
    assert kinds['outer'] == ['nesterov', 'sgd']
    assert {*kinds['exchange'], *kinds['rule'], *kinds['outer']} == set(exchange.RULES)
    young = {name for name, thing in spec.NAMES.items() if isinstance(thing, spec.Later)}
    assert {*kinds['codec'], *kinds['search']} < {*codecs.__all__, *young, 'outliers'}


@pytest.mark.parametrize('name', BITS)
def test_bits_are_those_of_the_message(words, name):
    assert words[name].bits == pytest.approx(BITS[name], rel=3e-4)


def test_a_word_says_its_form_its_line_and_its_paper(words):
    w = words['top_k']
    assert w.form == 'top_k(fraction, values=raw, indices=bitmap)'
    assert w.example == 'top_k(0.1)'
    assert words['one_bit'].line.endswith('``C(x) = mean |x| sign(x)``, sign(0) = +1.')
    assert words['ef21'].sources == (
        'EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback, '
        'arXiv 2106.05203',
    )
    assert words['scatter_gather'].note == 'all-to-all, all-gather'
    (row,) = (r for r in table([words['one_bit']]).splitlines() if 'one_bit' in r)
    assert row.count('|') == 7, 'a bar inside code would end its cell'
    assert '[Error Feedback Fixes SignSGD](https://arxiv.org/abs/1901.09847)' in row


@pytest.mark.parametrize(
    ('codec', 'most'), [('lloyd', (0.29, 0.48, 0.59)), ('trellis', (0.16, 0.25, 0.31))]
)
def test_codecs_for_normal_data_are_near_shannons_bound(codec, most):
    """At 1, 2 and 3 bits; none is below it."""
    for i, bar in enumerate(most):
        assert 0 < grammar.above_shannon(f'{codec}({i + 1})') < bar
    rotated, plain = (grammar.above_shannon(f) for f in ('rotate(lloyd(2))', 'lloyd(2)'))
    assert abs(rotated - plain) < 0.05  # its signs are not drawn as the data are


@pytest.mark.slow
def test_the_page_has_the_tables_that_the_code_makes(words):
    """`python -m jaxmp.codecs --into PAGE ...` makes them again, one on each of four pages."""
    pages = [ROOT / 'docs' / f'{n}.md' for n in ('algebra', 'words', 'feedback', 'exchanges')]
    page = '\n'.join(path.read_text() for path in pages)
    rows = list(words.values())
    assert renew(page, rows) == page
    for kind in ('grammar', *grammar.KINDS):
        assert page.count(f'<!-- words {kind} -->') == 1
    assert f'a {grammar.TENSOR.shape} float32 tensor' in ' '.join(page.split())
    assert max(map(len, grammar_of(rows).splitlines())) <= 100


def test_a_page_is_renewed(words, tmp_path):
    page, rows = tmp_path / 'page.md', [words['nearest'], words['mean']]
    page.write_text('a <!-- words rounding -->\nold <!-- /words --> b')
    text = renew(page.read_text(), rows)
    assert text == f'a <!-- words rounding -->\n\n{table(rows[:1])}\n\n<!-- /words --> b'
    assert renew(text, rows) == text
    with pytest.raises(
        ValueError, match=r"no words 'codec'; allowed are grammar, rounding, exchange"
    ):
        renew('<!-- words codec -->\n<!-- /words -->', rows)


OWN = '''
    """Words of a user."""
    import jax.numpy as jnp
    from jaxmp import Codec, fp16, raw, top_k

    def _of(dtype):
        return Codec(lambda x, ctx: x.astype(dtype), lambda m, like, ctx: m.astype(like.dtype))

    byte = _of(jnp.int8)
    """Integers of a byte. The rest is lost.

    References:
      A Paper, arXiv 2401.00001.
    """

    def ternary(fraction: float, t: float = 0.5) -> Codec:
        """A sign or zero."""
        return top_k(fraction, fp16)

    def scaled(scale: float) -> 'Codec':
        """Times a scale."""
        return _of(jnp.int8)

    def broken(bits: int) -> Codec:
        """Refuses all."""
        raise RuntimeError('no tensor will do')

    def helper(fraction: float) -> float:
        """No word."""
        raise AssertionError('called')
'''


def test_own_words(tmp_path, monkeypatch, capsys):
    (tmp_path / 'my_words.py').write_text(textwrap.dedent(OWN))
    (tmp_path / 'no_words.py').write_text('from jaxmp import raw\n')
    monkeypatch.syspath_prepend(tmp_path)
    for ours in ('ours', 'young'):
        monkeypatch.setattr(f'jaxmp.codecs.__main__.{ours}', list)
    main(['my_words'])
    said = capsys.readouterr().out
    for part in (
        '  byte\n      bits: 8 for byte\n      Integers of a byte.\n      A Paper, arXiv',
        '  ternary(fraction, t=0.5)\n      bits: 2.601 for ternary(0.1)\n      A sign or zero.',
        '  scaled(scale)\n      bits: not measured (no example of scale)',
        '  broken(bits)\n      bits: not measured (RuntimeError: no tensor will do)',
    ):
        assert part in said
    assert 'helper' not in said
    assert 'fp16\n' not in said
    main(['my_words', '--markdown'])
    row = '| `ternary(fraction, t=0.5)` | A sign or zero. | 2.601, `ternary(0.1)` | 2.19 '
    assert f'{row}| 0.41; 0.48; 0.0013 |  |' in capsys.readouterr().out
    for name, message in (
        ('nowhere.words', "cannot import 'nowhere.words'"),
        ('no_words', 'no words'),
    ):
        with pytest.raises(SystemExit, match=message):
            main([name])
