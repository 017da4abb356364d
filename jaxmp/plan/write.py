"""`text`: a plan as a configuration's file, which starts from the one that was probed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmp.config.files import folder
from jaxmp.plan.choose import Choice


def text(choice: Choice, base: str, changed: Mapping[str, Any], out: Path, said: str) -> str:
    """The file.

    Args:
      choice: the plan.
      base: the configuration that was probed: its name, or its file.
      changed: values of the command line, by dotted name.
      out: where the file will be.
      said: what the docstring says of the plan.
    """
    order = choice.order
    count = len(choice.codecs) // 2
    values = {
        **changed,
        'fwd': '; '.join(choice.codecs[s, s + 1].text for s in range(count)),
        'bwd': '; '.join(choice.codecs[s + 1, s].text for s in range(count)),
        'parallel.runtime': 'mpmd',
        'parallel.num_microbatches': order.microbatches,
        'parallel.schedule': order.schedule,
    }
    rows = [f'            {key!r}: {value!r},' for key, value in values.items()]
    # The file names its base by a path from where it is itself, so that both can be moved.
    path, imports = based(base, out)
    return '\n'.join(
        [
            f'"""{said}"""',
            '',
            *imports,
            'from jaxmp.config import Config',
            'from jaxmp.config import load',
            '',
            '',
            'def get_config() -> Config:',
            '    """What the plan changes."""',
            f'    c = load({path})',
            f'    c.name {name_after(changed)}',
            '    c.update_from_flattened_dict(',
            '        {',
            *rows,
            '        }',
            '    )',
            '    return c',
            '',
        ]
    )


def name_after(changed: Mapping[str, Any]) -> str:
    """How a plan's name follows from the model that was chosen, else from the configuration.

    >>> name_after({'model.name': 'models.py:mine'}), name_after({})
    ("= 'mine_plan'", "+= '_plan'")
    """
    if not (model := changed.get('model.name')):
        return "+= '_plan'"
    return f"= '{Path(model.rpartition(':')[2]).stem}_plan'"


def based(base: str, out: Path) -> tuple[str, list[str]]:
    """The expression that names the configuration from the file ``out``, and its imports."""
    file, colon, argument = base.partition(':')
    if (folder() / f'{file}.py').is_file() and not Path(file).is_file():
        return repr(base), []
    near = os.path.relpath(Path(file).resolve(), out.resolve().parent)
    path = f'str(Path(__file__).resolve().parent / {near!r})'
    return path + f' + {colon + argument!r}' * bool(colon), ['from pathlib import Path', '']
