"""`jaxmp generate`: text from a trained language model, with compression off and on.

    jaxmp generate runs/text_gpt2 --prompt 'Alice was' --tokens 200

Both samples use the same random numbers, so that the texts are equal as long as the models agree.
The network gets a window of one token less than the run's sequence length. Before the prompt the
window is filled with validation text, so that a codec compresses tensors of the shape and kind that
it was trained on (TopK per sample chooses among the whole window).
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
import numpy as np
from jaxtyping import Array

from jaxmp.boundary import init_feedback
from jaxmp.config import KEYS, complete, flat, nested
from jaxmp.pipeline import Pipeline
from jaxmp.training.evaluate import cuts_to_score
from jaxmp.training.experiment import Experiment, experiment_of
from jaxmp.wire import Ctx

Scores = Callable[[Array, Array], Array]


def load(workdir: str | Path) -> tuple[Experiment, Any]:
    """The experiment of a finished run, and the variables that it saved in ``workdir/model``.

    Raises:
      FileNotFoundError: if ``workdir`` is not that of a finished run of a language model.
      ValueError: if its files are damaged.
    """
    folder = Path(workdir)
    if not (folder / 'model').is_dir() or not (folder / 'config.json').is_file():
        raise FileNotFoundError(
            f'{folder} has no model of a finished run; give the --workdir of a run of a language '
            'model that ended, without config.model.bottleneck and '
            'config.model.embed_every_stage, which the layout of the folder has no place for'
        )
    try:
        config = json.loads((folder / 'config.json').read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f'{folder / "config.json"} is not the configuration of a run')
    values = flat(config)
    values |= {'model.path': str(folder / 'model'), 'eval_feedback': 'direct'}
    values |= {name: key.default for name, key in KEYS.items() if key.runtime}
    values |= {'parallel.runtime': 'local', 'parallel.replicas': 1, 'tied_exchange': 'mean'}
    if any((folder / 'model' / f).is_file() for f in ('vocab.json', 'tokenizer.json')):
        values['data.tokenizer'] = str(folder / 'model')
    exp = experiment_of(complete(nested(values)))
    key = jax.random.key(0)
    return exp, tuple(exp.task.start(i, {}, key) for i in range(len(exp.task.stages)))


def scorer(exp: Experiment, variables: Any, compressed: bool) -> Scores:
    """``(window, key) -> logits`` of the token after the window."""
    stages = tuple(getattr(stage, 'with_logits', stage) for stage in exp.task.stages)
    model = Pipeline(stages, cuts_to_score(exp, compressed=True))

    @jax.jit
    def score(window: Array, key: Array) -> Array:
        feedback = None
        if compressed:
            likes = model.likes(variables, window, train=False)
            feedback = init_feedback(model.boundaries, likes)
        logits, _, _ = model.apply(variables, feedback, window, Ctx(key), train=False)
        return logits[0, -1]

    return score


def sample(
    scores: Scores, window: Sequence[int], count: int, temperature: float, seed: int
) -> list[int]:
    """``count`` tokens that continue ``window``.

    Args:
      scores: function from `scorer`.
      window: a full window of tokens.
      count: number of tokens to draw.
      temperature: divisor of the logits; 0 chooses the most likely token.
      seed: seed of the random numbers.
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
        prog='jaxmp generate', description='Write text with a trained run, compression off and on.'
    )
    parser.add_argument('workdir', help='workdir of a finished run of a language model')
    parser.add_argument('--prompt', default='Alice ')
    parser.add_argument('--tokens', type=int, default=200)
    parser.add_argument('--temperature', type=float, default=0.7)
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args(argv)
    try:
        exp, variables = load(args.workdir)
    except (OSError, ValueError) as error:
        sys.exit(f'jaxmp generate: {error}')
    words = exp.data.tokenizer
    assert words, 'a run of a language model reads a text'
    [start] = words.encode([args.prompt])
    if not len(start):
        sys.exit('jaxmp generate: an empty prompt; give --prompt a text of at least one token')
    # The last position of a block has no target, so it was not trained.
    window = [*exp.data.test.x[0].tolist(), *map(int, start)][1 - exp.config.data.sequence_length :]
    for mode in ('off', 'on'):
        scores = scorer(exp, variables, mode == 'on')
        print(f'--- compression {mode} (fwd {exp.config.fwd}) ---')
        print(
            args.prompt
            + words.decode(sample(scores, window, args.tokens, args.temperature, args.seed))
        )


if __name__ == '__main__':
    main()
