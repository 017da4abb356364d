"""Data parallelism over a slow link: a step of two replicas, each a process and a namespace.

Run as root on Linux: python bench/slow_exchange.py [--links 100m none] [--exchanges ...]
Rows are kept as they are measured (`.jsonl`), and it goes on where it was stopped; at the end a
table (`.md`) and a picture (`.png`) lie beside them.

The network is an MLP of 5.19 million parameters on digits, 64 images a replica and step.
**Step time**: median wall time of ``--steps`` steps in replica 0 after two that do not count:
both passes, exchange, optimizer. **Sent**: bytes a step that a replica must send, by the exchange's
own messages. **Interface**: bytes a step that left a namespace, headers and acknowledgements
included. **Loss**: mean training loss of the last five steps; over a link all exchanges have then
taken the same number of steps, over a later link more, for the network trains on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import emulated_network
from emulated_network import LINKS, Lab
from timing import stem
from workers import HERE, Crew, Rows, workers

from jaxmp.pictures import style

WARM, REPLICAS = 2, 2
RAW = 'mean'
EXCHANGES = {  # text, momentum of the optimizer
    RAW: 0.5,
    'all_reduce(fp16)': 0.5,
    'scatter_gather(bf16, bf16)': 0.5,
    'all_reduce(ef(random_k(0.01)))': 0.5,
    'power_sgd(4)': 0.5,
    'all_gather(natural)': 0.5,
    'all_gather(qsgd(127))': 0.5,
    'all_gather(ef(one_bit))': 0.5,
    'double_squeeze(one_bit)': 0.5,
    'all_gather(ef(top_k(0.01)))': 0.5,
    'all_gather(ef21(top_k(0.01)))': 0.5,
    'dgc(0.001, momentum=0.5)': 0.0,
    'local_sgd(8)': 0.5,
}


def measure(made: Crew, lab: Lab, rows: Rows, args: argparse.Namespace, text: str) -> None:
    """Builds the network with an exchange and times it over every link."""
    links = [l for l in args.links if not rows.has(kind='step', text=text, link=l)]
    if not links:
        return
    lab.use(LINKS['none'])
    about = made.ask('build', text=text, momentum=EXCHANGES[text])[0]
    made.ask('steps', n=WARM)  # compiles
    taken = WARM
    for link in links:
        lab.use(LINKS[link])
        before = made.sent()
        answers = made.ask('steps', n=args.steps)
        sent = (made.sent() - before) / args.steps / REPLICAS
        losses = [statistics.mean(a['losses'][-5:]) for a in answers]
        seconds = answers[0]['seconds']
        taken += len(seconds)
        period = 8 if text.startswith('local_sgd') else 1  # a mean over whole periods
        step = statistics.mean(seconds) if period > 1 else statistics.median(seconds)
        rows.add(
            kind='step', text=text, link=link, step_s=step, seconds=seconds, interface=sent,
            loss=statistics.mean(losses), after=taken, **about,
        )  # fmt: skip
        print(f'{text:36}{link:6}{1e3 * step:9.1f} ms a step, {sent / 1e6:7.3f} MB', flush=True)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The page."""
    run = next(r for r in rows if r['kind'] == 'run')
    steps = [r for r in rows if r['kind'] == 'step']
    raw = {r['link']: r for r in steps if r['text'] == RAW}
    first = steps[0]
    lines = [
        '# Exchanges of gradients over a slow link',
        '',
        f'{run["hardware"]}, jax {run["versions"]["jax"]}, commit {run["commit"]};',
        f'{first["parameters"]:,} parameters, float32 gradient {first["uncompressed"]:,} bytes;',
        'two replicas in as many processes and network namespaces. Definitions:',
        '`bench/slow_exchange.py`. Wall times: whatever else the machine did is in them.',
        '',
        f'`{run["command"]}`',
    ]
    for link in raw:
        lines += [
            '',
            f'## {link}: losses after {raw[link]["after"]} steps',
            '',
            '| exchange | step ms | faster than raw | sent MB | ratio | interface MB | loss |',
            '|---|--:|--:|--:|--:|--:|--:|',
        ]
        for r in (r for r in steps if r['link'] == link):
            lines.append(
                f'| `{r["text"]}` | {1e3 * r["step_s"]:.1f} '
                f'| {raw[link]["step_s"] / r["step_s"]:.2f} | {r["sent"] / 1e6:.3f} '
                f'| {raw[link]["sent"] / r["sent"]:.1f} | {r["interface"] / 1e6:.3f} '
                f'| {r["loss"]:.3f} |'
            )
    return '\n'.join(lines) + '\n'


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The picture: step time of every exchange, the slowest first, a colour per link."""
    steps = [r for r in rows if r['kind'] == 'step']
    links, texts = (list(dict.fromkeys(r[k] for r in steps)) for k in ('link', 'text'))
    worst = {t: max(r['step_s'] for r in steps if r['text'] == t) for t in texts}
    texts.sort(key=lambda t: -worst[t])
    with style.style():
        figure = style.figure(8.5, 0.35 * len(texts) + 1.5)
        axes = figure.subplots()
        for link in links:
            found = {r['text']: 1e3 * r['step_s'] for r in steps if r['link'] == link}
            at = [texts.index(t) for t in found]
            axes.plot(list(found.values()), at, 'o', label=link)
            for text, x in found.items():
                side = 1 if 1e-3 * x >= worst[text] else -1
                axes.annotate(
                    f'{x:.0f}', (x, texts.index(text)), (6 * side, 0), textcoords='offset points',
                    ha='left' if side > 0 else 'right', va='center', fontsize=7,
                )  # fmt: skip
        axes.set_yticks(range(len(texts)), [style.exchange(t) for t in texts], fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel='ms per step, two replicas, 5.19 million parameters', xlim=(-60, None))
        axes.legend(title='link')
        figure.suptitle(headline(steps))
        style.save(figure, path)


def headline(steps: Sequence[dict[str, Any]]) -> str:
    """The finding: the fastest exchange over each link, beside none."""
    lines = []
    for link in dict.fromkeys(r['link'] for r in steps):
        ms = {r['text']: 1e3 * r['step_s'] for r in steps if r['link'] == link}
        best = min(ms, key=lambda t: ms[t])
        beside = f', no compression {ms[RAW]:.0f} ms' if best != RAW else ''
        where = 'Without a limit' if link == 'none' else f'Over {link}'
        lines.append(f'{where}, {style.exchange(best)} is fastest: {ms[best]:.0f} ms{beside}')
    return '\n'.join(lines)


def main() -> None:
    """Measures, then writes table and picture."""
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    ask.add_argument('--links', nargs='+', choices=LINKS, default=['100m', 'none'])
    ask.add_argument('--exchanges', nargs='+', choices=EXCHANGES, default=list(EXCHANGES))
    ask.add_argument('--steps', type=int, default=16)
    ask.add_argument('--out', type=Path, help='results without their ending')
    ask.add_argument('--fresh', action='store_true', help='forget what was measured')
    args = ask.parse_args()
    if why := emulated_network.obstacle():
        return print(f'skipped: {why}')
    out = args.out or HERE / 'results' / stem('exchange')
    rows = Rows(out.with_suffix('.jsonl'), args.fresh)
    rows.start(steps=args.steps)
    with emulated_network.lab(REPLICAS) as lab, workers(lab, 'exchange_worker.py') as made:
        for text in args.exchanges:
            measure(made, lab, rows, args, text)
    text = markdown(rows.rows)
    out.with_suffix('.md').write_text(text)
    draw(rows.rows, out.with_suffix('.png'))
    print(text)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('stopped; the same command goes on from here')
