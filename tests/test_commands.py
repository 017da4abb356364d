"""The console script: each command's --help, a bad argument, and runs compared."""

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest

from jaxmp.__main__ import COMMANDS, main
from tests.base import ENV, ROOT

BAD = {
    'train': (['--config.model.widht=3'], r'no key config\.model\.widht \(did you mean .*width'),
    'sweep': (['nowhere.py', '--scale=cpu'], r'nowhere\.py is not a Python file; give one with'),
    'report': (['/nowhere', '--out', 'x'], r'/nowhere has no result of a finished run'),
    'compare': (['/nowhere'], r'/nowhere is not a run: .*; give workdirs or result files'),
    'evaluate': (['/nowhere'], 'there is no run /nowhere; give the workdir of one$'),
    'fit': (
        ['/nowhere', '--text=x.txt', '--bits=3'],
        r'--text=x\.txt is not there, .*; give a text',
    ),
    'fold': (['/nowhere'], 'jaxmp fold: there is no run /nowhere; give the workdir of one$'),
    'generate': (['/nowhere'], r'there is no /nowhere; give a folder with config\.json'),
    'launch': (['--processes', '0', '--', 'x'], r'--processes 0: give 1 or more'),
    'pays': (['--link=fast'], '--link=fast: not a rate above 0'),
    'plan': (['--link=fast'], r'--link=fast: not a rate above 0, .*such as --link=100mbit,50ms'),
    'bench': (['top_k(10)'], r'top_k fraction 10 is not in \(0, 1\]; for 10 % write top_k'),
    'switch': (['--address=x'], 'is not host:port'),
    'codecs': (['nowhere.words'], r"cannot import 'nowhere\.words'"),
}


def run(words, capsys):
    """Output, errors and status of a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    code = ended.value.code
    return out, err + (code if isinstance(code, str) else ''), code


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_has_help_and_refuses_nonsense(command, capsys, monkeypatch):
    """And leaves the signals of a process that is not its own: SIGPIPE once ended pytest's."""
    monkeypatch.chdir(ROOT)
    handlers = [signal.getsignal(n) for n in (signal.SIGPIPE, signal.SIGINT)]
    out, _, code = run([command, '--help'], capsys)
    assert code in (0, None)
    assert 'usage' in out or 'flags:' in out
    words, message = BAD[command]
    out, err, code = run([command, *words], capsys)
    assert code not in (0, None)
    assert re.search(message, err), err
    assert handlers == [signal.getsignal(n) for n in (signal.SIGPIPE, signal.SIGINT)]


def test_no_command_lists_them_and_a_misspelt_one_is_guessed(capsys):
    main([])
    assert all(f'jaxmp {name} ' in capsys.readouterr().out for name in ['train'])
    _, err, _ = run(['trian'], capsys)
    assert 'did you mean train?' in err
    main(['--version'])
    assert re.fullmatch(r'jaxmp \d+\.\d+\.\d+\n', capsys.readouterr().out)


def test_help_of_train_lists_configurations_and_the_keys_of_the_one_chosen(capsys):
    out, _, _ = run(['train', '--config=text_gpt2', '--help'], capsys)
    assert re.search(r'--config=cifar10_resnet18 +The paper', out)
    assert re.search(r'--config\.model\.heads=4 +attention heads', out)
    assert re.search(
        r"--config\.optimizer\.name='adamw' +optimizer \(sgd, adamw, muon\), or own", out
    )
    assert 'jaxmp codecs' in out


def test_runs_are_compared(tmp_path, capsys, monkeypatch):
    """A finished run, one with another seed, and a workdir whose run has not ended."""
    monkeypatch.chdir(tmp_path)
    kept = [ROOT / 'results' / 'cpu' / f'{n}.json' for n in ('none-s0', 'top10-s0', 'top10-s1')]
    config = json.loads(kept[0].read_text())['config']
    begun = tmp_path / 'begun'
    begun.mkdir()
    (begun / 'config.json').write_text(json.dumps({**config, 'name': 'begun'}))
    scores = {'step': 1, 'epoch': 1, 'loss': 2.0, 'accuracy': 0.25, 'seconds': 1.0}
    records = [{'kind': 'train', **scores}]
    records += [{'kind': 'test', 'compression': m, **scores} for m in ('off', 'on')]
    (begun / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, records)) + '\n')
    run(['compare', *map(str, kept), str(begun), '--out', 'c.png'], capsys)
    assert (tmp_path / 'c.png').read_bytes().startswith(b'\x89PNG')
    out, _, _ = run(['compare', *map(str, kept), str(begun)], capsys)
    told = [tmp_path / name for name in out.splitlines()[-1].split()]
    assert [p.name for p in told if p.stat().st_size] == ['compare.png', 'compare.svg']
    _, err, status = run(['compare', str(kept[0]), '--out', 'x.pdf'], capsys)
    assert status == 2
    assert 'x.pdf: pictures are PNG and SVG; give x.png' in err
    last = json.loads(kept[1].read_text())['test']['on']['last']['accuracy']
    assert re.search(rf'{kept[1]}, seed 0 .* epochs .* {last:.2%} ', out)
    assert f'{kept[2]}, seed 1 ' in out
    assert re.search(rf'{begun} .* 1 epoch .* 25\.00% .* not ended', out)
    reads = {**config['data'], 'files': '*.txt'}
    (begun / 'config.json').write_text(json.dumps({**config, 'name': 'reads', 'data': reads}))
    out, _, _ = run(['compare', str(begun)], capsys)
    assert re.search(rf'{begun} .* perplexity .* 7\.389 .* not ended', out)
    (begun / 'metrics.jsonl').write_text('')  # stopped before its first test
    (begun / 'checkpoints' / '6251').mkdir(parents=True)
    (begun / 'checkpoints' / '9.orbax-checkpoint-tmp-1').mkdir()
    out, _, _ = run(['compare', str(begun)], capsys)
    assert re.search(rf'{begun} .* 6,251 steps .* not ended', out)
    _, err, _ = run(['compare', str(begun)[:-1]], capsys)
    assert f'(did you mean {begun}?)' in err
    for command in ('compare', 'evaluate', 'fold', 'generate'):
        _, err, _ = run([command, f'{tmp_path}x/begun'], capsys)
        assert f'(did you mean {begun}?)' in err, err
    old = shutil.copy(kept[0], tmp_path / 'old.json')
    (tmp_path / 'old.json').write_text(
        json.dumps({**json.loads(kept[0].read_text()), 'config': {'lr': 0.1}})
    )
    _, err, _ = run(['compare', str(old)], capsys)
    assert 'python results/migrate.py' in err


def test_a_run_that_has_not_ended_is_compared(tmp_path, capsys, monkeypatch):
    """One of an older version, one whose records begin with a boundary's, and its own metric."""
    monkeypatch.chdir(tmp_path)
    result = json.loads((ROOT / 'results' / 'cpu' / 'none-s0.json').read_text())
    scores = {'step': 1, 'epoch': 1, 'loss': 2.0, 'top5': 0.75, 'accuracy': 0.25}
    records = [{'kind': 'boundary', 'step': 1, 'epoch': 1, 'error': 0.5}]
    records += [{'kind': 'test', 'compression': m, **scores} for m in ('off', 'on')]
    (tmp_path / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, records)) + '\n')
    for metric, said in (
        ('', r'accuracy .* 25\.00%'),
        ('own.py:top5', r'top5 .* 0\.75'),
        ('own.py:OTHER', 'accuracy'),
        ('loss', r'loss .* 2\.0000'),
    ):
        config = {**result['config'], 'metric': metric}
        (tmp_path / 'config.json').write_text(json.dumps(config))
        out, _, _ = run(['compare', str(tmp_path)], capsys)
        assert re.search(said, out), metric
    (tmp_path / 'config.json').write_text(json.dumps({'name': 'x', 'model': 'gpt2', 'lr': 0.1}))
    _, err, _ = run(['compare', str(tmp_path)], capsys)
    assert f'version; convert it with python results/migrate.py {tmp_path / "config.json"}' in err
    (tmp_path / 'config.json').write_text(json.dumps([1]))
    _, err, _ = run(['compare', str(tmp_path)], capsys)
    assert 'is not a run: its config.json has no settings' in err


def test_a_run_that_has_not_ended_without_an_accuracy_is_compared_by_its_loss(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = json.loads((ROOT / 'results' / 'cpu' / 'none-s0.json').read_text())['config']
    (tmp_path / 'config.json').write_text(json.dumps(config))
    scores = {'step': 1, 'epoch': 1, 'loss': 2.0, 'own': 0.75}
    records = [{'kind': 'test', 'compression': m, **scores} for m in ('off', 'on')]
    (tmp_path / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, records)) + '\n')
    out, _, _ = run(['compare', str(tmp_path)], capsys)
    assert re.search(r'loss .* 2\.0000', out)


def test_the_console_script_is_the_package(tmp_path):
    """From a folder that holds the clone's parent's name, too: `python -m jaxmp` is the package."""
    done = subprocess.run(
        [sys.executable, '-m', 'jaxmp', 'codecs', '--help'], cwd=tmp_path, env=ENV,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 'very word of the algebra' in done.stdout
