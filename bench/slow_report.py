"""Rows of `slow_network.py` as a table and a picture: python bench/slow_report.py rows.jsonl

The picture: step time by link and codec, and below it whether compression pays: the speed-up over
raw float32 against the link's rate, points measured, lines the model in `slow_network.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import slow_plan

from jaxmp.pictures import style
from jaxmp.runtimes.schedules import named

ETHERNET, TCP = 14, 52  # bytes of headers outside and inside of a packet
BARS = {'100m': 7.0, '1g': 2.5}
LOSS, COST, BYTES = 0.01, 0.25, 0.05

Row = dict[str, Any]


class Results:
    """Rows by what they are about."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.runs = [r for r in rows if r['kind'] == 'run']
        self.links = {r['link']: r for r in rows if r['kind'] == 'link'}
        self.compute = {r['model']: r['compute_s'] for r in rows if r['kind'] == 'compute'}
        self.codec = {(r['model'], r['codec']): r for r in rows if r['kind'] == 'codec'}
        steps = [r for r in rows if r['kind'] == 'step']
        self.steps = {(r['model'], r['codec'], r['link']): r for r in steps}
        self.models = list(dict.fromkeys(m for m, _ in self.codec))
        self.notes = [r['text'] for r in rows if r['kind'] == 'note']

    def codecs(self, model: str) -> list[str]:
        """Codecs measured with this model."""
        return [c for m, c in self.codec if m == model]

    def payload(self, model: str, codec: str) -> int:
        """Bytes of a step's messages."""
        return next(r['payload'] for k, r in self.steps.items() if k[:2] == (model, codec))

    def model_seconds(self, model: str, codec: str, rate: Any, delay: float = 0) -> Any:
        """The simple model of a step; rate in bits a second, 0 for no limit."""
        own = self.compute[model] + self.codec[model, codec]['codec_s']
        hops = 2 * (self.runs[0]['stages'] - 1)
        mtu = self.runs[0]['mtu']
        bits = 8 * self.payload(model, codec) * (mtu + ETHERNET) / (mtu - TCP)
        return own + hops * delay + (bits / rate if np.any(rate) else 0)

    def head(self, rate: float) -> float:
        """Seconds that a byte of payload occupies a link, headers included; 0 for no limit."""
        mtu = self.runs[0]['mtu']
        return 8 * (mtu + ETHERNET) / (mtu - TCP) / rate if rate else 0.0

    def wire(self, model: str, codec: str, link: str) -> float:
        """Seconds for which the bytes of a step occupy the busiest direction of a link."""
        ways = self.steps[model, codec, link]['moved'].values()
        return self.head(self.links[link]['nominal'][0]) * max(map(max, ways))

    def bound(self, model: str, codec: str, link: str) -> float:
        """See `slow_network.py`; of a step whose stages compute and send at the same time."""
        run, row, (rate, delay) = (
            self.runs[0],
            self.codec[model, codec],
            self.links[link]['nominal'],
        )
        stages, m = run['stages'], run.get('microbatches', 1)
        head = self.head(rate)
        ways = list(self.steps[model, codec, link]['moved'].values())
        busy = row['coded_s'] / stages, row.get('coded_cpu_s', 0.0) / run.get('cores', stages)
        busiest = max(*busy, self.wire(model, codec, link))
        if run.get('delay'):
            return busiest
        once = row['coded_s'] / m + sum(2 * delay + head * sum(w) / m for w in ways)
        return busiest * (m - 1) / m + once

    def planned(self, model: str, codec: str, link: str) -> float | None:
        """The step of `slow_plan.py`, where the row has the CPU-seconds of its processes."""
        run, row, (rate, delay) = (
            self.runs[0],
            self.steps[model, codec, link],
            self.links[link]['nominal'],
        )
        if 'cpu_s' not in row or run.get('delay'):
            return None
        m, head = run['microbatches'], self.head(rate)
        wires = {}
        for boundary, (forward, backward) in row['moved'].items():
            s = int(boundary)
            wires |= {(s, s + 1): head * forward / m, (s + 1, s): head * backward / m}
        made = named(run['schedule'])
        assert made is not None
        return slow_plan.step(made(run['stages'], m), row['cpu_s'], run['cores'], wires, delay)

    def gain(self, model: str, codec: str, link: str) -> float | None:
        """Raw step time over this one's."""
        pair = [self.steps.get((model, c, link)) for c in ('raw', codec)]
        return pair[0]['step_s'] / pair[1]['step_s'] if pair[0] and pair[1] else None

    def steady(self, model: str, codec: str, link: str) -> bool:
        """Whether this and raw were measured by windows that agree."""
        return all(self.steps[model, c, link]['steady'] for c in ('raw', codec))

    def worse(self, model: str, codec: str) -> float | None:
        """By how much its loss at the last step exceeds raw's, as a share."""
        ends = [self.codec[model, c]['losses'][-1] for c in ('raw', codec)]
        return ends[1] / ends[0] - 1 if None not in ends else None


def markdown(found: Results) -> Iterator[str]:
    """The page, line by line."""
    run = found.runs[0]
    commits = ', '.join(dict.fromkeys(str(r['commit']) for r in found.runs))
    yield from ('# Training over a slow network', '')
    yield f'{run["hardware"]}, jax {run["versions"]["jax"]}, commit {commits};'
    m = run.get('microbatches', 1)
    many = 'one micro-batch' if m == 1 else f'{m} micro-batches under {run["schedule"]}'
    many += f', gradients {late} steps late' if (late := run.get('delay')) else ''
    yield f'{run["stages"]} stages in as many processes and network namespaces, {many},'
    yield f'packets of {run["mtu"]} bytes, windows of {run["steps"]} steps. Definitions are in'
    yield '`bench/slow_network.py`, networks and tasks in `bench/slow_models.py`, links in'
    yield '`bench/emulated_network.py`. Step times are wall times: other work of the machine counts'
    yield f'(load average at the start: {load(found.runs)}).'
    yield from ('', *found.notes)
    yield from ('', *(f'`{r["command"]}`' for r in found.runs[:1]), '')
    yield from (
        '## Links',
        '',
        '| link | nominal Mbit/s | plain TCP Mbit/s | round trip ms |',
    )
    yield '|---|--:|--:|--:|'
    for link, r in found.links.items():
        nominal = f'{r["nominal"][0] / 1e6:.0f}' if r['nominal'][0] else 'none'
        yield f'| {link} | {nominal} | {r["tcp_bits"] / 1e6:.1f} | {r["round_trip_ms"]:.2f} |'
    for model in found.models:
        yield from section(found, model)
    yield from ('', '## Bars', '', *bars(found))


def load(runs: Sequence[Row]) -> str:
    """How busy the machine was when each run began."""
    known = [f'{r["load"]:.1f}' for r in runs if 'load' in r]
    return ', '.join(known) if known else 'not recorded'


def section(found: Results, model: str) -> Iterator[str]:
    """The tables of one model."""
    yield from ('', f'## {model}: {1e3 * found.compute[model]:.1f} ms compute', '')
    yield '| codec | forward | backward | KB a step | ratio | codec ms | alone | loss | off raw |'
    yield '|---|---|---|--:|--:|--:|--:|--:|--:|'
    for codec in found.codecs(model):
        r, size = found.codec[model, codec], found.payload(model, codec)
        yield (
            f'| {codec} | `{r["fwd"]}` | `{r["bwd"]}` | {size / 1e3:.0f} '
            f'| {found.payload(model, "raw") / size:.1f} '
            f'| {1e3 * r["codec_s"]:.1f} | {1e3 * r["alone_s"]:.1f} '
            f'| {_or(r["losses"][-1], ".4f")} | {_or(found.worse(model, codec), "+.2%")} |'
        )
    yield from ('', '| link | codec | step ms | faster than raw | model | wire ms | interface |')
    yield '|---|---|--:|--:|--:|--:|--:|'
    for (m, codec, link), r in sorted(found.steps.items(), key=lambda i: _order(found, i[0])):
        if m == model:
            yield _line(found, model, codec, link, r)
    if found.runs[0].get('microbatches', 1) > 1:
        yield from _bounds(found, model)
    yield ''
    yield '*model*: what the simple model says the speed-up is. *interface*: its bytes / payload.'
    yield '\\* no three windows within 5 %, here or of raw.'


def _bounds(found: Results, model: str) -> Iterator[str]:
    """Each step beside its bound, and beside the work of the processes where it was counted."""
    rows = [(k, r) for k, r in found.steps.items() if k[0] == model]
    counted = all('cpu_s' in r for _, r in rows)
    watched = all('machine_cpu_s' in r for _, r in rows)
    cores = min(found.runs[0].get('cores', 1), found.runs[0]['stages'])
    titles = (
        'link',
        'codec',
        'step ms',
        'bound ms',
        'step / bound',
        *('busy ms', 'plan ms') * counted,
        *('machine ms', 'step / limit') * watched,
    )
    yield from ('', f'| {" | ".join(titles)} |', '|---|---|' + '--:|' * (len(titles) - 2))
    for (_, codec, link), r in rows:
        own, least = r['step_s'], found.bound(model, codec, link)
        line = f'| {link} | {codec} | {1e3 * own:.0f} | {1e3 * least:.0f} | {own / least:.2f} |'
        if counted:
            planned = found.planned(model, codec, link)
            plan = '-' if planned is None else f'{1e3 * planned:.0f}'
            line += f' {1e3 * r["cpu_s"] / cores:.0f} | {plan} |'
        if watched:
            machine = r['machine_cpu_s'] / found.runs[0]['cores']
            limit = max(machine, found.wire(model, codec, link))
            line += f' {1e3 * machine:.0f} | {own / limit:.2f} |'
        yield line


def _order(found: Results, key: tuple[str, str, str]) -> tuple[int, int]:
    return list(found.links).index(key[2]), found.codecs(key[0]).index(key[1])


def _line(found: Results, model: str, codec: str, link: str, r: Row) -> str:
    wire = r['step_s'] - found.compute[model] - found.codec[model, codec]['codec_s']
    star, nominal = '' if r['steady'] else r'\*', found.links[link]['nominal']
    said = [found.model_seconds(model, c, *nominal) for c in ('raw', codec)]
    gain = _or(found.gain(model, codec, link), '.2f')
    unsure = '' if gain == 'n/a' or found.steady(model, codec, link) else r'\*'
    return (
        f'| {link} | {codec} | {1e3 * r["step_s"]:.1f}{star} '
        f'| {gain}{unsure} | {said[0] / said[1]:.2f} '
        f'| {1e3 * wire:.1f} | {r["interface"] / r["payload"]:.3f} |'
    )


def _or(value: float | None, form: str) -> str:
    return 'n/a' if value is None else format(value, form)


def bars(found: Results) -> Iterator[str]:
    """Whether the bars of the project are met."""
    for model in found.models:
        for link, bar in BARS.items():
            if gains := good(found, model, link):
                best = max(gains, key=lambda c: gains[c])
                yield _verdict(
                    gains[best] >= bar,
                    found.steady(model, best, link),
                    f'{model}, {link}: {best} is {gains[best]:.2f} times as fast as raw with a '
                    f'loss {found.worse(model, best):+.2%}; bar {bar} within {LOSS:.0%}',
                )
        for codec in found.codecs(model):
            if codec != 'raw' and (g := found.gain(model, codec, 'none')):
                yield _verdict(
                    1 / g <= 1 + COST,
                    found.steady(model, codec, 'none'),
                    f'{model}, none: {codec} changes a step by {1 / g - 1:+.1%}; bar +{COST:.0%}',
                )
    large = [
        (abs(r['interface'] / r['payload'] - 1), k)
        for k, r in found.steps.items()
        if min(min(sizes) for sizes in r['moved'].values()) > 1e6
    ]
    if large:
        worst, key = max(large)
        text = f'interface bytes of messages over 1 MB within {BYTES:.0%} of payload: at most'
        yield _verdict(worst <= BYTES, True, f'{text} {worst:.2%} off ({", ".join(key)})')


def good(found: Results, model: str, link: str) -> dict[str, float]:
    """Speed-ups over a link, of the codecs whose loss is measured and within the bar."""
    losses = {c: found.worse(model, c) for c in found.codecs(model) if c != 'raw'}
    near = [c for c, w in losses.items() if w is not None and w <= LOSS]
    return {c: g for c in near if (g := found.gain(model, c, link))}


def _verdict(passed: bool, steady: bool, text: str) -> str:
    """A line on a bar; one that is met by windows that do not agree is not known to be met."""
    return f'* {"FAIL" if not passed else "pass" if steady else "not known"}: {text}'


def draw(found: Results, path: Path) -> None:
    """The picture: a column a model."""
    n = len(found.models)
    with style.style():
        figure = style.figure(6.5 * n, 8.5)
        axes = figure.subplots(2, n, squeeze=False)
        for column, model in enumerate(found.models):
            _draw_steps(found, model, axes[0, column])
            _draw_gains(found, model, axes[1, column])
        axes[0, 0].legend(fontsize=7, ncols=2)
        figure.suptitle(headline(found))
        style.save(figure, path)


def headline(found: Results) -> str:
    """The finding, by model: the largest speed-up with a loss within the bar, of steady steps."""
    said = []
    for model in found.models:
        gains = {
            (gain, link, codec)
            for link in found.links
            for codec, gain in good(found, model, link).items()
            if found.steady(model, codec, link)
        }
        gain, link, codec = max(gains, default=(1.0, 'any link', 'raw'))
        said.append(f'{model} {gain:.1f} times at {link} ({codec})')
    return f'Largest steady speed-up at a loss within {LOSS:.0%} of raw: {", ".join(said)}'


def _draw_steps(found: Results, model: str, axes: Any) -> None:
    links, codecs = list(found.links), found.codecs(model)
    width = 0.85 / len(codecs)
    for i, codec in enumerate(codecs):
        seconds = [found.steps.get((model, codec, l), {}).get('step_s', np.nan) for l in links]
        at = np.arange(len(links)) + (i - (len(codecs) - 1) / 2) * width
        kind = {'color': style.PALETTE[i % 8], 'marker': 'os'[i // 8 % 2], 'ms': 4}
        axes.plot(at, 1e3 * np.array(seconds), ls='', label=codec, **kind)
    own = 1e3 * found.compute[model]
    axes.axhline(own, color='black', lw=0.8, ls='--')
    axes.text(len(links) - 0.5, own * 1.03, 'compute', ha='right', fontsize=7)
    axes.set(title=f'{model}: a training step', ylabel='ms, logarithmic')
    style.logarithmic(axes)
    axes.set_xticks(range(len(links)), links)


def _draw_gains(found: Results, model: str, axes: Any) -> None:
    rates = np.geomspace(2e7, 2e10, 100)
    raw = found.model_seconds(model, 'raw', rates)
    for i, codec in enumerate(found.codecs(model)):
        kind = {'color': style.PALETTE[i % 8], 'ls': ('-', '--')[i // 8 % 2], 'lw': 1}
        axes.plot(rates / 1e6, raw / found.model_seconds(model, codec, rates), **kind)
        for link, r in found.links.items():
            gain = found.gain(model, codec, link)
            rate, delay = r['nominal']
            if gain is not None:
                mark = {'marker': '*', 's': 60} if delay else {'marker': 'o', 's': 22}
                at = (rate or rates[-1]) / 1e6
                axes.scatter(at, gain, color=kind['color'], zorder=3, **mark)
    axes.axhline(1, color='black', lw=0.8)
    axes.set(title='does it pay? lines: model; points: measured', xscale='log', yscale='log')
    axes.set(xlabel='Mbit/s (rightmost points: no limit; stars: 50 ms each way)')
    axes.set(ylabel='times as fast as raw')
    axes.set_yticks([0.5, 1, 2, 4, 8, 16], ['0.5', '1', '2', '4', '8', '16'])
    axes.minorticks_off()


def write(rows: Sequence[Row], out: Path) -> int:
    """Table and picture beside the rows; returns how many bars were missed."""
    found = Results(rows)
    lines = list(markdown(found))
    out.with_suffix('.md').write_text('\n'.join(lines) + '\n')
    draw(found, out.with_suffix('.png'))
    print('\n'.join(lines))
    return sum(line.startswith('* FAIL') for line in lines)


if __name__ == '__main__':
    source = Path(sys.argv[1])
    kept = [json.loads(line) for line in source.read_text().splitlines()]
    sys.exit(1 if write(kept, source.with_suffix('')) else 0)
