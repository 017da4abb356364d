"""`probe`: what a plan is chosen from, measured on this machine in a given time.

A few training steps run uncompressed, with the configuration's data. The last of them give the
activations and gradients of one micro-batch at every boundary, on which each candidate is timed and
its error is measured. Stages are timed alone, one action at a time, for as many numbers of
micro-batches as the time allows; the others are interpolated in the size of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxmp.feedback import Channel
from jaxmp.plan.choose import Probed
from jaxmp.plan.clock import Clock
from jaxmp.plan.crossings import handover, measured, snapshots
from jaxmp.plan.stages import stage_times
from jaxmp.training.experiment import Experiment


def probe(exp: Experiment, texts: Mapping[str, Channel], clock: Clock) -> Probed:
    """Measures stages and candidates.

    What a plan needs at least is measured even if it takes longer than the clock's time: a few
    training steps, `LEAST` candidates, and the stages with the configured number of micro-batches.

    Args:
      exp: uncompressed, under ``mpmd``, of one replica.
      texts: candidates, the most important ones first, as `candidates` gives them.
      clock: of the probe.
    """
    clock.say('training steps without compression')
    tensors, variables, rest = snapshots(exp, clock)
    clock.say(f'{len(texts)} candidates at {len(tensors)} crossings')
    crossings = measured(texts, tensors, exp.config.parallel.num_microbatches, clock)
    return Probed(stage_times(exp, variables, rest, clock), crossings, handover())
