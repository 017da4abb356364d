"""`jaxmp plan`: a configuration with the least predicted step over a link, within an error budget.

    jaxmp plan --config=digits_resnet --link=100mbit,50ms --out=plan.py
    jaxmp launch --processes 4 -- jaxmp train --config=plan.py

It probes the configuration on this machine, prints the table that it decides from, and writes a
configuration that runs. Candidates follow from what the probe sees of a tensor: with a heavy token
or channel none has one scale for all. The error of a gradient is the relative squared error of a
few training steps; that of an activation is weighed by the gradients that came back. What all
activations of a pretrained language model add to its perplexity stays within --percent.
It is a proxy: it orders codecs of one kind well, and says little about the accuracy after training,
or about feedback, which sends an error later. Predicted are stages on machines of their own, as
fast as this one; replicas exchange gradients beside that.

    jaxmp plan --config=text_gpt2 --peer=10.0.0.1:9876

With a second machine, where `jaxmp pays --config=text_gpt2 --listen=10.0.0.1:9876` runs, it
measures that one and the link, and divides the model between both by their speeds and memories.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxmp.plan.asked import Asked, asked

if TYPE_CHECKING:
    from jaxmp.plan.choose import Choice

UNIFORM = (  # of the paper, for comparison
    ('raw', 'raw'),
    ('uniform(4)', 'uniform(8)'),
    ('uniform(8)', 'uniform(8)'),
    ('top_k(0.1)', 'top_k(0.1)'),
)


def run_command(choice: Choice, ask: Asked) -> str:
    """How the plan is run."""
    if not ask.peer:
        return (
            f'jaxmp launch --processes {1 + len(choice.codecs) // 2} -- '
            f'jaxmp train --config={ask.out} (all on this machine; on several: docs/running.md)'
        )
    host, port = ask.peer
    where = f'--coordinator={host}:{port} --processes=2'
    return (
        f'jaxmp train --config={ask.out} {where} --process=1 here, and the same with the same file '
        f'and --process=0 on {host}'
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    from jaxmp.net.address import ProcessGroupError

    try:
        ask = asked(argv, 'jaxmp plan', __doc__, 'plan.py')
        if ask.listens:
            raise ValueError('--listen is of `jaxmp pays`; start that on the other machine')
        from jaxmp.plan.choose import uniform
        from jaxmp.plan.pays import verdict
        from jaxmp.plan.planned import for_machines, planned_on
        from jaxmp.plan.show import show, summary
        from jaxmp.plan.verdict import running, said
        from jaxmp.plan.write import text

        config, values, link, machines = for_machines(ask)
        probed, choice = planned_on(machines, config, link, ask)
        others = {pair: uniform(probed, link, *pair) for pair in UNIFORM}
        about = summary(choice, ask.base, link, ask.error)
        found = verdict(config, probed, choice, link, ask.error, machines)
        print(said(found))
        show(probed, choice, others, link, ask.error, ask.candidates)
        print(found.late, end='\n' * bool(found.late))
        ask.out.write_text(text(choice, ask.base, values, ask.out, about))
    except (OSError, ValueError, ProcessGroupError) as error:
        sys.exit(f'jaxmp plan: {error}')
    print(f'wrote {ask.out}. {running(found)}: {run_command(choice, ask)}')


if __name__ == '__main__':
    main()
