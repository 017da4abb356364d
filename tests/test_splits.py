"""A model divided between two machines by their speeds and memories, and run so."""

import itertools
import subprocess
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxmp.config import complete, files
from jaxmp.launch.__main__ import free_port
from jaxmp.net.speed import Link
from jaxmp.plan import __main__ as command
from jaxmp.plan import machines, planned, predict, splits
from jaxmp.plan.asked import asked
from jaxmp.plan.choose import Candidate, Order, Probed, actions_of, predicted
from jaxmp.plan.predict import Message, Times
from jaxmp.plan.splits import Machine, Parts
from jaxmp.training.parallel import parallel_of, placed
from tests.base import ENV
from tests.runs import LAUNCH, config_of, hurry_the_probe, records
from tests.runs import command as training

SMALL = (
    '--config=text_gpt2', '--config.model.width=16', '--config.model.blocks=6',
    '--config.data.sequence_length=16', '--config.batch_size=8',
    '--config.parallel.num_microbatches=4',
)  # fmt: skip


def machine(seconds, memory=10**9, count=6):
    return Machine([seconds] * count, [2 * seconds] * count, memory)


def parts(count=6, weights=100, residuals=0, sent=0.0):
    return Parts(True, [weights] * count, [residuals] * count, [sent] * (count - 1), 8)


@pytest.mark.parametrize(
    ('slower', 'blocks'), [(1.0, 3), (2.0, 2), (5.0, 1)]
)  # fmt: skip
def test_a_slower_machine_has_fewer_blocks(slower, blocks):
    found = splits.best(parts(), [machine(slower), machine(1.0)], Link(1000))
    assert found.place.count(0) == blocks


def test_the_best_split_is_that_of_all_predicted():
    """And a memory that holds less than the fast machine is to have moves blocks to the other."""
    two, link = [machine(3.0), machine(1.0)], Link(1000)
    rows = {p: splits.of(p, parts(), two, link).seconds for p in splits.places(6, 2)}
    assert splits.best(parts(), two, link).seconds == min(rows.values())
    assert splits.best(parts(), two, link).place.count(1) == 5
    for memory, blocks in ((450, 4), (300, 3)):
        tight = [two[0], two[1]._replace(memory=memory)]
        assert splits.best(parts(), tight, link).place.count(1) == blocks


def test_what_a_stage_keeps_of_its_micro_batches_needs_memory_too():
    """The first of two stages keeps two of them, the second one."""
    two = [machine(1.0, 900), machine(1.0, 900)]
    found = splits.of((0, 0, 0, 1, 1, 1), parts(residuals=50), two, Link(1000))
    assert found.needs == (3 * 100 + 2 * 3 * 50, 3 * 100 + 3 * 50)


def test_a_model_that_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match=r"no split fits: .*'lora\(8\)'"):
        splits.best(parts(), [machine(1.0, 250), machine(1.0, 250)], Link(1000))
    with pytest.raises(ValueError, match='a model of 1 blocks cannot be divided among 2 machines'):
        splits.best(parts(1), [machine(1.0, count=1)] * 2, Link(1000))


def test_a_cut_where_less_is_sent_is_better_over_a_slow_link():
    given = parts()._replace(sent=[1e6, 1e6, 1e6, 1e3, 1e6])
    two = [machine(0.01), machine(0.01)]
    assert splits.best(given, two, Link(1e6)).place.count(0) == 3
    place = splits.best(given, two, Link(10)).place
    assert place[3] != place[4]


def test_stages_of_one_machine_follow_each_other_without_a_link():
    """Two of three stages on the first machine: F0 F1 | F2 B2 | B1 B0, and both their updates."""
    times = [Times(1.0, 2.0, update=0.5)] * 3
    edges = {(a, b): Message(0.0, None, 0.0) for a, b in ((0, 1), (1, 0))}
    edges |= {(a, b): Message(0.0, 4.0, 0.0) for a, b in ((1, 2), (2, 1))}
    seconds = predict.step(actions_of(Order('gpipe', 1), 3, (0, 0, 1)), times, edges, delay=1.0)
    assert seconds == 2 + (4 + 1) + 3 + (4 + 1) + 4 + 2 * 0.5


def test_a_probe_on_unlike_machines():
    """Stage 0 on a machine of a third of the speed: its actions, its encoder and its decoder."""
    c = Candidate('c', 4.0, 0.0, 1.0, 2.0, 0.0)
    back = c._replace(decode=5.0)
    own = Probed({1: [Times(1.0, 2.0, update=0.5)] * 2}, {(0, 1): [c], (1, 0): [back]})
    found = own.on((1, 0), (1.0, 3.0))
    seconds = predicted(
        found, Link(1), {e: c for e, [c] in found.crossings.items()}, Order('gpipe', 1)
    )
    assert seconds == 3 * (1 + 1) + (2 + 1 + 2 + 1) + 3 * (5 + 2 + 0.5)
    assert own.machines == found.machines == 2


def test_stages_of_one_machine_share_its_time():
    """Three equal stages of four micro-batches: six turns of 3, or 4 x 6 of the machine of two."""
    free = Candidate('raw', 32.0, 0.0, 0.0, 0.0, 0.0)
    codecs = dict.fromkeys(((0, 1), (1, 2), (2, 1), (1, 0)), free)
    own, order = Probed({4: [Times(1.0, 2.0)] * 3}, {}), Order('gpipe', 4)
    assert predicted(own, Link(1), codecs, order) == 6 * 3
    assert predicted(own.on((0, 0, 1), (1.0, 1.0)), Link(1), codecs, order) >= 4 * 6
    assert own.on((0, 0, 1), (1.0, 1.0)).machines == 2


@pytest.mark.parametrize('text', ['0 1', '0 0 2', '0 x 1', '0 0 1 1', ','])
def test_a_place_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"config\.parallel\.place=.* give it as '0 0 1'"):
        placed(text, (0, 1, 2))


def test_processes_have_the_stages_of_their_place():
    config = config_of(runtime='mpmd', place='1 0 0 0', num_microbatches=2)
    parallel = parallel_of(config, 4)
    assert [parallel.stages_of_process(i, 2) for i in (0, 1)] == [[1, 2, 3], [0]]
    config.parallel.update(schedule='interleaved')
    with pytest.raises(ValueError, match='stages of a device in the same one'):
        parallel_of(config, 4).places()


@pytest.mark.slow
def test_an_unequal_split_trains_to_the_same_bits(tmp_path):
    """Three stages in process 0 and the first in process 1, beside two and two."""
    found = []
    for place in ('', '1 0 0 0'):
        workdir = tmp_path / f'of{place.replace(" ", "")}'
        words = training(workdir, runtime='mpmd', place=place, num_microbatches=2)
        subprocess.run([*LAUNCH, *words], env=ENV, check=True, capture_output=True, timeout=300)
        found.append([{k: v for k, v in r.items() if 'loss' in k} for r in records(workdir)])
    assert found[0]
    assert found[0] == found[1]


def listening(port, monkeypatch, speeds=(1.0, 1.0), memories=(10**12, 10**12)):
    """A machine that answers a call, in a thread; both have made-up speeds and memories.

    With speeds of 0 they are measured.
    """
    turns, real = iter((0, 1)), machines.machine

    def measured(exp, count):
        turn = next(turns)
        one = real(exp, count) if not speeds[turn] else machine(speeds[turn], count=count)
        assert len(one.forward) == len(one.backward) == count
        assert min(*one.forward, *one.backward) > 0
        return one._replace(memory=memories[turn])

    monkeypatch.setattr(machines, 'machine', measured)
    words = [*SMALL, f'--listen=127.0.0.1:{port}']
    ask = asked(words, 'jaxmp pays', '', 'pays.png')
    run = lambda: machines.listen(ask, ask.config()[0], planned.probed_experiment, calls=1)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def compared(port):
    ask = asked([*SMALL, f'--peer=127.0.0.1:{port}'], 'jaxmp plan', '', 'plan.py')
    return machines.compared(ask, ask.config()[0], planned.probed_experiment)


@pytest.mark.slow
def test_two_machines_are_measured_and_a_memory_limit_forces_a_cut(monkeypatch):
    """The caller is three times as fast, and has memory for two of the six blocks alone."""
    monkeypatch.setattr(machines.between, 'LONG', 0.1)
    rows = []
    for memory in (10**12, None):
        if memory is None:
            needs = rows[0].split.needs[1]
            memory = 0.5 * needs
        port = free_port()
        thread = listening(port, monkeypatch, (3.0, 1.0), (10**12, memory))
        rows.append(compared(port))
        thread.join(20)
    free, tight = rows
    assert free.slower == [3.0, 1.0]
    assert [free.split.place.count(m) for m in (0, 1)] == [1, 5]
    assert tight.split.place.count(1) < 5
    assert tight.split.needs[1] <= memory
    assert free.link.rate > 1
    assert free.link.delay < 100


def test_a_machine_with_a_share_of_its_processor_is_as_fast_as_its_share(monkeypatch):
    """It runs for one pass of three and stands still for two."""
    passes = itertools.cycle([[1.0, 1.0], [1.0, 1.0], [1.0, 7.0]])
    trainer = SimpleNamespace(create=lambda: None, weights=lambda state: [])
    monkeypatch.setattr(machines, 'Trainer', lambda *given: trainer)
    monkeypatch.setattr(machines, 'passes', lambda *given: lambda split: [next(passes)] * 2)
    now = itertools.count(0.0, machines.SECONDS / 5.5)
    monkeypatch.setattr(machines.time, 'monotonic', lambda: next(now))
    found = machines.machine(None, 2)
    np.testing.assert_allclose(found.seconds, 2 * (1 + 3), rtol=0.2)
    assert found.forward == found.backward


@pytest.mark.slow
def test_a_plan_for_two_machines_is_written(tmp_path, monkeypatch, capsys):
    """Both are measured, and are alike; the file has the cut and the place."""
    monkeypatch.chdir(tmp_path)
    hurry_the_probe(monkeypatch)
    monkeypatch.setattr(command, 'UNIFORM', (('raw', 'raw'), ('uniform(8)', 'uniform(8)')))
    monkeypatch.setattr(machines.between, 'LONG', 0.1)
    port = free_port()
    thread = listening(port, monkeypatch, (0, 0))
    command.main([*SMALL, f'--peer=127.0.0.1:{port}', '--seconds=1'])
    thread.join(20)
    shown = ' '.join(capsys.readouterr().out.split())
    assert 'The other machine is ' in shown
    assert f'--coordinator=127.0.0.1:{port} --processes=2 --process=1 here' in shown
    config = complete(files.load('plan.py'))
    assert sorted(config.parallel.place.split()) == ['0', '1']
    assert 1 <= int(config.model.cuts) <= 5
    assert config.parallel.runtime == 'mpmd'


def test_listen_is_of_pays(capsys):
    with pytest.raises(SystemExit, match='--listen is of `jaxmp pays`'):
        command.main(['--listen=127.0.0.1:9876'])
