"""A run's folder: one run at a time, files whole or not at all, and what binds a later start."""

import errno
import fcntl
import json
import os
import resource
import socket
import threading
from contextlib import contextmanager

import pytest

from jaxmp.training import loop
from jaxmp.training.workdir import locks, records
from tests.runs import SMALL, config_of

GONE = 2**22 + 1  # above any process number of Linux


def small(**changes):
    return config_of(**{'model': 'lenet', 'fwd': 'raw', 'bwd': 'raw', **SMALL, **changes})


@contextmanager
def held(folder):
    """Another thread holds the lock of ``folder``."""
    taken, done = threading.Event(), threading.Event()

    def hold():
        with locks.locked(folder) as mine:
            assert mine
            taken.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(20)
    yield
    done.set()
    thread.join()


@contextmanager
def full_disk(size=0):
    """No file of this process may grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_two_runs_in_one_workdir_are_refused(tmp_path):
    me = f'process {os.getpid()} on {socket.gethostname()}; wait'
    with held(tmp_path), pytest.raises(locks.WorkdirError, match=f'is in use by {me}'):
        loop.train_and_evaluate(small(), tmp_path)
    assert os.listdir(tmp_path) == ['lock']
    with locks.locked(tmp_path) as mine:
        assert mine
        with locks.owned(tmp_path):  # as a sweep and its run
            pass
        with locks.locked(tmp_path) as again:  # as two sweeps
            assert not again


@pytest.mark.parametrize(
    ('text', 'free'),
    [
        ('', True),
        (f'{socket.gethostname()} {GONE}', True),
        (f'{socket.gethostname()} {os.getpid()}', False),
        ('elsewhere 1', False),
        ('no number', True),
    ],
    ids=['empty', 'gone', 'this', 'elsewhere', 'no number'],
)
def test_without_locks_the_process_in_the_file_counts(tmp_path, monkeypatch, text, free):
    def refuse(*_):
        raise OSError(errno.ENOLCK, 'No locks available')

    (tmp_path / 'lock').write_text(text)
    with locks.locked(tmp_path) as mine:
        assert mine, 'a lock that is not held counts for nothing'
    monkeypatch.setattr(fcntl, 'flock', refuse)
    (tmp_path / 'lock').write_text(text)
    with locks.locked(tmp_path) as mine:
        assert mine == free
    if 'elsewhere' in text:
        with pytest.raises(locks.WorkdirError, match=r'1 on elsewhere \(if it has ended, remove'):
            locks.owned(tmp_path).__enter__()


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path, folder = tmp_path / 'a.json', tmp_path / 'model'
    locks.write(path, 'old')
    for text in ('one', 'two'):
        with locks.replacing(folder) as part:
            part.mkdir()
            (part / text).write_text(text)
    assert os.listdir(folder) == ['two']
    with (
        full_disk(4),
        pytest.raises(locks.WorkdirError, match=r'cannot write .*a\.json: .*; free space'),
    ):
        locks.write(path, 'new and long')
    with pytest.raises(ZeroDivisionError), locks.replacing(folder) as part:
        part.mkdir(mode=0o700 // 0)
    assert path.read_text() == 'old'
    assert os.listdir(folder) == ['two']
    assert sorted(os.listdir(tmp_path)) == ['a.json', 'model']


def test_a_tuple_in_the_settings_is_no_other_setting(tmp_path):
    config = {'own': (16, 32)}
    locks.write_json(tmp_path / 'config.json', config)
    locks.claim(tmp_path, config)
    with pytest.raises(locks.WorkdirError, match=r'own=\[16, 32\] \(now \[16, 8\]\)'):
        locks.claim(tmp_path, {'own': (16, 8)})


def record(step):
    return {'kind': 'train', 'step': step, 'epoch': 1, 'loss': 0.5, 'accuracy': 0.5}


def test_a_record_is_appended_whole_or_dropped(tmp_path):
    metrics = records.Records(tmp_path, 0)
    metrics.write(record(1))
    path = tmp_path / 'metrics.jsonl'
    size = path.stat().st_size
    with full_disk(size + 9), pytest.raises(locks.WorkdirError, match=r'cannot write .*metrics'):
        metrics.write(record(2))
    metrics.close()
    assert path.stat().st_size == size + 9
    with full_disk(), pytest.raises(locks.WorkdirError, match=r'cannot write .*metrics'):
        records.Records(tmp_path, 2)
    assert records.read(path) == [record(1)]
    records.Records(tmp_path, 2).close()
    assert path.stat().st_size == size


def test_a_failed_start_empties_nothing_and_does_not_bind(tmp_path, monkeypatch):
    kept = {
        'config.json': '{"optimizer": {"lr": 0.5}}',
        'metrics.jsonl': json.dumps(record(1)) + '\n',
    }
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    with full_disk(), pytest.raises(locks.WorkdirError, match='cannot use the workdir'):
        loop.train_and_evaluate(small(), tmp_path)
    assert {n: (tmp_path / n).read_text() for n in kept} == kept
    (tmp_path / 'config.json').unlink()

    def full():
        raise MemoryError

    made = loop.prepare(small(), loop.ProcessGroup())
    made.create = full
    for lr in (0.1, 0.2):
        with pytest.raises(MemoryError):
            loop.train_and_evaluate(small(lr=lr), tmp_path, trainer=made)
    assert not (tmp_path / 'config.json').exists()
