"""Components by `jaxmp fit` in 4, 3 and 2.3 bits at three cuts, learned on one text, tried on four.

    python bench/texts.py TEXTS --wikitext=wiki.test.raw
    python bench/fitted.py MODELS TEXTS wiki.valid.tokens OUT.json [MODEL ...]

MODELS has the GGUF files that bench/depth.py names. Components are learned from 12,288 tokens of
WikiText-2's valid text, another 3,072 say how much gradients weigh. Nothing is trained. A model
takes about ten minutes of a core.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

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
PERCENT = 1.0


def channels_of(components):
    return [direct(codec_of(c)) for c in components]


def rows_of(name, models, texts, learn):
    """The scores of a model, by text and bits."""
    path = str(models / MODELS[name])
    model = open_language_model(path, 0, CUTS[name][3])
    blocks = perplexity.blocks_of(model, learn, BLOCK, LEARNED, BATCH)
    count = len(blocks) // fit.HELD_OUT
    found = [fit.directions_of(sent) for sent in fit.sent_of(model, blocks[:-count], BATCH)]
    held = [fit.sent_of(model, blocks[-count:], BATCH)]
    codecs, about = {}, {'weights': digest(path), 'cuts': CUTS[name][3]}
    for bits in BITS:
        asked = Namespace(bits=bits, percent=0.0, batch=BATCH)
        chosen = fit.chosen(found, held, asked)
        codecs[f'{bits:g}'] = channels_of(chosen.components)
        about[f'{bits:g} predicted'] = chosen.predicted
        print(name, bits, chosen.predicted, flush=True)
    asked = Namespace(bits=0.0, percent=PERCENT, batch=BATCH)
    chosen = fit.chosen(found, held, asked)
    about['percent bits'] = chosen.bits
    codecs['percent'] = channels_of(chosen.components)
    scores = {}
    for text in TEXTS:
        some = perplexity.blocks_of(model, texts / f'{text}.txt', BLOCK, TOKENS, BATCH)
        found_here = perplexity.scores(model, some, {'raw': direct(raw), **codecs}, BATCH)
        scores[text] = {codec: score.record() for codec, score in found_here.items()}
        print(name, text, {c: round(s['kl'], 4) for c, s in scores[text].items()}, flush=True)
    return about | {'texts': scores}


def main(models, texts, learn, out, *names):
    out = Path(out)
    before = json.loads(out.read_text())['models'] if out.exists() else {}
    for name in names or MODELS:
        before[name] = rows_of(name, Path(models), Path(texts), Path(learn))
        about = {'learned': Path(learn).name, 'tokens': LEARNED, 'block': BLOCK, 'batch': BATCH}
        write_json(out, provenance() | about | {'models': before})


if __name__ == '__main__':
    main(*sys.argv[1:])
