"""Text: tokenisers, blocks, WikiText-2 in its forms, the embedded book, and what is refused."""

import hashlib
import io
import json
import urllib.error
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxmp import data
from jaxmp.data import text, tokenizer, wikitext
from jaxmp.models import huggingface

ROWS = [' \n', ' = Title = \n', ' \n', ' Some words , né .\n', ' \n', ' = = Part = = \n', 'x' * 40]


def test_alice():
    alice = text.load('alice', 128)
    assert (alice.name, alice.classes, alice.mean) == ('alice', 256, ())
    assert alice.train.x.shape == (982, 128)
    assert alice.test.x.shape == (177, 128)
    assert alice.train.x.dtype == np.int32
    assert alice.train.x is alice.train.y
    t = tokenizer.byte_level()
    assert 'Alice was beginning to get very tired' in t.decode(alice.train.x[:9].reshape(-1))
    assert 'CHAPTER XI\n' in t.decode(alice.test.x[0])


def test_notice_is_of_this_file():
    folder = Path(data.__file__).parent
    digest = hashlib.sha256((folder / 'alice.txt').read_bytes()).hexdigest()
    assert digest in (folder / 'alice.NOTICE').read_text()


def test_ids_never_move():
    x = text.load('alice', 64).train.x
    assert hashlib.sha256(x.tobytes()).hexdigest()[:16] == '030a3f73b1a234a8'


def test_batches_of_text():
    alice = text.load('alice', 64)
    order = data.order(0, 0, len(alice.train.y))
    first = next(data.batches(alice.train, 8, order))
    assert first['x'].shape == first['y'].shape == (8, 64)
    np.testing.assert_array_equal(first['x'], alice.train.x[first['id']])
    assert sum(b['mask'].sum() for b in data.batches(alice.test, 8, pad=True)) == len(alice.test.y)
    assert len(data.take(alice.train, 5).y) == 5


@pytest.mark.parametrize('sample', ['', 'plain', 'né 漢字 \U0001f600', '\x00\r\n'])
def test_bytes_go_out_and_in(sample):
    t = tokenizer.byte_level()
    (ids,) = t.encode([sample])
    assert ids.dtype == np.int32
    assert len(ids) == len(sample.encode())
    assert t.decode(ids) == sample


def test_blocks_by_hand():
    rows = [np.arange(a, b) for a, b in ((0, 3), (3, 3), (3, 10), (10, 12), (12, 17))]
    assert text.blocks(rows, 4).tolist() == np.arange(16).reshape(4, 4).tolist()
    # Rows 0-2 are 10 tokens, rows 3-4 are 7: two blocks and one, the rest is dropped.
    assert text.blocks(rows, 4, rows=3).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [10, 11, 12, 13]]


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: text.load('iliad', 8), "no text 'iliad'; allowed are alice, wikitext-2, wiki"),
        (
            lambda: text.load('alice', 30_000),
            'alice, test has 22679 tokens, less than one block of 30000; shorten the blocks',
        ),
        (lambda: text.blocks([np.arange(3)] * 9, 4, rows=1), 'has 3 tokens in every 1 rows'),
        (lambda: text.blocks([], 4), 'the text has 0 tokens'),
        (
            lambda: text.load('alice', 9, 'bpe-256'),
            'a tokeniser of 256 tokens from some text; give',
        ),
        (lambda: tokenizer.tokenizer_of('bpe-500'), 'a tokeniser of 500 tokens from no text; give'),
        (lambda: text.load('alice', 1), 'blocks of 1 tokens have no prediction'),
        (lambda: text.load('wikitext-2', 8), 'data_dir is None; pass the folder that holds'),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def write_bpe(folder, **extra):
    """A byte-level BPE with one merge: all bytes, ``he`` and an end mark."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = [*sorted(ByteLevel.alphabet()), 'he', '<|endoftext|>']
    vocabulary = {w: i for i, w in enumerate(words)} | extra
    (folder / 'vocab.json').write_text(json.dumps(vocabulary), encoding='utf-8')
    (folder / 'merges.txt').write_text('#version: 0.2\nh e\n', encoding='utf-8')
    return vocabulary


def test_bpe(tmp_path):
    vocabulary = write_bpe(tmp_path)
    t = tokenizer.from_folder(str(tmp_path))
    assert t.size == len(vocabulary) == 258
    samples = ['the né 漢\n', '', 'h e', 'he<|endoftext|>']
    found = t.encode(samples)
    assert found[0].tolist()[:3] == [vocabulary['t'], vocabulary['he'], vocabulary['Ġ']]
    assert found[1].shape == (0,)
    assert found[2].tolist() == [vocabulary[c] for c in ('h', 'Ġ', 'e')]
    assert found[3].tolist() == [256, 257]
    assert [t.decode(ids) for ids in found] == samples


def test_bpe_of_a_text(tmp_path):
    write_bpe(tmp_path)
    alice = text.load('alice', 64, str(tmp_path))
    assert alice.classes == 258
    assert 0 < len(alice.train.y) < 125802 // 64


def test_a_learned_bpe_is_read_back(tmp_path):
    found = text.load('alice', 64, 'bpe-500')
    t = found.tokenizer
    assert found.classes == t.size == 500
    t.save(tmp_path)
    again = tokenizer.tokenizer_of(str(tmp_path))
    samples = ['Alice was né 漢<|endoftext|>\n', '']
    assert [a.tolist() for a in again.encode(samples)] == [a.tolist() for a in t.encode(samples)]
    assert [again.decode(ids) for ids in again.encode(samples)] == samples
    assert len(t.encode(samples)[0]) < len(samples[0].encode()) / 2


def test_tokens_beside_a_bpe_of_two_files(tmp_path):
    vocabulary = write_bpe(tmp_path)
    (tmp_path / 'added_tokens.json').write_text('{"<pad>": 258}')
    said = {'model_max_length': 1024, 'eos_token': '<pad>', 'tokenizer_class': 'GPT2Tokenizer'}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(said))
    t = tokenizer.from_folder(str(tmp_path))
    (tmp_path / 'again').mkdir()
    t.save(tmp_path / 'again')
    for tokens in (t, tokenizer.from_folder(str(tmp_path / 'again'))):
        assert tokens.encode(['he<pad>'])[0].tolist() == [vocabulary['he'], 258]
        assert (tokens.size, tokens.end) == (259, (258,))
    for said in ({'tokenizer_class': 'Qwen2Tokenizer'}, {'add_bos_token': True}):
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps(said))
        with pytest.raises(
            ValueError, match=r'config.json has .*=.*; allowed is .* or None: write'
        ):
            tokenizer.from_folder(str(tmp_path))


BROKEN = {
    'nothing': (
        lambda d: None,
        FileNotFoundError,
        'no tokenizer.json, and no vocab.json and no merges.txt in .*bytes',
    ),
    'no merges': (
        lambda d: (write_bpe(d), (d / 'merges.txt').unlink()),
        FileNotFoundError,
        'no merges.txt in',
    ),
    'no json': (
        lambda d: (write_bpe(d), (d / 'vocab.json').write_text('{"a": ')),
        ValueError,
        'vocab.json is not JSON .*download',
    ),
    'a gap': (lambda d: write_bpe(d, zz=999), ValueError, 'number its tokens from 0 without gaps'),
    'other merges': (
        lambda d: (write_bpe(d), (d / 'merges.txt').write_text('q u\n')),
        ValueError,
        'does not belong to the vocab.json beside it',
    ),
    'no merges in it': (
        lambda d: (write_bpe(d), (d / 'merges.txt').write_text('<html>\n')),
        ValueError,
        'does not belong to the vocab.json beside it',
    ),
}


def test_a_tokenizer_that_transformers_saved(tmp_path):
    """A folder with ``tokenizer.json`` gives the tokens of the two files it was made from."""
    from transformers import GPT2TokenizerFast

    (tmp_path / 'two').mkdir()
    write_bpe(tmp_path / 'two')
    made = GPT2TokenizerFast.from_pretrained(str(tmp_path / 'two'), local_files_only=True)
    made.save_pretrained(str(tmp_path / 'one'))
    assert not (tmp_path / 'one' / 'vocab.json').exists()
    two, one = (tokenizer.from_folder(str(tmp_path / n)) for n in ('two', 'one'))
    rows = ['hehe', 'eh', '']
    for a, b in zip(two.encode(rows), one.encode(rows), strict=True):
        assert a.tolist() == b.tolist()
    assert one.decode(one.encode(['hehe'])[0]) == 'hehe'
    (tmp_path / 'again').mkdir()
    one.save(tmp_path / 'again')
    assert tokenizer.from_folder(str(tmp_path / 'again')).size == one.size
    (tmp_path / 'one' / 'tokenizer.json').write_text('{')
    with pytest.raises(ValueError, match=r'tokenizer.json is not a tokenizer .*download it again'):
        tokenizer.from_folder(str(tmp_path / 'one'))


@pytest.mark.parametrize('case', BROKEN)
def test_broken_bpe(tmp_path, case):
    damage, error, message = BROKEN[case]
    damage(tmp_path)
    with pytest.raises(error, match=message):
        tokenizer.from_folder(str(tmp_path))


def contents(suffix):
    """Files of the archive; 2,100 rows, so three groups of at most 1,000."""
    train, valid = ''.join(ROWS[:6] * 350), ''.join(ROWS[:6] * 20) + ROWS[6]
    return {f'wiki.train{suffix}': train.encode(), f'wiki.valid{suffix}': valid.encode()}


def write_folder(folder, suffix):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents(suffix).items():
        (folder / name).write_bytes(content)


def archive(suffix, inside='wikitext-2'):
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w') as zipped:
        for name, content in contents(suffix).items():
            zipped.writestr(f'{inside}/{name}', content)
    return file.getvalue()


NAMES = {'wikitext-2': '.tokens', 'wikitext-2-raw': '.raw'}
FORMS = {
    'folder': lambda root, name: write_folder(root / name, NAMES[name]),
    'folder itself': lambda root, name: write_folder(root, NAMES[name]),
    'archive': lambda root, name: (root / f'{name}-v1.zip').write_bytes(archive(NAMES[name])),
}


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('name', NAMES)
def test_all_forms_of_wikitext_are_equal(tmp_path, form, name):
    FORMS[form](tmp_path, name)
    found = text.load(name, 16, data_dir=str(tmp_path))
    rows = ['', ROWS[1], '', ROWS[3], '', ROWS[5]] * 350
    groups = [''.join(rows[i : i + 1000]).encode() for i in range(0, 2100, 1000)]
    wanted = [list(g[i : i + 16]) for g in groups for i in range(0, len(g) - 15, 16)]
    assert found.name == name
    assert found.train.x.tolist() == wanted
    tail = tokenizer.byte_level().decode(found.test.x.reshape(-1))[-20:]
    assert set(tail) == {'x'}


@pytest.mark.parametrize(
    ('put', 'error', 'message'),
    [
        (lambda d: None, FileNotFoundError, 'no wikitext-2 in .*looked for wikitext-2/wiki.train'),
        (
            lambda d: (write_folder(d, '.tokens'), (d / 'wiki.train.tokens').unlink()),
            FileNotFoundError, 'has wiki.valid.tokens and no wiki.train.tokens',
        ),
        (lambda d: write_folder(d, '.raw'), FileNotFoundError, 'no wikitext-2 in'),
        (
            lambda d: (d / 'wikitext-2-v1.zip').write_bytes(archive('.tokens')[:-99]), ValueError,
            r'wikitext-2-v1.zip: [\d,]+ bytes that are not an archive with wiki.train.tokens',
        ),
        (
            lambda d: (d / 'wikitext-2-v1.zip').write_bytes(archive('.raw')), ValueError,
            'not an archive with wiki.train.tokens and wiki.valid.tokens',
        ),
        (
            lambda d: (write_folder(d, '.tokens'), (d / 'wiki.train.tokens').write_bytes(b'\xff')),
            ValueError, 'wiki.train.tokens is not UTF-8 text',
        ),
    ],
)  # fmt: skip
def test_damaged_wikitext(tmp_path, put, error, message):
    put(tmp_path)
    with pytest.raises(error, match=message):
        text.load('wikitext-2', 16, data_dir=str(tmp_path))


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match='absent is not a folder; pass the folder'):
        wikitext.raw(str(tmp_path / 'absent'))


def test_download(tmp_path, monkeypatch):
    asked = []

    def get(address, digest, fname, path, downloader):
        asked.append(address)
        (path / fname).write_bytes(archive('.raw'))
        return path / fname

    monkeypatch.setattr('pooch.retrieve', get)
    for _ in range(2):
        found = wikitext.raw(str(tmp_path / 'new'), download=True)
    assert len(asked) == 1
    assert asked[0].endswith('/wikitext-2-raw-v1.zip')
    assert len(found.train) == 2100
    assert [f.name for f in (tmp_path / 'new').iterdir()] == ['wikitext-2-raw-v1.zip']


def refuse(request, timeout):
    assert timeout <= 5
    raise urllib.error.URLError('no route')


def test_hub_without_a_network_asks_once(monkeypatch, tmp_path):
    import huggingface_hub

    def nothing(*args, **kwargs):
        assert kwargs['local_files_only']
        raise huggingface_hub.errors.LocalEntryNotFoundError('not here')

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', nothing)
    monkeypatch.setattr('urllib.request.urlopen', refuse)
    with pytest.raises(ConnectionError, match=r'does not answer .*no route.*check the network'):
        huggingface.fetch('openai-community/gpt2')


def test_hub_refuses_what_is_no_repository():
    with pytest.raises(ValueError, match=r'is not the name of a repository .*write owner/name'):
        huggingface.fetch('not a/repository/at all')
