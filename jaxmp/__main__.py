"""`jaxmp COMMAND ...`, and `python -m jaxmp`: the command line."""

import importlib
import os
import signal
import sys

from jaxmp.terminal import command, hint

COMMANDS = {
    'train': ('jaxmp.training.command', 'train a model with compressed boundaries'),
    'sweep': ('jaxmp.sweep.runner', 'run every row of a study for every seed'),
    'compare': ('jaxmp.pictures.compare', 'a table and curves of any runs'),
    'evaluate': (
        'jaxmp.training.evaluation.crosstest',
        'test runs and checkpoints with other codecs',
    ),
    'fit': (
        'jaxmp.training.evaluation.fit',
        "components of a model's boundaries, learned once from a text",
    ),
    'fold': (
        'jaxmp.training.evaluation.fold',
        'a run trained with compression, to serve without it',
    ),
    'generate': (
        'jaxmp.training.generation.generate',
        'text from a checkpoint or a run, token by token',
    ),
    'launch': ('jaxmp.launch.__main__', 'start the processes of a run on this machine'),
    'switch': ('jaxmp.launch.switch', 'where the replicas of an elastic run on several hosts meet'),
    'pays': ('jaxmp.plan.pays', 'whether more machines make a step faster over a link'),
    'plan': ('jaxmp.plan.__main__', 'choose codecs, schedule and micro-batches for a link'),
    'codecs': ('jaxmp.codecs.__main__', 'the words of the algebra, with bits per element'),
}
STUDY = 'report', 'bench'
TRAIN = {  # what commands import beside the base install
    'flax', 'gguf', 'huggingface_hub', 'jinja2', 'matplotlib', 'ml_collections', 'orbax',
    'PIL', 'pooch', 'zmq', 'rich', 'safetensors', 'tensorflow_datasets', 'tokenizers',
    'transformers',
}  # fmt: skip


def leave(*_: object) -> None:
    """Ends at a Ctrl-C with one line, whatever is being imported, compiled or written."""
    shown = '\x1b[?25h' if os.isatty(2) else ''  # the cursor, which a progress bar hides
    text = 'stopped by Ctrl-C; the same command begins again or goes on from the last checkpoint'
    os.write(2, f'{shown}{command()}: {text}\n'.encode())
    os._exit(130)


def main(argv: list[str] | None = None) -> None:
    """Runs a command; its modules, which take seconds to import, are imported here.

    Args:
      argv: the command; by default that of the process, whose handling of signals then follows it.
    """
    of_process, argv = argv is None, sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else '--help'
    if name in ('--help', '-h', 'help'):
        rows = '\n'.join(f'  jaxmp {name:9} {line}' for name, (_, line) in COMMANDS.items())
        print(f'usage: jaxmp COMMAND ...\n\n{rows}\n\n`jaxmp COMMAND --help` says more.')
        return
    if name == '--version':
        from jaxmp import __version__

        print(f'jaxmp {__version__}')
        return
    if name in STUDY:
        sys.exit(f'jaxmp: {name} is of the papers; in a clone, `python -m study {name}`')
    if name not in COMMANDS:
        sys.exit(
            f'jaxmp: no command {name!r}{hint(name, COMMANDS)}; there are {", ".join(COMMANDS)}'
        )
    if of_process and name in ('train', 'sweep', 'generate'):
        signal.signal(signal.SIGINT, leave)
    elif of_process:  # `jaxmp codecs | head` ends quietly
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        sys.exit(importlib.import_module(COMMANDS[name][0]).main(argv[1:]))
    except ModuleNotFoundError as error:
        package = (error.name or '').partition('.')[0]
        if package not in TRAIN:
            raise
        sys.exit(f"jaxmp {name} needs {package}, of the extra train: pip install 'jaxmp[train]'")


if __name__ == '__main__':
    main()
