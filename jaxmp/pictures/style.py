"""Style of all pictures: colours by family, human names, files.

A picture is written as PNG and as SVG. Both are the same to the byte whenever they are written
again, and hold a digest of the data and of the code that drew them.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmp.pictures import labels

COLOURS = 128  # of a PNG

PALETTE = (  # that of Okabe and Ito, with gray instead of yellow
    'black', '#0072B2', '#D55E00', '#009E73', '#E69F00', '#CC79A7', '#56B4E9', '#777777',
)  # fmt: skip
STYLE: Any = {
    'font.size': 9,
    'axes.titlesize': 10,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.prop_cycle': f'cycler(color={PALETTE[1:]})',
    'axes.axisbelow': True,
    'grid.alpha': 0.25,
    'legend.frameon': False,
    'figure.titlesize': 12,
    'figure.titleweight': 'bold',
    'svg.hashsalt': 'jaxmp',
}
FAMILIES: dict[str, str] = dict(
    zip(
        (
            'no compression', 'quantisation', 'sparsification', 'error feedback',
            'block quantisation', 'AQ-SGD, anchors', 'low rank', 'other',
        ),
        PALETTE,
        strict=True,
    )
)  # fmt: skip
MEMBERS = {  # the family of a codec, a feedback rule or an exchange
    **dict.fromkeys(('raw', 'mean'), 'no compression'),
    **dict.fromkeys(('uniform', 'fp16', 'bf16', 'one_bit', 'as_bool'), 'quantisation'),
    **dict.fromkeys(('natural', 'qsgd', 'log_scale', 'lloyd', 'trellis', 'klt'), 'quantisation'),
    **dict.fromkeys(('top_k', 'random_k', 'unbiased_random_k'), 'sparsification'),
    **dict.fromkeys(('ef', 'ef21', 'ef_mixed', 'dgc', 'double_squeeze'), 'error feedback'),
    'block': 'block quantisation',
    **dict.fromkeys(('aqsgd', 'anchored'), 'AQ-SGD, anchors'),
    'power_sgd': 'low rank',
}
CARRIERS = ('all_gather', 'all_reduce', 'momentum')  # their first argument tells the family
TERMS = {  # a function of the grammar in words; {} is its first argument
    'raw': 'no compression',
    'mean': 'no compression',
    'fp16': 'float16',
    'bf16': 'bfloat16',
    'one_bit': 'one bit',
    'as_bool': 'booleans',
    'natural': 'natural compression',
    'same_support': 'same indices',
    'uniform': '{}-bit',
    'block': '{}-bit blocks',
    'log_scale': '{}-bit logarithmic',
    'lloyd': '{}-bit Lloyd-Max',
    'k_means': '{}-bit k-means',
    'trellis': '{}-bit trellis',
    'klt': '{}-bit components',
    'rotate': 'rotated {}',
    'dct': 'DCT of {}',
    'qsgd': 'QSGD with {} levels',
    'ef': 'EF over {}',
    'ef21': 'EF21 over {}',
    'ef_mixed': 'EF-mixed over {}',
    'aqsgd': 'AQ-SGD over {}',
    'anchored': 'anchors over {}',
    'double_squeeze': 'DoubleSqueeze over {}',
    'power_sgd': 'PowerSGD of rank {}',
    'local_sgd': 'local SGD of {} steps',
    'diloco': 'DiLoCo of {} steps',
    'demo': 'DeMo of Top{}',
    'frozen_adam': '1-bit Adam over {}',
    'top_k': 'Top{}',
    'random_k': 'Random{}',
    'unbiased_random_k': 'unbiased Random{}',
    'dgc': 'DGC over Top{}',
}
SHARES = ('top_k', 'random_k', 'unbiased_random_k', 'dgc', 'demo')  # the first argument is a share
TELLING = {  # arguments shown
    'accumulate': 'accumulated', 'values': '{} values', 'indices': '{}', 'pairs': 'of pairs',
    'triples': 'of triples',
}  # fmt: skip


def human(fwd: str, bwd: str, warmup: int = 0) -> str:
    """The name of a pair of channels in words.

    Args:
      fwd: text of the forward channel.
      bwd: text of the backward channel.
      warmup: epochs before the compression begins.

    >>> human('uniform(4)', 'uniform(8)'), human('top_k(0.1)', 'top_k(0.1)')
    ('4-bit activations, 8-bit gradients', 'Top10 %')
    >>> human('aqsgd(top_k(0.3), examples=examples)', 'top_k(0.3)', warmup=1)
    'AQ-SGD over Top30 %, warm-up 1'
    >>> human('ef_mixed(top_k(0.1), accumulate=True)', 'ef_mixed(top_k(0.1), accumulate=True)')
    'EF-mixed over Top10 %, accumulated'
    >>> human('anchored(raw, 9, pairs=9, triples=9)', 'anchored(raw, 9, pairs=9, target=True)')
    'anchors over no compression, of pairs, of triples'
    >>> human('uniform(4);uniform(8)', 'uniform(8);uniform(8)')
    '4-bit, by boundary'
    """
    there, back = (said(parsed(text.split(';')[0])) for text in (fwd, bwd))
    if ';' in fwd + bwd:  # a channel for each boundary: the first one is named
        name = f'{there}, by boundary'
    elif 'same_support' in bwd:
        name = f'{there}, shared indices'
    elif there in (back, f'AQ-SGD over {back}', f'{back}, of triples'):
        name = f'{there} both ways' if there.endswith('-bit') else there
    else:
        name = f'{there} activations, {back} gradients'
    return f'{name}, warm-up {warmup}' if warmup else name


def apart(names: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Names in words; those that several have are followed by their texts.

    >>> apart(['4-bit', '4-bit', '8-bit'], ['block(4)', 'block(4, size=32)', 'block(8)'])
    ['4-bit: block(4)', '4-bit: block(4, size=32)', '8-bit']
    """
    return [f'{n}: {t}' if names.count(n) > 1 else n for n, t in zip(names, texts, strict=True)]


def exchange(text: str) -> str:
    """The name of an exchange of gradients in words.

    >>> exchange('momentum(all_gather(ef21(top_k(0.1))), 0.5)'), exchange('mean')
    ('EF21 over Top10 %, momentum 0.5', 'no compression')
    """
    return said(parsed(text))


def parsed(text: str) -> ast.expr:
    """An expression of the grammar; a text that is none, such as an import path, is one name.

    >>> human('own.py:codec(3)', 'raw')
    'own.py:codec(3) activations, no compression gradients'
    """
    try:
        return ast.parse(text, mode='eval').body
    except SyntaxError:
        return ast.Name(text)


def said(node: ast.expr) -> str:
    """An expression of the grammar in words; what has no word is shown as it is."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name, first = ast.unparse(call.func), call.args[0] if call.args else None
    if name in CARRIERS and first is not None:
        return ', '.join([said(first), *(f'{name} {ast.unparse(a)}' for a in call.args[1:])])
    if name not in TERMS or (first is None) == ('{}' in TERMS[name]):
        return ast.unparse(node)
    if name in SHARES and isinstance(first, ast.Constant) and isinstance(first.value, float):
        inner = f'{100 * first.value:g} %'
    else:
        inner = said(first) if first is not None else ''
    told = [TELLING[k.arg].format(said(k.value)) for k in call.keywords if k.arg in TELLING]
    return ', '.join([TERMS[name].format(inner), *told])


def family(text: str) -> str:
    """The family of a channel or an exchange, which determines its colour.

    >>> family('momentum(all_gather(ef21(top_k(0.1))), 0.5)'), family('local_sgd(8)')
    ('error feedback', 'other')
    """
    node = parsed(text.split(';')[0])
    carriers = (*CARRIERS, 'scatter_gather', 'rotate')
    while isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in carriers:
        node = node.args[0]
    return MEMBERS.get(ast.unparse(node.func if isinstance(node, ast.Call) else node), 'other')


def figure(width: float, height: float) -> Any:
    """An empty figure of a size in inches; it is to be painted within `style`."""
    from matplotlib.figure import Figure  # pyplot would need global state and a display

    return Figure(figsize=(width, height), layout='constrained')


def style() -> Any:
    """The context in which pictures are painted."""
    import matplotlib as mpl

    return mpl.rc_context(STYLE)


def logarithmic(axes: Any) -> None:
    """Sets a logarithmic y axis with plain numbers as labels."""
    from matplotlib.ticker import LogFormatter

    axes.set_yscale('log')
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def caption(figure: Any, text: str) -> None:
    """Writes what error bars, marks and numbers of seeds mean below the panels."""
    figure.supxlabel(text, fontsize=8, color='dimgray')


def digest(data: Any, *code: str | Path) -> str:
    """A digest of the data of a picture, and of the statements of the files that draw it.

    Imports do not count, so that a file may move. Numbers count to nine digits: the last ones
    depend on the processor.
    """
    files = b''.join(map(statements, (__file__, labels.__file__, *code)))
    data = json.loads(json.dumps(data), parse_float=lambda s: float(f'{float(s):.9g}'))
    return hashlib.sha256(files + json.dumps(data).encode()).hexdigest()[:16]


def statements(file: str | Path) -> bytes:
    """The statements of a Python file but its imports, without comments."""
    tree = ast.parse(Path(file).read_text())
    tree.body = [n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom)]
    return ast.unparse(tree).encode()


def holds(path: Path, mark: str) -> bool:
    """True if the PNG at ``path`` and the SVG beside it hold the digest ``mark``."""
    files = [path.with_suffix(end) for end in ('.png', '.svg')]
    return all(f.exists() and mark.encode() in f.read_bytes() for f in files)


def save(figure: Any, path: Path, mark: str = '') -> None:
    """Writes a figure as a PNG and as an SVG beside it, both with the digest ``mark``."""
    for end in ('png', 'svg'):
        write(figure, path.with_suffix(f'.{end}'), end, mark)


def write(figure: Any, path: Path, end: str, mark: str = '') -> None:
    """Writes one file, the same to the byte each time; ``end`` is ``'png'`` or ``'svg'``.

    A PNG has `COLOURS`, so that it takes a third of the bytes.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn = io.BytesIO()
    told = {'svg': {'Date': None, 'Creator': None, 'Source': mark}}.get(end)
    with style():
        figure.savefig(drawn, format=end, dpi=130, metadata=told)
    if end == 'svg':
        path.write_bytes(drawn.getvalue())
        return
    data = PngInfo()
    data.add_text('Data', mark)
    few = Image.open(drawn).convert('RGB').quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, end, optimize=True, pnginfo=data)
