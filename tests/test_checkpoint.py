"""Checkpoints: what is damaged is passed over, and what cannot be written empties nothing."""

import gc
import itertools
import json
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxmp.net.connect import processes
from jaxmp.training import checkpoint, portable
from jaxmp.training.portable import Portable
from jaxmp.training.workdir import locks


def state_at(step):
    r = np.random.default_rng(step)
    part = {'params': {'w': r.standard_normal((40, 30), np.float32)}, 'exchange': [()]}
    return Portable(np.int32(step), r.integers(0, 2**32, 2, np.uint32), {'0.0': part})


LIKE = state_at(0)


def same(a, b):
    words = lambda s: (s.parts['0.0']['params']['w'], s.key, s.step)
    return all(np.array_equal(x, y) for x, y in zip(words(a), words(b), strict=True))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A workdir with checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp('saved')
    kept = checkpoint.Checkpoints(folder)
    for step in (5, 10):
        kept.save(step, state_at(step), {'steps': step})
    kept.close()
    return folder


@pytest.fixture(autouse=True)
def nothing_older_is_searched():
    """A restore that passes something over collects; programs of other tests are millions."""
    gc.freeze()
    yield
    gc.unfreeze()


def flip(path):
    content = bytearray(path.read_bytes())
    for i in np.random.default_rng(0).integers(0, len(content), 8):
        content[i] ^= 0x55
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_whatever_is_damaged_the_state_is_a_saved_one(saved, tmp_path):
    """Every file of the newest: flipped bytes, and cut in half or removed in turns."""
    newest = saved / 'checkpoints' / '10'
    names = sorted(p.relative_to(newest) for p in newest.rglob('*') if p.is_file())
    passed_over = set()
    worse = itertools.cycle([cut, None])
    for number, (name, damage) in enumerate((n, d) for n in names for d in (flip, next(worse))):
        workdir = tmp_path / str(number)
        shutil.copytree(saved, workdir)
        path = workdir / 'checkpoints' / '10' / name
        damage(path) if damage else path.unlink()
        kept = checkpoint.Checkpoints(workdir)
        state, place = kept.restore(LIKE)
        step = place['steps']
        assert same(state, state_at(step)), (name, damage)
        assert list(kept.damaged) == ([10] if step == 5 else []), (name, damage)
        if step == 5:
            assert (workdir / 'damaged' / '10').is_dir()
            if not passed_over:
                kept.save(10, state_at(10), {'steps': 10})  # in the place of the damaged one
                assert kept.restore(LIKE)[1] == {'steps': 10}
                assert sorted(kept._manager.all_steps()) == [5, 10]
            passed_over.add(name.parts[0])
        kept.close()
    assert passed_over >= {'place', 'state'}


def test_a_wrong_number_is_named(saved, tmp_path):
    """Bytes that decode, into another array."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    kept = checkpoint.Checkpoints(tmp_path)
    kept._manager.delete(10)
    good, wrong = state_at(10), state_at(10)
    wrong.parts['0.0']['params']['w'][7, 7] += 1
    (good,), (wrong,) = (portable.to_pieces(s) for s in (good, wrong))
    about = {'place': {'steps': 10}, 'layout': portable.layout(LIKE)}
    about |= {'bytes': [len(good)], 'crc32': [zlib.crc32(good)]}
    both = ocp.args.Composite(
        state=ocp.args.PyTreeSave({'rows': checkpoint.joined([wrong])}),
        place=ocp.args.JsonSave({**about, 'sum': checkpoint._sum(about)}),
    )
    kept._manager.save(10, args=both)
    state, _ = kept.restore(LIKE)
    assert same(state, state_at(5))
    assert kept.damaged == {10: 'the part of process 0 has another checksum'}
    kept.close()


def test_no_checkpoint_is_good(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for step in ('5', '10'):
        (tmp_path / 'checkpoints' / step / 'place' / 'metadata').write_text('{')
    kept = checkpoint.Checkpoints(tmp_path)
    with pytest.raises(
        locks.WorkdirError, match=r'can be read \(step 10: .*; step 5: .*remove that'
    ):
        kept.restore(LIKE)
    assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == ['10', '5']
    kept.close()


def test_a_full_disk_is_one_line(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    kept = checkpoint.Checkpoints(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=0))
    with pytest.raises(locks.WorkdirError, match=r'step 15 to .*, and 0 are; free space') as caught:
        kept.save(15, state_at(15), {})
    assert '\n' not in str(caught.value)
    assert same(kept.restore(LIKE)[0], state_at(10))
    kept.close()


def test_a_checkpoint_asks_for_the_room_of_its_state(tmp_path, monkeypatch):
    """A state of 3 MB onto a disk with 2 MB, before there is another and after."""
    state = Portable(np.int32(1), np.zeros(2, np.uint32), {'0.0': {'w': np.ones(750_000, 'f')}})
    kept, usage = checkpoint.Checkpoints(tmp_path), shutil.disk_usage(tmp_path)
    for step in (1, 2):
        monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=2_000_000))
        with pytest.raises(locks.WorkdirError, match=r'3,000,\d{3} bytes must be free, and 2'):
            kept.save(step, state, {})
        monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=2**30))
        kept.save(step, state, {})
    assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == ['1', '2']
    kept.close()


def test_the_configuration_stands_beside_the_first_checkpoint(tmp_path):
    kept = checkpoint.Checkpoints(tmp_path, config={'lr': 0.1})
    assert not (tmp_path / 'config.json').exists()
    kept.save(1, state_at(1), {})
    assert json.loads((tmp_path / 'config.json').read_text()) == {'lr': 0.1}
    kept.close()


def test_a_checkpoint_is_of_its_inputs(tmp_path):
    """One of before there were digests is of any."""
    for step, inputs in ((1, None), (2, {'train.x': 'a', 'test.x': 'b'})):
        kept = checkpoint.Checkpoints(tmp_path, inputs=inputs)
        kept.save(step, state_at(step), {})
        kept.close()
        for now in ({}, {'train.x': 'a'}, {'train.x': 'a', 'config.model.path': 'c'}):
            found, _ = checkpoint.Checkpoints(tmp_path, inputs=now).restore(LIKE)
            assert same(found, state_at(step))
    with pytest.raises(
        locks.WorkdirError, match=r'2 is of a run on other .*: test\.x b \(now c\); give'
    ) as caught:
        checkpoint.Checkpoints(tmp_path, inputs={'train.x': 'a', 'test.x': 'c'}).restore(LIKE)
    assert '\n' not in str(caught.value)


def test_a_step_is_saved_once(tmp_path):
    """A run that is resumed to end at the step of its checkpoint has nothing new to save."""
    kept = checkpoint.Checkpoints(tmp_path)
    for place in ({'steps': 1}, {'steps': 0}):
        kept.save(3, state_at(3), place)
    assert kept.restore(LIKE)[1] == {'steps': 1}


def test_a_large_array_is_saved_apart_and_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(portable, 'LARGE', 1000)
    state = state_at(1)
    large = [a for a in jax.tree.leaves(state.parts) if a.nbytes >= 1000]
    _, *pieces = portable.to_pieces(state)
    assert len(pieces) == len(large) > 0
    assert all(np.shares_memory(piece, a) for piece, a in zip(pieces, large, strict=True))
    kept = checkpoint.Checkpoints(tmp_path)
    for step in (1, 2):
        kept.save(step, state_at(step), {'steps': step})
    assert same(kept.restore(LIKE)[0], state_at(2))
    monkeypatch.setattr(portable, 'LARGE', 2**24)  # it is read whatever is large now
    assert same(kept.restore(LIKE)[0], state_at(2))
    about = tmp_path / 'checkpoints' / '2' / 'place' / 'metadata'
    text = json.loads(about.read_text())
    text['large'][0][0] += 1
    text['sum'] = checkpoint._sum({k: v for k, v in text.items() if k != 'sum'})
    about.write_text(json.dumps(text))
    assert same(kept.restore(LIKE)[0], state_at(1))
    assert 'the part of process 0 has another checksum' in kept.damaged[2]
    kept.close()


@pytest.mark.parametrize('large', [2**24, 50])
def test_processes_share_the_folder_of_the_first(tmp_path, monkeypatch, large):
    """The others have no folder; each gets its part, and what others share with it."""
    monkeypatch.setattr(portable, 'LARGE', large)
    arrays = np.random.default_rng(0).standard_normal((5, 7, 3), np.float32)
    part = lambda s: {
        'params': {'w': arrays[s][: s + 1]},
        'exchange': [()],
        'feedback': {'right_tx': arrays[s][: s + 2]},
    }
    places = [(0, 1), (2,), (3, 4)]

    def process(group, peers):
        own = Portable(
            np.int32(3), np.zeros(2, np.uint32), {f'{s}.0': part(s) for s in places[group]}
        )
        folder = tmp_path / str(group)
        kept = checkpoint.Checkpoints(folder, peers[group])
        none = kept.restore(own)
        kept.save(3, own, {'steps': 3})
        found, place = kept.restore(own)
        kept.close()
        return none, place, found.parts

    with processes(3) as groups, ThreadPoolExecutor(3) as threads:
        found = list(threads.map(process, range(3), [groups] * 3))
    assert [none for none, _, _ in found] == [None] * 3
    assert [place for _, place, _ in found] == [{'steps': 3}] * 3
    assert [sorted(parts) for _, _, parts in found] == [
        ['0.0', '1.0', '2.0'], ['0.0', '1.0', '2.0', '3.0'], ['0.0', '2.0', '3.0', '4.0']
    ]  # fmt: skip
    for own, (_, _, parts) in zip(places, found, strict=True):
        for k, tree in parts.items():
            want = part(int(k[0]))
            assert ('params' in tree) == (int(k[0]) in own)
            for name in tree.keys() - {'exchange'}:
                jax.tree.map(np.testing.assert_array_equal, tree[name], want[name])
    assert [p.name for p in tmp_path.iterdir()] == ['0']
    alone = checkpoint.Checkpoints(tmp_path / '0')
    like = Portable(0, 0, {f'{s}.0': part(s) for s in range(5)})
    assert sorted(alone.restore(like)[0].parts) == [f'{s}.0' for s in range(5)]
    alone.close()


def test_who_stays_goes_on_from_its_own_memory(tmp_path, monkeypatch):
    """The process that comes back gets its part; the other one only what is shared with it."""
    arrays, sent = np.random.default_rng(0).standard_normal((2, 300), np.float32), []
    rows = [{'params': {'w': a}, 'exchange': [()], 'feedback': {'left_tx': a[:3]}} for a in arrays]
    memories, plain = [{}, {}], portable.needed

    def needed(*args):
        sent.append({k for k, tree in plain(*args).parts.items() if 'params' in tree})
        return plain(*args)

    def process(i, groups, save):
        own = Portable(np.int32(3), np.zeros(2, np.uint32), {f'{i}.0': rows[i]})
        kept = checkpoint.Checkpoints(tmp_path, groups[i], memory=memories[i])
        if save:
            kept.save(3, own, {'steps': 3})
        found, place = kept.restore(own)
        kept.close()
        assert (int(found.step), place) == (3, {'steps': 3})
        np.testing.assert_array_equal(found.parts[f'{i}.0']['params']['w'], arrays[i])
        for k in (0, 1):
            left = found.parts[f'{k}.0']['feedback']['left_tx']
            np.testing.assert_array_equal(left, arrays[k, :3])

    monkeypatch.setattr(portable, 'needed', needed)
    for save, lost in ((True, ()), (False, (1,)), (False, (0,)), (False, (0, 1))):
        sent.clear()
        for i in lost:
            memories[i].clear()
        with processes(2) as groups, ThreadPoolExecutor(2) as threads:
            list(threads.map(process, range(2), [groups] * 2, [save] * 2))
        assert sent == [{f'{i}.0'} if not memories[i] else set() for i in range(2)]
    assert memories == [{}, {}]
