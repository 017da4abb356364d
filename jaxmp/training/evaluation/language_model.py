"""`LanguageModel`: a checkpoint or a run as stages, their variables and a tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxmp.boundary import Boundary
from jaxmp.boundary.pipeline import Stage, Variables
from jaxmp.config import KEYS, Config, complete, flat, nested
from jaxmp.data.tokenizer import Tokenizer, tokenizer_of
from jaxmp.data.understood import contents
from jaxmp.exchange.collectives import Tree
from jaxmp.models import decoder, gpt2, pretrained
from jaxmp.models.adapters import open_with_adapters
from jaxmp.models.described import Described
from jaxmp.models.huggingface import local
from jaxmp.runtimes.compiler import check_compiler
from jaxmp.runtimes.local import join
from jaxmp.training.agreement import digests
from jaxmp.training.checkpoint import check_inputs, inputs_of
from jaxmp.training.evaluation import saved
from jaxmp.training.experiment import Experiment, experiment_of
from jaxmp.training.fingerprint import exported
from jaxmp.training.fingerprint import weights as weights_of


class LanguageModel(NamedTuple):
    """Stages that predict the next token.

    Attributes:
      name: of the checkpoint or the run.
      stages: from tokens to logits, or to scores by token.
      variables: one ``{'params': ...}`` per stage.
      tokenizer: of its text.
      boundaries: those that the run was trained with; None of a checkpoint.
      fwd: the text of their forward channels.
      stops: tokens at which generation ends.
      positions: the longest sequence that it was made for; 0: not known.
      before: tokens that fill a window before a prompt, for stages without a cache.
    """

    name: str
    stages: tuple[Stage, ...]
    variables: Variables
    tokenizer: Tokenizer
    boundaries: tuple[Boundary, ...] | None = None
    fwd: str = ''
    stops: frozenset[int] = frozenset()
    positions: int = 0
    before: tuple[int, ...] = ()

    @property
    def cached(self) -> bool:
        """Whether its stages keep keys and values; see `jaxmp.models.decoder.empty_cache`."""
        inner = (getattr(stage, 'stage', stage) for stage in self.stages)  # of an `Entrance`
        return all(isinstance(stage, decoder.Stage) for stage in inner)

    @property
    def longest(self) -> int:
        """The longest text that it can write; 0: any, as where a window moves over it."""
        return 0 if self.before and not self.cached else self.positions


Selection = Callable[[int], Sequence[int]]  # numbers of the stages that are read, given how many
Read = Callable[[Selection], Variables]


def every(stages: int) -> Sequence[int]:
    """All stages."""
    return range(stages)


def open_language_model(
    path: str,
    stages: int = 0,
    cuts: Sequence[int] = (),
    tokenizer: str = '',
    select: Selection = every,
    before: Callable[[LanguageModel], object] = lambda model: None,
) -> LanguageModel:
    """The language model of a checkpoint or of a run.

    Args:
      path: a folder, a GGUF file, ``owner/name`` of the hub, or the workdir of a run.
      stages: number of stages of a checkpoint; 0: one; `EVERY`: one for each block.
      cuts: numbers of blocks before each boundary, in place of ``stages``.
      tokenizer: of a checkpoint that has none; see `jaxmp.data.tokenizer.tokenizer_of`.
      select: the stages that are read; of the others the variables are None.
      before: is given the model without variables, to look at what may be wrong before they are
        read, which takes long.

    Raises:
      FileNotFoundError: if there is no such checkpoint or run.
      ConnectionError: if it has to be downloaded and cannot be.
      ValueError: if it is damaged, of an unknown family, or stages are given for a run.
    """
    if not is_run(Path(path).expanduser()):
        model, read = _of_checkpoint(path, stages or 1, cuts, tokenizer)
    elif stages or cuts or tokenizer:
        raise ValueError(
            f'{path} is a run, which has its own stages and tokenizer; leave --stages, --cuts and '
            f'--tokenizer out, or give its checkpoint, {Path(path) / "model"}'
        )
    else:
        model, read = _of_run(Path(path).expanduser())
    before(model)
    return model._replace(variables=read(select))


def is_run(folder: Path) -> bool:
    """Whether a folder is the workdir of a run, not a checkpoint."""
    if (folder / 'model').is_dir():
        return True
    try:
        return 'parallel' in json.loads((folder / 'config.json').read_text())
    except (OSError, ValueError, TypeError):
        return False


def config_of_run(workdir: str | Path) -> Config:
    """The configuration of a run in one program, with the variables in ``workdir/model`` if any.

    Raises:
      FileNotFoundError: if ``workdir`` is not that of a run.
      ValueError: if its files are damaged.
    """
    folder = Path(workdir)
    if not (folder / 'config.json').is_file():
        raise FileNotFoundError(
            f'{folder} has no config.json; give the --workdir of a run of a language model'
        )
    try:
        config = json.loads((folder / 'config.json').read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f'{folder / "config.json"} is not the configuration of a run')
    values = flat(config)
    values |= {name: key.default for name, key in KEYS.items() if key.runtime}
    values |= {'parallel.runtime': 'local', 'parallel.replicas': 1, 'tied_exchange': 'mean'}
    if (folder / 'model').is_dir():
        values['model.path'] = str(folder / 'model')
    if any((folder / 'model' / f).is_file() for f in ('vocab.json', 'tokenizer.json')):
        values['data.tokenizer'] = str(folder / 'model')
    return complete(nested(values))


def opened(workdir: str | Path) -> tuple[Experiment, Read]:
    """The experiment of a run, and what reads the variables that it saved.

    They are those of ``workdir/model``, or of the last checkpoint of a run without it: a run that
    has not ended, or whose stages have parts that the layout of that folder has no place for.

    Raises:
      FileNotFoundError: as `config_of_run`.
      ValueError: if its files are damaged, or as `jaxmp.training.evaluation.saved.load`.
      WorkdirError: if its checkpoints are damaged, or of other data or weights.
    """
    if not (Path(workdir) / 'model').is_dir():
        run = saved.load(Path(workdir))
        variables = join(run.state.model.params, run.state.model.model_state)
        return run.exp, functools.partial(_some, variables.__getitem__, len(variables))
    exp, key, folder = experiment_of(config_of_run(workdir)), jax.random.key(0), Path(workdir)
    began_with = flat(contents(folder / 'config.json')).get('model.path', '')
    if not Path(began_with).expanduser().exists():  # its folder model may be whole without it
        began_with = ''
    check_inputs(*inputs_of(folder), {**digests(exp.data), **weights_of(began_with)})
    if (summary := folder / 'summary.json').is_file():  # older ones do not say what was written
        check_inputs(folder, contents(summary).get('exported', {}), exported(folder / 'model'))
    count = len(exp.task.stages)
    return exp, functools.partial(_some, lambda s: exp.task.start(s, {}, key), count)


def _some(read: Callable[[int], Tree], count: int, select: Selection) -> Variables:
    """The variables of some stages, in their places; none of the others."""
    here = select(count)
    return tuple(read(s) if s in here else {} for s in range(count))


def _of_run(workdir: Path) -> tuple[LanguageModel, Read]:
    exp, read = opened(workdir)
    if not exp.data.tokenizer:
        raise ValueError(f'{workdir} is a run on {exp.data.name}, not of a language model')
    model = workdir / 'model'
    path = exp.config.model.path  # where the run has no folder model: what it began with
    place = local(path) if path and not model.is_dir() else model
    described = open_with_adapters(str(place)).described if path else {}
    # The last position of a block has no target, so it was not trained.
    window = np.asarray(exp.data.test.x[0]).reshape(-1)[1 - exp.config.data.sequence_length :]
    model = LanguageModel(
        workdir.resolve().name, exp.task.stages, (), exp.data.tokenizer,
        exp.model.boundaries, exp.config.fwd,
        _stops(exp.data.tokenizer, place) | _ends(described),
        _positions(described, exp.task.stages), tuple(map(int, window)),
    )  # fmt: skip
    return model, read


def _of_checkpoint(
    path: str, count: int, cuts: Sequence[int], tokenizer: str
) -> tuple[LanguageModel, Read]:
    check_compiler()
    checkpoint = open_with_adapters(path)
    place = checkpoint.place
    words = tokenizer_of(tokenizer or str(place))
    stages = pretrained.stages_of(checkpoint, count, cuts)
    vocabulary = stages[0].config.vocabulary
    pretrained.check_tokenizer(place, vocabulary, words.size, '--tokenizer')
    name = Path(path).expanduser()
    model = LanguageModel(
        (name.resolve().name if name.exists() else path), stages, (), words,
        stops=_stops(words, place) | _ends(checkpoint.described),
        positions=_positions(checkpoint.described, stages),
    )  # fmt: skip
    read = functools.partial(pretrained.read, checkpoint, stages, shared={})
    return model, functools.partial(_some, read, len(stages))


def _positions(described: Described, stages: Sequence[Stage]) -> int:
    """The longest sequence by a checkpoint's description, or of a GPT-2; 0: not known."""
    of_gpt2 = stages[0].config.positions if isinstance(stages[0], gpt2.Stage) else 0
    return int(described.get('max_position_embeddings') or of_gpt2)


def _stops(tokenizer: Tokenizer, place: Path) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's, and those of generation_config.json."""
    file = place / 'generation_config.json'
    described = contents(file) if file.is_file() else {}
    return frozenset(tokenizer.end) | _ends(described)


def _ends(described: Described) -> frozenset[int]:
    """``eos_token_id`` of a description: a number, several, or none."""
    ids = described.get('eos_token_id')
    return frozenset(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
