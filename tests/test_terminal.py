"""What a user reads in a terminal or a pipe: names, questions behind misspelt ones, tables."""

import subprocess
import sys

import pytest
from rich.table import Table

from jaxmp import terminal
from jaxmp.training.workdir import progress
from tests.base import ENV
from tests.runs import LAUNCH


@pytest.mark.parametrize(
    ('argv', 'name'),
    [
        (['/home/train/bin/jaxmp', 'train', '--config=x'], 'jaxmp train'),
        (['/opt/jaxmp/__main__.py', 'generate', 'x'], 'jaxmp generate'),
        (['train.py', '--config=x'], 'train.py'),
        (['/mine/own.py'], 'own.py'),
        (['/usr/bin/jaxmp'], 'jaxmp'),
    ],
)
def test_messages_begin_with_the_command_that_was_typed(monkeypatch, argv, name):
    monkeypatch.setattr(sys, 'argv', argv)
    assert terminal.command() == name


def test_what_is_no_path_is_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'runs' / 'alice').mkdir(parents=True)
    assert terminal.named_as_on_hub('owner/name-1.5')
    paths = [
        'runs/alica',
        'run/alice',
        './owner/name',
        '/owner',
        '~/name',
        'name',
        'a/b/c',
        '../a',
        '',
        'a/',
    ]
    for path in (*paths, 'owner/name.gguf', 'owner/name.safetensors'):
        assert not terminal.named_as_on_hub(path), path
    assert terminal.near_file('runs/alica') == ' (did you mean runs/alice?)'
    assert terminal.near_file(f'{tmp_path}/run') == f' (did you mean {tmp_path}/runs?)'
    assert terminal.near_file('run/alica') == ' (did you mean runs/alice?)'
    assert terminal.near_file(f'{tmp_path}/run/alice/') == f' (did you mean {tmp_path}/runs/alice?)'
    assert not terminal.near_file('runs/xyz')
    assert not terminal.near_file('gone/alice')
    assert not terminal.near_file('runs/alice')


def table():
    made = Table(title='bytes per step: ' + 'fwd uniform(4), ' * 8, caption='one of two')
    made.add_column('run', overflow='fold')
    for head in ('forward', 'forward ratio', 'backward', 'backward ratio'):
        made.add_column(head, justify='right')
    made.add_row('runs/a', '1,116', '3.67', '580', '')
    return made


def test_a_table_is_as_wide_as_the_terminal_and_a_pipe_gets_lines_whole(capsys, monkeypatch):
    terminal.show(table(), 'memory: it has ' + '23.54 GiB, ' * 30 + 'no more')
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith('bytes per step: fwd')
    assert lines[0].endswith('uniform(4), ')
    assert lines[-1].endswith('23.54 GiB, no more')
    assert [line for line in lines if 'runs/a' in line and '580' in line]
    assert lines[-2] == 'one of two'
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    monkeypatch.setenv('COLUMNS', '60')
    monkeypatch.setenv('TERM', 'xterm')
    terminal.show(table())
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 60 for line in lines)
    said = ' '.join(map(str.strip, lines))
    assert said.endswith('run runs/a, forward 1,116, forward ratio 3.67, backward 580 one of two')


@pytest.mark.parametrize(('width', 'bar'), [(60, False), (100, True)])
def test_a_narrow_terminal_shows_the_time_left(width, bar, capsys, monkeypatch):
    """What is least important goes first, and a wide one has a bar and the time since the start."""
    for name, value in {'COLUMNS': width, 'FORCE_COLOR': 1, 'TERM': 'xterm'}.items():
        monkeypatch.setenv(name, str(value))
    now = [0.0]
    monkeypatch.setattr(progress.time, 'time', lambda: now[0])
    display = progress.Display(4000, 0, examples=64)
    for step in (1, 1252):
        now[0] += 100
        display.update(f'epoch {step}/4000', step, ['loss 0.164', 'accuracy 93.03%'])
    display._bar.refresh()
    display.close()
    said = capsys.readouterr().err
    assert 'epoch 1252/4000  3:40 left  loss 0.164  accuracy 93.03%' in said
    assert ('━' in said) == bar
    assert ('801 ex/s' in said) == bar


def test_processes_of_a_launch_say_a_line_once():
    code = "from jaxmp.terminal import end; end('jaxmp train', 'the same line')"
    done = subprocess.run(
        [*LAUNCH[:-2], '5', '--', sys.executable, '-c', code],
        env=ENV, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count('jaxmp train: the same line\n') == 1
    assert done.stderr.count('same line') == 1
