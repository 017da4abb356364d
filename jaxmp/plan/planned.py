"""`planned`: what the probe of a configuration measures on this machine, and the plan of a link."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxmp.config import Config
from jaxmp.metrics import PERCENT
from jaxmp.net.speed import Link
from jaxmp.plan.asked import Asked

if TYPE_CHECKING:
    from jaxmp.plan.choose import Choice, Probed
    from jaxmp.plan.machines import Compared
    from jaxmp.training.experiment import Experiment

EACH = 4  # micro-batches of the probe per stage


def planned(
    config: Config,
    own: Sequence[str],
    link: Link,
    budget: float,
    seconds: float,
    percent: float | None = None,
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
    from jaxmp.grammar.sinks import warnings_of
    from jaxmp.plan.candidates import channels, texts_for
    from jaxmp.plan.choose import Probed, choose
    from jaxmp.plan.clock import Clock
    from jaxmp.plan.crossings import handover, measured
    from jaxmp.plan.loss import within
    from jaxmp.plan.seen import seen
    from jaxmp.plan.stages import stage_times
    from jaxmp.plan.steps import trained
    from jaxmp.training.sizes import likes

    exp = probed_experiment(config)
    percent = percent_for(exp, percent)
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
        # The first candidate, raw, is measured in any case; then those that were asked for.
        first_one, *others = texts_for(known, percent is not None and edge[0] < edge[1])
        texts = dict.fromkeys([first_one, *own, *others])
        found[edge] = channels(texts, names, first)
    crossings = measured(found, exp, steps, clock, percent is not None)
    if percent is not None:
        crossings = within(crossings, percent)
        forward = [own for edge, own in crossings.items() if edge[0] < edge[1]]
        if all(c.text == 'raw' for own in forward for c in own):
            told(
                f'no candidate holds --percent={percent:g} at all boundaries together, so '
                'activations stay raw: give a larger --percent, more --codecs or more --seconds'
            )
    met = {'normed': steps.normed, 'table': steps.table}
    probed = Probed(stage_times(exp, steps, clock), crossings, *handover(), **met)
    clock.say('choosing')
    return probed, choose(probed, link, budget)


def percent_for(exp: Experiment, asked: float | None) -> float | None:
    """What activations may add to the perplexity of a pretrained language model, in percent.

    Raises:
      ValueError: if it is asked for of another task.
    """
    if exp.data.tokenizer is None and asked is not None:
        raise ValueError(
            f'--percent={asked:g} is of perplexity, and this task is measured by '
            f'{exp.task.metric.name}; give --error'
        )
    return PERCENT if asked is None and exp.config.model.path else asked


def probed_experiment(config: Config) -> Experiment:
    """The experiment of the probe, with `EACH` micro-batches per stage or the configured ones.

    Of the numbers that divide the batch it has the nearest to these; the times of others are
    estimated from those of so many.

    Raises:
      ValueError: as `planned`.
    """
    from jaxmp.plan.stages import divisors, with_microbatches
    from jaxmp.training.experiment import experiment_of
    from jaxmp.training.sizes import check_residuals

    if config.optimizer.delay:
        raise ValueError(
            f'config.optimizer.delay={config.optimizer.delay}: it is weighed here whether late '
            'gradients pay; leave it out'
        )
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


def probed_config(config: Config) -> Config:
    """The configuration of the probe: one replica, no compression, links as they are."""
    c = config.copy_and_resolve_references()
    c.batch_size = max(1, c.batch_size // c.parallel.replicas)
    c.update(fwd='raw', bwd='raw', phases='', exchange='mean')
    c.parallel.update(
        runtime='mpmd', replicas=1, schedule='1f1b', link_rate=0.0, link_delay=0.0, profile=False
    )
    return c


def for_machines(ask: Asked) -> tuple[Any, dict[str, Any], Link, Compared | None]:
    """The configuration, the values that are changed, the link, and machines where two are.

    Raises:
      ValueError: as `planned` and `jaxmp.plan.machines.compared`.
      ProcessGroupError: as `jaxmp.plan.machines.compared`.
    """
    from jaxmp.runtimes.allocator import keep_freed_pages
    from jaxmp.runtimes.placement import keep_compiled

    config, values = ask.config()
    keep_compiled()
    keep_freed_pages()
    if ask.link:
        return config, values, ask.link, None
    from jaxmp.plan.machines import compared, listen

    if ask.listens:
        listen(ask, config, probed_experiment)
    machines = compared(ask, config, probed_experiment)
    config = config.copy_and_resolve_references()
    config.parallel.runtime = 'mpmd'
    config.update_from_flattened_dict(machines.values)
    return config, {**values, **machines.values}, machines.link, machines


def planned_on(
    machines: Compared | None, config: Config, link: Link, ask: Asked
) -> tuple[Probed, Choice]:
    """`planned`, where there are two machines for both of them."""
    from jaxmp.plan.choose import choose

    probed, choice = planned(config, ask.codecs, link, ask.error, ask.seconds, ask.percent)
    if machines:
        place = tuple(map(int, config.parallel.place.split()))
        probed = probed.on(place, machines.slower)
        choice = choose(probed, link, ask.error)
    return probed, choice
