"""Pictures of schedules for these pages: a row per device, a box per action with its micro-batch.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart. Of several stages on
a device the later ones are lighter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxmp.runtimes.schedule import Action, place, size

COLOURS = {'F': '#56B4E9', 'B': '#E69F00', 'W': '#009E73'}
KINDS = {
    'F': 'F: forward',
    'B': 'B: gradient of the input (and of the weights if there is no W)',
    'W': 'W: gradient of the weights',
}


def paint(axes: Any, actions: Sequence[Action], fontsize: float = 7) -> None:
    """Paints the timeline into matplotlib's axes."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    where, (_, _, end) = place(actions), size(actions)
    shade = lambda a: 0.55 ** where[: a.stage].count(a.device)
    for a in actions:
        colour = [1 - shade(a) * (1 - part) for part in to_rgb(COLOURS[a.kind])]
        box = (a.start, a.device - 0.45), a.end - a.start, 0.9
        axes.add_patch(Rectangle(*box, fc=colour, ec='white', lw=0.5))
        middle = (a.start + a.end) / 2, a.device
        axes.text(*middle, a.microbatch, ha='center', va='center_baseline', fontsize=fontsize)
    devices = range(1 + max(where))
    axes.set(xlim=(0, end), ylim=(devices[-1] + 0.5, -0.5))
    axes.axvspan(0, end, color='#eeeeee', zorder=0)
    axes.set_yticks(devices, [f'device {d}' for d in devices])
    axes.spines[:].set_visible(False)
    axes.grid(False)


def legend(figure: Any, split: bool) -> None:
    """Writes the meaning of the colours below the picture."""
    from matplotlib.patches import Patch

    kinds = KINDS if split else {'F': 'forward', 'B': 'backward'}
    keys = [Patch(fc=COLOURS[kind], label=text) for kind, text in kinds.items()]
    figure.legend(handles=keys, ncols=3, frameon=False, loc='outside lower right', fontsize=8)
