"""Tables of exchanges, of runs with replicas."""

import json

import pytest

from jaxmp.training import loop
from study.report import exchanges
from tests.base import ROOT
from tests.test_dataparallel import flat, small  # noqa: F401, a fixture of its runs


@pytest.mark.slow
def test_report_of_runs(tmp_path):
    for name, text in (('plain', 'mean'), ('halves', 'all_reduce(fp16)')):
        config = small(exchange=text, epochs=1)
        config.name = name
        loop.train_and_evaluate(config, tmp_path / name, quiet=True)
    again = json.loads((tmp_path / 'plain' / 'summary.json').read_text())
    again['test']['off']['last']['loss'] += 0.2
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'summary.json').write_text(json.dumps({**again, 'seed': 1}))
    exchanges.main([str(tmp_path), '--out', str(tmp_path / 'out')])
    page = (tmp_path / 'out' / 'README.md').read_text()
    rows = [line for line in page.splitlines() if line.startswith('| `')]
    assert [r.split('`')[1] for r in rows] == ['mean', 'all_reduce(fp16)']
    assert '± 0.1000 |' in rows[0]
    assert (tmp_path / 'out' / 'curves.png').read_bytes().startswith(b'\x89PNG')
    exchanges.main([str(tmp_path / 'out'), '--out', str(tmp_path / 'again')])
    assert (tmp_path / 'again' / 'README.md').read_text() == page
    (tmp_path / 'none').mkdir()
    with pytest.raises(SystemExit, match='no finished run with replicas'):
        exchanges.main([str(tmp_path / 'none'), '--out', str(tmp_path / 'x')])


@pytest.mark.parametrize(
    'folder', ['mnist_dataparallel', 'mnist_dataparallel_100', 'text_gpt2_diloco']
)
def test_the_committed_table_is_what_the_command_makes(folder):
    rows = ROOT / 'results' / folder
    runs = exchanges.load(rows / 'cpu' if (rows / 'cpu').exists() else rows)
    page = (rows / 'README.md').read_text()
    assert f'{exchanges.table(runs)}\n\n{exchanges.note(runs)}\n' in page
