"""Components by `jaxmp fit` in 4, 3 and 2.3 bits at three cuts, learned on a text, tried on four.

    python bench/texts.py TEXTS --wikitext=wiki.test.raw
    python bench/fitted.py MODELS TEXTS wiki.valid.tokens bench/results/fitted [MODEL LESSON CUTS]

MODELS has the GGUF files that bench/depth.py names. A lesson is `tokens`, WikiText-2's valid text,
which is tokenised; `wikitext`, the second half of the text that is raw; or `mixed`, the second
halves of all four. Components are learned from 12,288 tokens, another 3,072 say how much gradients
weigh. Texts are tried on their first 2,048 tokens. Nothing is trained. A lesson takes SmolLM2
eight minutes of a core, Gemma twenty.
"""

import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
from depth import BATCH, BLOCK, CUTS, MODELS, TEXTS, TOKENS

from jaxmp.codecs import raw
from jaxmp.codecs.fitted import codec_of
from jaxmp.feedback import direct
from jaxmp.models.checkpoint import digest
from jaxmp.training.evaluation import fit, perplexity
from jaxmp.training.evaluation.language_model import open_language_model
from jaxmp.training.summary import provenance
from jaxmp.training.workdir.locks import write_json

LEARNED = 15_360
BITS = 4.0, 3.0, 2.3
LESSONS = 'tokens', 'wikitext', 'mixed'
SEVEN = [('smollm2', 'mixed', 7)]  # with --percent alone
HALF = 150_000  # bytes of a text


def blocks_of(model, lesson, texts, tokens):
    """The blocks to learn from, and those of each text that are not learned from."""
    names = {'tokens': (), 'wikitext': ('wikitext',), 'mixed': TEXTS}[lesson]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f'{name}.txt' for name in names]
        for file in files:
            half = (texts / file.name).read_bytes()[HALF:]
            file.write_bytes(half[half.index(b'\n') :])
        files, count = files or [tokens], LEARNED // max(len(files), 1)
        found = [perplexity.blocks_of(model, f, BLOCK, count, BATCH) for f in files]
    held = [blocks[-fit.rest(blocks) :] for blocks in found]
    return np.concatenate([blocks[: -fit.rest(blocks)] for blocks in found]), held


def rows_of(name, lesson, cuts, models, texts, tokens):
    """The scores of a model, by text and bits."""
    path = str(models / MODELS[name])
    model = open_language_model(path, 0, CUTS[name][cuts])
    learn, rest = blocks_of(model, lesson, texts, tokens)
    found = [fit.directions_of(sent) for sent in fit.sent_of(model, learn, BATCH)]
    held = [fit.sent_of(model, blocks, BATCH) for blocks in rest]
    codecs, about = {}, {'weights': digest(path), 'cuts': CUTS[name][cuts]}
    for bits in (*BITS, 0.0) if cuts == 3 else (0.0,):
        chosen = fit.chosen(found, held, Namespace(bits=bits, percent=not bits, batch=BATCH))
        word = f'{bits:g}' if bits else 'percent'
        codecs[word] = [direct(codec_of(c)) for c in chosen.components]
        about[f'{word} predicted'] = chosen.predicted
        print(name, lesson, word, chosen.bits, chosen.predicted, flush=True)
    scores = {}
    for text in TEXTS:
        some = perplexity.blocks_of(model, texts / f'{text}.txt', BLOCK, TOKENS, BATCH)
        found_here = perplexity.scores(model, some, {'raw': direct(raw), **codecs}, BATCH)
        scores[text] = {codec: score.record() for codec, score in found_here.items()}
        print(name, text, {c: round(s['kl'], 4) for c, s in scores[text].items()}, flush=True)
    return about | {'texts': scores}


def main(models, texts, tokens, out, *one):
    jobs = [one] if one else [*((m, n, 3) for m in MODELS for n in LESSONS), *SEVEN]
    for name, lesson, cuts in jobs:
        made = rows_of(name, lesson, int(cuts), Path(models), Path(texts), Path(tokens))
        about = {'learned': LEARNED, 'tokens': TOKENS, 'block': BLOCK, 'batch': BATCH}
        more = '' if int(cuts) == 3 else f'-{cuts}'
        file = Path(out) / f'{name}-{lesson}{more}.json'
        file.parent.mkdir(exist_ok=True)
        write_json(file, provenance() | about | made)


if __name__ == '__main__':
    main(*sys.argv[1:])
