"""Tokens a second of generation over processes, by codec, link and prompts under way.

One machine alone, then stages in processes of this machine, between which a link is emulated. All
prompts are alike, so that every stage has as much to do for each.

Run: python bench/serving.py MODEL [--processes=2,4] [--prompts=1,4]
     [--links=';100mbit;10mbit,20ms'] [--codecs='raw;mx(4)'] [--tokens=32] [--out=RESULT.json]
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from jaxmp.training.summary import provenance

PROMPT = 'The history of the town begins'


def tokens_a_second(a, processes, prompts, link, codec):
    """Tokens a second of one run."""
    words = [a.model, '--temperature=0', f'--tokens={a.tokens}']
    words += ['--prompt', *[PROMPT] * prompts]
    command = [sys.executable, '-m', 'jaxmp', 'generate']
    if processes > 1:
        command = [
            sys.executable, '-m', 'jaxmp', 'launch', '--processes', str(processes), '--', *command,
        ]  # fmt: skip
        words += ['--codec', codec, *([f'--link={link}'] if link else [])]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    [rate] = re.findall(r'tokens, ([\d.e+]+) a second', done.stderr)
    return float(rate)


def main():
    """Measures, and prints a row as it is there."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument('model')
    p.add_argument('--processes', default='2,4')
    p.add_argument('--prompts', default='1,4')
    p.add_argument('--links', default=';100mbit;10mbit,20ms', help='with ; between; empty: none')
    p.add_argument('--codecs', default='raw;outliers(rotate(lloyd(4), 64), causal=True)')
    p.add_argument('--tokens', type=int, default=32)
    p.add_argument('--out', type=Path)
    a = p.parse_args()
    rows = []
    counts, prompts = ([int(n) for n in t.split(',')] for t in (a.processes, a.prompts))
    runs = [(1, n, '', '') for n in prompts]
    runs += [
        (count, n, link, codec)
        for count in counts for link in a.links.split(';')
        for codec in a.codecs.split(';') for n in prompts
    ]  # fmt: skip
    for run in runs:
        names = 'processes', 'prompts', 'link', 'codec'
        rows.append(
            {**dict(zip(names, run, strict=True)), 'tokens_a_second': tokens_a_second(a, *run)}
        )
        print(json.dumps(rows[-1]), flush=True)
    if a.out:
        saved = {'model': Path(a.model).name, 'tokens': a.tokens, 'rows': rows, **provenance()}
        a.out.write_text(json.dumps(saved, indent=1) + '\n')


if __name__ == '__main__':
    main()
