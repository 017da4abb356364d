"""The words of numbers.txt: what committed results, tables and settings say."""

import json
import re
from functools import cache
from math import expm1, log  # noqa: F401
from statistics import mean, median  # noqa: F401

from jaxmp import plugins
from jaxmp.config import settings
from jaxmp.metrics import PERCENT  # noqa: F401
from jaxmp.models.convolution import CHANNELS  # noqa: F401
from jaxmp.plan.verdict import MARGIN as MARGIN_OF_A_STEP  # noqa: F401
from jaxmp.training.evaluation import moments as matched_on  # noqa: F401
from jaxmp.training.late import delays_of, strength_of  # noqa: F401
from study.report import answers, claims, late, lost, residuals, results
from study.report.paper import PAPER, paper_row
from tests.base import ROOT

IMAGES = 50_000  # of CIFAR-10, in training
MARGIN = 100 * PAPER['margin']['errors']
SPEED = 'bench/results/epyc_2026-11-21.md'
CODECS = ('raw', '8-bit', 'fw4-bw8', 'aqsgd2-bw2')
BESIDE = {  # rows whose messages travel beside compute
    kind: f'epyc_2026-11-{day}_network_{kind}'
    for kind, day in (('two', 25), ('two4', 24), ('four', 24), ('100m_zb_h2', 24), ('200m', 24))
}
TUNE = 'few_bits_tune'
TEXT = (
    'none',
    'top50',
    'top30',
    'top20',
    'top10',
    'top10-separate',
    'block4',
    'fw4-bw8',
    'ef21-top10',
)
BYTES = ('triples2', 'anchors2', 'lloyd4', 'block4', 'trellis2', 'block2', 'top10-fp16')


def found(path, pattern):
    """What the one group of ``pattern`` matches in a committed file."""
    [value] = {m[1] for m in re.finditer(pattern, (ROOT / path).read_text())}
    return value


def logged(pattern):
    """The numbers that ``pattern`` matches in the log."""
    return [float(v) for v in re.search(pattern, (ROOT / 'docs/LOG.md').read_text()).groups()]


def smollm2(key):
    """What was measured of SmolLM2-135M, of both formats the worse."""
    rows = json.loads((ROOT / 'bench/results/smollm2_135m.json').read_text())['rows']
    return max(row[key] for row in rows)


CODEC = 'outliers(mx(4))'


def finetuned(train):
    """A committed fine-tuning of SmolLM2-135M, and its step beside torch's."""
    return json.loads((ROOT / 'bench/results/smollm2_135m_finetune.json').read_text())[train]


# Studies.


@cache
def studies():
    return {s.name: s for s in results.load(ROOT / 'results')}


@cache
def verdicts(study):
    return claims.judge(studies()[study])


def runs(study, row):
    return studies()[study].rows[row].runs


def accuracies(study):
    """The runs that are scored by their accuracy."""
    return [
        r for row in studies()[study].rows.values() for r in row.runs if row.measure == 'accuracy'
    ]


def fewer(row, mode='on', study='few_bits_cpu'):
    """Points of accuracy that a row of few bits loses against none, of the same seeds."""
    none, own = (results.by_seed(studies()[study].rows[r], mode) for r in ('none', row))
    return mean(none[s] - v for s, v in own.items())


def paired(study, row, to, mode='on'):
    """The estimate of a row's scores less those of another, seed by seed; ``training``: losses."""
    own, other = (claims.scores_of(studies()[study].rows[r], mode) for r in (row, to))
    return residuals.estimate([own[s] - other[s] for s in own.keys() & other.keys()])


def trained(study, row, score='loss'):
    """The mean of a row's training losses, or accuracies, in the last epoch."""
    return mean(r['history']['train'][score][-1] for r in runs(study, row))


def ratio(study, row, to, mode='on'):
    """The estimate of the percent that a row's losses lie above another's, seed by seed."""
    own, other = (claims.scores_of(studies()[study].rows[r], mode) for r in (row, to))
    return residuals.estimate([100 * (own[s] / other[s] - 1) for s in own.keys() & other.keys()])


def between_bits(study, least, most):
    """How many rows of a study have as many bits per element."""
    return sum(least <= round(bits_of(study, r), 1) <= most for r in studies()[study].rows)


def longer_by_seed(row, mode='on', study='few_bits_text', to='none'):
    """Percent that a row's loss lies above that of none, seed by seed."""
    none, own = (results.by_seed(studies()[study].rows[r], m) for r, m in ((to, 'on'), (row, mode)))
    return [100 * (v / none[s] - 1) for s, v in own.items()]


def longer(*row, **how):
    """The mean of them."""
    return mean(longer_by_seed(*row, **how))


def bits_of(study, row):
    return results.wire(studies()[study].rows[row])['bits']


def again(row, what):
    """Mean accuracy of a row's seeds: off, on, or off with statistics estimated again."""
    return statistics(what, 'few_bits', row)


def statistics(what, study='converged', row='top10'):
    """The same of a study's folder."""
    paths = (ROOT / 'results' / study / 'statistics').glob(f'{row}-s*.json')
    tables = [list(json.loads(path.read_text())['test'].values()) for path in paths]
    pick = {'off': (0, 0), 'on': (0, 1), 'again': (1, 0)}[what]
    return 100 * mean(list(t[pick[0]].values())[pick[1]]['accuracy'] for t in tables)


def moments_by_seed(normaliser, what, row='top10'):
    """Accuracies of a row in results/moments: on, off, matched, or with statistics again."""
    folder = ROOT / 'results' / 'moments' / normaliser / 'statistics'
    tests = {p.stem: json.loads(p.read_text())['test'] for p in folder.glob(f'{row}-s*.json')}
    end = {'matched': ', moments matched', 'again': ', statistics again'}.get(what, '')
    scores = [test[f'{name}{end}'] for name, test in sorted(tests.items())]
    return [
        100 * s[(set(s) - {'raw'}).pop() if what == 'on' else 'raw']['accuracy'] for s in scores
    ]


def moments(normaliser, what, row='top10'):
    """The mean of them."""
    return mean(moments_by_seed(normaliser, what, row))


def closed(normaliser, row='top10'):
    """Percent of the gap from off to on that matching the moments closes."""
    on, off, matched = (moments(normaliser, what, row) for what in ('on', 'off', 'matched'))
    return 100 * (matched - off) / (on - off)


def matching(normaliser, row):
    """A line of the paper's table: seeds, on, off, matched, percent of the gap closed."""
    scores = [moments(normaliser, what, row) for what in ('on', 'off', 'matched')]
    return len(moments_by_seed(normaliser, 'on', row)), *scores, closed(normaliser, row)


def left(normaliser):
    """The estimate of what matched moments still lack to on, in points."""
    pairs = zip(*(moments_by_seed(normaliser, what) for what in ('on', 'matched')), strict=True)
    return residuals.estimate([on - matched for on, matched in pairs])


def moments_study():
    return plugins.module(ROOT / 'configs' / 'moments.py')


def moment_runs():
    """Runs of the study of moments: committed; registered."""
    paths = [*(ROOT / 'results' / 'moments').glob('*/*-s*.json')]
    study = moments_study()
    return len(paths), sum(len(study.get_study(scale)) for scale in study.NORMS)


def table_5_runs():
    """Rows of it that have a run, and seeds of the row with the fewest."""
    rows = [
        row
        for name in ('pretrained', 'pretrained_lora', 'pretrained_twice')
        for row in studies()[name].rows.values()
    ]
    return len(rows), min(len(row.runs) for row in rows)


def config(study, row):
    return settings(runs(study, row)[0]['config'])


def steps(study, row):
    return runs(study, row)[0]['steps']


def short(run):
    """A commit's first digits."""
    return run['commit'].removesuffix('-dirty')[:7]


def last(study, row, mode='on'):
    """Mean over the seeds of the last epoch's score."""
    return results.last(studies()[study].rows[row], mode).mean


def seeds(study, row, mode='on'):
    return [results.score(r, mode, 'last') for r in runs(study, row)]


def gap(study, row):
    return last(study, row) - last(study, row, 'off')


def count(verdict):
    """The paper's claims of a verdict, each by the first of the scales that ran it."""
    scales = [studies()[s] for s in ('converged', 'mnist', 'cpu')]
    judged = zip(*map(claims.judge, scales), strict=True)
    picked = [answers.judged_by([*zip(scales, row, strict=True)])[1] for row in judged]
    return sum(v.verdict == verdict for v in picked)


def few(row):
    """Percent of the test images of study few_bits_mnist that a row takes for another."""
    return 100 - last('few_bits_mnist', row)


def wrong(row, mode='on'):
    """Percent of the test images of study mnist that a row takes for another."""
    return 100 - last('mnist', row, mode)


def quantity(study, first):
    """The evidence against none that begins with ``errors of first``."""
    found = (e for v in verdicts(study) for e in v.evidence)
    return next(e for e in found if e.text.startswith(f'errors of {first} against none'))


def more(row, study='mnist'):
    """Percent more errors than none, as the report has them."""
    mode = studies()[study].rows[row].judged
    return 100 * expm1(quantity(study, f'{row} ({mode})').ours.mean)


def nats(row, mode='on'):
    return last('pretrained', f'gpt2-{row}', mode)


# Nats lost on a pretrained language model.


@cache
def pretrained():
    """The rows of the study pretrained_codecs."""
    [table] = lost.load(ROOT / 'results' / 'pretrained_codecs')
    return table.rows


def nats_lost(row):
    return pretrained()[row]['nats_lost']


SAFE = 'outliers(asinh({}), channels=4, causal=True)'
ROTATED = 'outliers(rotate(lloyd(4), 64), causal=True)'


def by_cuts(model, cuts, codec, text='wikitext'):
    """What bench/depth.py measured of a codec at so many cuts."""
    path = ROOT / 'results' / 'depth' / f'{model}-{text}-{cuts}.json'
    result = json.loads(path.read_text())
    return {**result, **result['scores'][codec]}


def kl_of(codec, *places):
    """The divergence and its standard error, of models and cuts."""
    scores = [by_cuts(model, cuts, codec) for model, cuts in places]
    return [s[k] for s in scores for k in ('kl', 'kl_error')]


PLACES = ('smollm2', 3), ('smollm2', 7), ('gemma3', 3), ('gemma3', 7)


def added(codec, model, cuts, text='wikitext'):
    """Percent of perplexity that a codec adds."""
    return by_cuts(model, cuts, codec, text)['percent']


@cache
def depth_rows():
    """Job, codec, predicted and measured of bench/depth.py."""
    depth = plugins.module(str(ROOT / 'bench' / 'depth.py'))
    return list(depth.combinations(depth.loaded(ROOT / 'results' / 'depth')))


def law(most=1e9):
    """Combinations measured below so many nats, and how many are near their prediction."""
    near = [abs(p / kl - 1) <= 0.3 for *_, p, kl in depth_rows() if kl < most]
    return len(near), sum(near)


def law_of_own():
    """Predicted over measured, of a GPT-2 trained here."""
    result = json.loads((ROOT / 'bench' / 'results' / 'depth_own.json').read_text())
    [scores] = result['scores'].values()
    return [s['predicted_kl'] / s['kl'] for c, s in scores.items() if s.get('kl') and c != 'raw']


def in_eight(row, seeds_of='raw'):
    """Percent that a row of `python -m study bench`, in eight stages, ends above no compression."""
    return longer(row, study='bench_runs', to=seeds_of)


def untrained():
    """The loss of the pretrained model before Table 5's trainings."""
    return studies()['pretrained'].untrained


def limit(bits, name='limit_three_cuts'):
    """A figure of bench/limit.py at so many bits."""
    rows = json.loads((ROOT / 'bench/results/smollm2_135m_limit.json').read_text())['limits']
    return next(r for r in rows if r['bits'] == bits)[name]


def sink_alone(row, begins='nothing'):
    """Nats lost in bench/sink_alone.py."""
    rows = json.loads((ROOT / 'bench/results/smollm2_135m_sink_alone.json').read_text())['rows']
    return next(r for r in rows if (r['begins'], r.get('row')) == (begins, row))['nats_lost']


def sinks(model, key, begins='<bos>'):
    """The largest value of bench/sinks.py in any block of a model."""
    rows = json.loads((ROOT / f'bench/results/sinks_{model}.json').read_text())['rows']
    if 'boundaries' in rows[0]:
        return max(b[key] for r in rows for b in r['boundaries'])
    return max(r[key] for r in rows if r['begins_with'] == begins)


def first_token(begins='nothing'):
    """How many times the median norm the first token of SmolLM2-135M has."""
    rows = json.loads((ROOT / 'bench/results/smollm2_135m_sink_alone.json').read_text())['rows']
    return next(
        r['first_token_over_median'] for r in rows if r['begins'] == begins and 'row' not in r
    )


def sent(row):
    """Bits per element."""
    return pretrained()[row]['bits']


def best(cuts, bits):
    """The row that is judged by a bar."""
    rows = [r for r in pretrained().values() if len(r['cuts']) == cuts and r['fwd'] != 'raw']
    return lost.best(lost.distinct(rows), bits)['name']


def plain(least, most):
    """The row without a state that loses least at one cut among those of so many bits."""
    rows = [r for r in pretrained().values() if len(r['cuts']) == 1 and not r['learned_tokens']]
    few = [r for r in rows if least <= r['bits'] <= most]
    return min(few, key=lambda r: r['nats_lost'])['name']


# The paper.


def paper(row, mode='on'):
    return paper_row(row)[mode]


def recipe(key):
    """A setting of the paper's."""
    return int(found('configs/cifar10_resnet18.py', rf'c\.(?:model\.)?{key} = (\d+)'))


def bits(row):
    """Of the gradient."""
    return int(re.findall(r'\d+', runs('cpu', row)[0]['bwd'])[0])


# Benches and commands.


def bench(file, kind, **key):
    """The rows of a bench that have these entries."""
    stem = file if '_' in file else f'epyc_2026-11-21_{file}'
    lines = (ROOT / f'bench/results/{stem}.jsonl').read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [r for r in rows if all(r.get(k) == v for k, v in {'kind': kind, **key}.items())]


def in_the_lab(file, delay):
    """Milliseconds of a step of four processes over 200 Mbit/s and a delay, raw and in two bits."""
    rows = bench(f'xeon_2026-11-28_network_late_{file}', 'step', link=f'200m+{delay}ms')
    return [
        1e3 * r['step_s'] for codec in ('raw', 'aqsgd2-bw2') for r in rows if r['codec'] == codec
    ]


def lab_losses(file, codec):
    """Training losses of that lab, step by step."""
    [row] = bench(f'xeon_2026-11-28_network_late_{file}', 'codec', codec=codec)
    return row['losses']


def lab_ends(file):
    """The last of them, raw and in few bits."""
    return [lab_losses(file, codec)[-1] for codec in ('raw', 'aqsgd2-bw2')]


def few_bits(file):
    """Bits per element of AQ-SGD over blocks of two bits in a bench of the network."""
    rows = {r['codec']: r['payload'] for r in bench(file, 'step')}
    return 32 * rows['aqsgd2-bw2'] / rows['raw']


def wide(width=64, day=24):
    """A step of ResNet-18 on images of 32 x 32."""
    return bench(f'epyc_2026-11-{day}_convolution', 'step', width=width, size=32)[0]


def step(link, codec, model='mlp'):
    """A step's row over a slow link."""
    return bench('network', 'step', model=model, codec=codec, link=link)[0]


def ms(link, codec):
    return 1e3 * step(link, codec)['step_s']


def windows(choose):
    """Of the steps without compression and without a limit, milliseconds."""
    return 1e3 * choose(step('none', 'raw')['windows'])


def gain(link, codec, model='mlp'):
    return step(link, 'raw', model)['step_s'] / step(link, codec, model)['step_s']


def worse(model, codec):
    """By how many percent a codec's loss exceeds raw's."""
    raw, own = (bench('network', 'codec', model=model, codec=c)[0] for c in ('raw', codec))
    return 100 * (own['losses'][-1] / raw['losses'][-1] - 1)


def overlapped(kind, link, codec):
    """Milliseconds of a step whose messages travel beside compute."""
    return 1e3 * bench(BESIDE[kind], 'step', link=link, codec=codec)[0]['step_s']


def overlaps(link, kind='two'):
    """The same with each codec; how many times the last is faster."""
    found = [overlapped(kind, link, c) for c in CODECS]
    return *found, found[0] / found[-1]


def four(kind, link):
    """Of four stages, by codec: milliseconds of a step, times its bound."""
    steps = []
    for codec in ('raw', 'fw4-bw8', 'aqsgd2-bw2'):
        line = rf'{re.escape(link)} \| {codec} \| (\d+ \| \d+ \| [\d.]+ \| \d+ \| \d+) \|'
        step, _, times, *_ = map(float, found(f'bench/results/{BESIDE[kind]}.md', line).split('|'))
        steps += [step, times]
    return steps


def three_seeds():
    """The same of the fastest codec, seed by seed, as the log has it."""
    text = found(
        'docs/LOG.md', r'`aqsgd\(block\(2, size=64\)\)` with `block\(2, size=64\)`: ([^;]+);'
    )
    return [float(n) for n in re.findall(r'\+([\d.]+)', text)]


def busy():
    """How many times faster that codec was beside other work, as the log has it."""
    return [
        float(n)
        for n in re.findall(r'[\d.]+\d', found('docs/LOG.md', r'beside other work: (.*) times'))
    ]


def over(text):
    """Milliseconds of a step with an exchange over 100 Mbit/s."""
    return 1e3 * bench('exchange', 'step', link='100m', text=text)[0]['step_s']


def exchanges(name):
    return runs('mnist_dataparallel', f'{name}, replicas')[0]


def exchange(name):
    """Accuracy, bytes and ratio of an exchange on MNIST."""
    sent = results.wire(studies()['mnist_dataparallel'].rows[f'{name}, replicas'])
    accuracy = exchanges(name)['test']['off']['last']['accuracy']
    return [100 * accuracy, sent['bytes'], sent['ratio']]


def rounds(name):
    """Nats per byte of a GPT-2 with four replicas, and bytes handed over in 30 steps."""
    found = runs('text_gpt2_diloco_cpu', f'{name}, replicas')
    losses = [r['test']['off']['last']['loss'] for r in found]
    return mean(losses), 30 * sum(found[0]['exchange']['handed'].values())


def beside(name, day=23):
    """Milliseconds of a step with an exchange over 100 Mbit/s and with none; of two, of four."""
    rows = bench(f'epyc_2026-11-{day}_rounds', 'step', name=name)
    return [
        1e3 * r[k] for n in (2, 4) for r in rows if r['replicas'] == n for k in ('step_s', 'none_s')
    ]


def codec(text):
    return bench('gradients', 'codec', codec=text, vector='normal')[0]


def memcpys(name):
    """What a bench says of a step on the largest tensor, in multiples of its memcpy."""
    text = (ROOT / SPEED).read_text()
    return float(re.search(rf'(?m)^{re.escape(name)} .*? ([\d.]+)(?: x .*)?$', text)[1])


def environment(*packages):
    """MB of packages in a new environment, of all if none is named."""
    path = ROOT / 'bench' / 'results' / 'environment.json'
    sizes = json.loads(path.read_text())['packages']
    return sum(sizes[p] for p in packages or sizes)


def command(name, score):
    """The last score, compression on, of a command of the README."""
    path = ROOT / 'bench' / 'results' / 'commands' / f'{name}.json'
    return json.loads(path.read_text())['test']['on']['last'][score]


def late_picture():
    return plugins.module(ROOT / 'docs' / 'late.py')


def in_time(kind, link, order, day):
    """Seconds a step, last test, loss, steps and seconds to it, how many times sooner it comes."""
    page = f'bench/results/epyc_2026-11-{day}_late_time{kind}.md'
    cells = found(page, rf'\| 200m\+{link}ms \| {order} \| (.*) \|\n')
    return [float(cell) for cell in cells.split(' | ')]


def a_step(kind, day):
    """How many times faster a step is than by the best order that waits, over 150 ms."""
    waits, late = (in_time(kind, 150, o, day)[0] for o in ('eager_1f1b', '1 late, predict'))
    return waits / late


def sooner(kind, link, order='1 late, predict', day=28):
    """How many times sooner a loss comes than by the best order that waits."""
    return in_time(kind, link, order, day)[-1]


def twice(mode):
    """Percent that AQ-SGD over two bits loses of texts that are seen twice, over none."""
    return residuals.estimate(
        longer_by_seed('twice-aqsgd-2', mode, 'pretrained_twice', 'twice-none')
    )


def late_run(study, row):
    """A committed run of the study of late gradients."""
    return runs(study, row)[0]


def late_of_seed(study, late_name, on_time, seed):
    """How much higher the loss of a late run is than on time, as a share, of one seed."""
    end = lambda name: next(
        results.score(run, 'off', 'last')
        for run in studies()[study].rows[name].runs
        if run['seed'] == seed
    )
    return end(late_name) / end(on_time) - 1


def late_row(study, delay, correction='none', compressed=False, by_stage=False):
    """What late gradients cost in a study, as the page's table has it."""
    [row] = [
        r for r in late.rows(studies()[study])
        if (r.delay, r.correction, r.compressed, r.by_stage)
        == (delay, correction, compressed, by_stage)
    ]  # fmt: skip
    return row
