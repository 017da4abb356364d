"""Text from a trained run, with compression off and on, so that one can read the difference.

    python -m jaxmp.generate runs/text_gpt2 --prompt 'Alice was' --tokens 200

Both samples draw from the same random numbers: where the models agree, so do the texts. The network
sees a window one token short of the run's sequence length, filled before the prompt with validation
text: a codec then compresses what it was trained on (TopK per sample chooses among the whole
window).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jaxtyping import Array

from jaxmp.boundary import init_feedback
from jaxmp.pipeline import Pipeline
from jaxmp.setting import Setting, setting
from jaxmp.training.engine import cuts_to_score
from jaxmp.wire import Ctx

Scores = Callable[[Array, Array], Array]


def load(workdir: str | Path) -> tuple[Setting, Any]:
    """The setting of a finished run and the variables it left in ``workdir/model``.

    Raises:
      FileNotFoundError: if ``workdir`` holds no finished run of a language model.
      ValueError: if its files are damaged.
    """
    folder = Path(workdir)
    if not (folder / 'model').is_dir() or not (folder / 'config.json').is_file():
        raise FileNotFoundError(
            f'{folder} holds no model of a finished run; give the --workdir of a run of a language '
            'model that ended in one process'
        )
    try:
        config = json.loads((folder / 'config.json').read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f'{folder / "config.json"} is not the configuration of a run')
    config |= {'init_from': str(folder / 'model'), 'eval_feedback': 'direct', 'runtime': 'local'}
    if (folder / 'model' / 'vocab.json').is_file():
        config['tokenizer'] = str(folder / 'model')
    s = setting(ml_collections.ConfigDict(config))
    key = jax.random.key(0)
    return s, tuple(s.task.start(i, {}, key) for i in range(len(s.task.stages)))


def scorer(s: Setting, variables: Any, compressed: bool) -> Scores:
    """``(window, key) -> logits`` of the token after the window."""
    model = Pipeline(s.task.stages, cuts_to_score(s, compressed=True))

    @jax.jit
    def score(window: Array, key: Array) -> Array:
        links = None
        if compressed:
            likes = model.likes(variables, window, train=False)
            links = init_feedback(model.boundaries, likes)
        logits, _, _ = model.apply(variables, links, window, Ctx(key), train=False)
        return logits[0, -1]

    return score


def sample(
    scores: Scores, window: Sequence[int], count: int, temperature: float, seed: int
) -> list[int]:
    """``count`` tokens after those of ``window``.

    Args:
      scores: from `scorer`.
      window: a full window of tokens.
      count: how many to draw.
      temperature: divides the logits; 0 takes the likeliest.
      seed: of the draws.
    """
    tokens, length = list(window), len(window)
    for i in range(count):
        key = jax.random.fold_in(jax.random.key(seed), i)
        logits = scores(jnp.asarray([tokens[-length:]], jnp.int32), key)
        if temperature:
            logits = logits / temperature + jax.random.gumbel(key, logits.shape)
        tokens.append(int(np.argmax(logits)))
    return tokens[length:]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m jaxmp.generate', description='Text from a run, compression off and on.'
    )
    parser.add_argument('workdir', help='of a finished run of a language model')
    parser.add_argument('--prompt', default='Alice ')
    parser.add_argument('--tokens', type=int, default=200)
    parser.add_argument('--temperature', type=float, default=0.7)
    parser.add_argument('--seed', type=int, default=0)
    given = parser.parse_args(argv)
    from jaxmp.data.text import tokenizer_of

    try:
        s, variables = load(given.workdir)
        words = tokenizer_of(s.config.tokenizer)
    except (OSError, ValueError) as error:
        sys.exit(f'generate: {error}')
    [start] = words.encode([given.prompt])
    if not len(start):
        sys.exit('generate: an empty prompt; give --prompt a text of at least one token')
    # The last position of a block predicts nothing, so it was not trained.
    window = [*s.data.test.x[0].tolist(), *map(int, start)][1 - s.config.sequence_length :]
    for mode in ('off', 'on'):
        scores = scorer(s, variables, mode == 'on')
        print(f'--- compression {mode} (fwd {s.config.fwd}) ---')
        print(
            given.prompt
            + words.decode(sample(scores, window, given.tokens, given.temperature, given.seed))
        )


if __name__ == '__main__':
    main()
