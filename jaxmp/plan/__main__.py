"""`jaxmp plan`: a configuration with the least predicted step over a link, within an error budget.

    jaxmp plan --config=digits_resnet --link=100mbit,50ms --out=plan.py
    jaxmp launch --processes 4 -- jaxmp train --config=plan.py

It probes the configuration on this machine, prints the table that it decides from, and writes a
configuration that runs. Candidates follow from what the probe sees of a tensor: with a heavy token
or channel none has one scale for all. The error of a gradient is the relative squared error of a
few training steps. That of an activation is the error of white noise that raises the loss as much.
It is a proxy: it orders codecs of one kind well, and says little about the accuracy after training,
or about feedback, which sends an error later. Predicted are stages on machines of their own, as
fast as this one; replicas exchange gradients beside that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmp.plan.predict import Link, parse
from jaxmp.plugins import base_of

if TYPE_CHECKING:
    from jaxmp.plan.choose import Choice, Probed
    from jaxmp.training.experiment import Experiment

EACH = 4  # micro-batches of the probe per stage
UNIFORM = (  # of the paper, for comparison
    ('raw', 'raw'),
    ('uniform(4)', 'uniform(8)'),
    ('uniform(8)', 'uniform(8)'),
    ('top_k(0.1)', 'top_k(0.1)'),
)


def parser_of(prog: str, description: str | None) -> argparse.ArgumentParser:
    """The flags of a command that probes a configuration for a link."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--config', help='its name, or a Python file; default as in `jaxmp train`')
    parser.add_argument('--link', required=True, help='between stages, such as 100mbit,50ms')
    parser.add_argument('--error', type=float, default=0.1, help='largest error; default 0.1')
    parser.add_argument('--seconds', type=float, default=60, help='of the probe; default 60')
    parser.add_argument('--codecs', default='', help='further channels, with ; between them')
    return parser


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the texts ``key=value`` that change the configuration."""
    parser = parser_of('jaxmp plan', __doc__)
    parser.add_argument('--out', type=Path, default=Path('plan.py'), help='default plan.py')
    return parsed(parser, argv)


def parsed(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """The flags of a parser from `parser_of`, and the texts that change the configuration."""
    args, rest = parser.parse_known_args(argv)
    for text in rest:
        if not (text.startswith('--config.') and '=' in text):
            parser.error(f'unexpected {text!r}; keys are written --config.key=value')
    if not (args.error >= 0 and args.seconds > 0):
        parser.error('--error is a number from 0, and --seconds one above 0')
    args.config = args.config or base_of(rest)
    return args, [text.removeprefix('--config.') for text in rest]


def changed(name: str, texts: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The configuration with the command line's values, and these values.

    Raises:
      ValueError: if there is no such file or key, or a value is of another type.
    """
    from jaxmp.config import complete, flat
    from jaxmp.plugins import load
    from jaxmp.sweep.study import put

    try:
        config = complete(load(name))
    except (TypeError, ValueError) as error:
        raise ValueError(f'--config={name}: {error}') from None
    for text in texts:
        put(config, text)
    values = flat(config.to_dict())
    return config, {key: values[key] for key in (t.partition('=')[0] for t in texts)}


def planned(
    config: Any, own: Sequence[str], link: Link, budget: float, seconds: float
) -> tuple[Probed, Choice]:
    """What the probe measured, and the plan.

    A few training steps run uncompressed. The last of them give the activations and gradients of
    one micro-batch at every boundary, on which each candidate is timed and its error is measured.
    Stages are timed alone, one action at a time, for as many numbers of micro-batches as the time
    allows; the others are estimated by the size of a micro-batch. What a plan needs at least is
    measured even if it takes longer: the training steps, `LEAST` candidates, and the stages with
    the number of micro-batches of the training steps.

    Raises:
      ValueError: if the configuration makes no sense, has one stage, or a text is no channel.
    """
    from jaxmp.grammar import own_words
    from jaxmp.plan.candidates import channels, texts_for
    from jaxmp.plan.choose import Probed, choose
    from jaxmp.plan.clock import Clock
    from jaxmp.plan.crossings import handover, measured
    from jaxmp.plan.seen import seen
    from jaxmp.plan.stages import stage_times
    from jaxmp.plan.steps import trained
    from jaxmp.sinks import warnings_of
    from jaxmp.training.sizes import likes

    exp = probed_experiment(config)
    names = {'examples': len(exp.data.train.y), **own_words(config.codecs)}
    first = likes(exp)[0]
    told = lambda text: print(text, file=sys.stderr, flush=True)
    clock = Clock(seconds, time.monotonic(), told)
    for line in warnings_of(channels(own, names, first).values(), exp.task.like):
        told(f'warning: {line}')
    clock.say('training steps without compression')
    steps = trained(exp, clock)
    found = {}
    for edge, tensors in steps.tensors.items():
        known = seen(tensors[-1])
        clock.say(f'from stage {edge[0]} to {edge[1]}: {known}')
        texts = dict.fromkeys([*texts_for(known)[:1], *own, *texts_for(known)[1:]])
        found[edge] = channels(texts, names, first)
    crossings = measured(found, exp, steps, clock)
    probed = Probed(stage_times(exp, steps, clock), crossings, *handover())
    clock.say('choosing')
    return probed, choose(probed, link, budget)


def probed_experiment(config: Any) -> Experiment:
    """The experiment of the probe, with `EACH` micro-batches per stage or the configured ones.

    Of the numbers that divide the batch it has the nearest to these; the times of others are
    estimated from those of so many.

    Raises:
      ValueError: as `planned`.
    """
    from jaxmp.plan.stages import divisors, with_microbatches
    from jaxmp.training.experiment import experiment_of
    from jaxmp.training.sizes import check_residuals

    exp = experiment_of(probed_config(config))
    if (stages := len(exp.task.stages)) < 2:
        raise ValueError(
            f'config.model.name={config.model.name!r} has one stage, so there is no boundary to '
            'plan; give a model of two or more stages, such as --config.model.stages=4 of gpt2'
        )
    most = max(EACH * stages, exp.config.parallel.num_microbatches)
    exp = with_microbatches(exp, divisors(exp.config.batch_size, most)[0])
    check_residuals(exp)
    return exp


def probed_config(config: Any) -> Any:
    """The configuration of the probe: one replica, no compression, links as they are."""
    c = config.copy_and_resolve_references()
    c.batch_size = max(1, c.batch_size // c.parallel.replicas)
    c.update(fwd='raw', bwd='raw', warmup_epochs=0, exchange='mean')
    c.parallel.update(
        runtime='mpmd', replicas=1, schedule='1f1b', link_rate=0.0, link_delay=0.0, profile=False
    )
    return c


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    args, texts = arguments(argv)
    try:
        link = parse(args.link)
        config, values = changed(args.config, texts)
        from jaxmp.plan.choose import uniform
        from jaxmp.plan.pays import said, verdict
        from jaxmp.plan.show import show, summary
        from jaxmp.plan.write import text
        from jaxmp.runtimes.allocator import keep_freed_pages
        from jaxmp.runtimes.placement import keep_compiled

        keep_compiled()
        keep_freed_pages()
        own = [t.strip() for t in args.codecs.split(';') if t.strip()]
        probed, choice = planned(config, own, link, args.error, args.seconds)
        others = {pair: uniform(probed, link, *pair) for pair in UNIFORM}
        about = summary(choice, args.config, args.link, args.error)
        print(said(verdict(config, probed, choice, link, args.error)))
        show(probed, choice, others, link, args.error)
        args.out.write_text(text(choice, args.config, values, args.out, about))
    except (OSError, ValueError) as error:
        sys.exit(f'jaxmp plan: {error}')
    run = f'jaxmp launch --processes {1 + len(choice.codecs) // 2} -- jaxmp train'
    print(f'wrote {args.out}: {run} --config={args.out}')


if __name__ == '__main__':
    main()
