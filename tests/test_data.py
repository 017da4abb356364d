"""Data sets: what is loaded, in which order, how it is cut, and what is refused."""

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import shutil
import struct
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxmp import data
from jaxmp.data import cifar10, mnist

NAMES = [*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch']
ROWS = 4  # examples a batch file


def split(size):
    x = np.arange(size * 3, dtype=np.uint8).reshape(size, 1, 1, 3)
    return data.Split(x, np.arange(size, dtype=np.int32) % 10)


def test_digits():
    digits = data.load('digits')
    assert (digits.name, digits.classes) == ('digits', 10)
    for part, size in ((digits.train, 1437), (digits.test, 360)):
        assert part.x.shape == (size, 8, 8, 1)
        assert part.x.dtype == np.uint8
        assert part.y.shape == (size,)
        assert part.y.dtype == np.int32
    assert np.bincount(digits.test.y).tolist() == [36] * 10
    levels = np.unique(digits.train.x)
    assert len(levels) == 17
    assert levels[[0, -1]].tolist() == [0, 255]
    np.testing.assert_allclose((digits.train.x / 255).mean(), digits.mean[0], atol=1e-4)
    np.testing.assert_allclose((digits.train.x / 255).std(), digits.std[0], atol=1e-4)


def test_digits_ids_never_move():
    digits = data.load('digits')
    assert digits.train.y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    stream = b''.join(a.tobytes() for part in (digits.train, digits.test) for a in part)
    assert hashlib.sha256(stream).hexdigest()[:16] == 'c2e68e008a61cc77'


def test_digits_notice_is_of_this_file():
    folder = Path(data.__file__).parent
    digest = hashlib.sha256((folder / 'digits.npz').read_bytes()).hexdigest()
    assert digest in (folder / 'digits.NOTICE').read_text()


def test_unknown_name():
    with pytest.raises(
        ValueError, match="no data set 'imagenet'; allowed are cifar10, digits, mnist"
    ):
        data.load('imagenet')


@pytest.mark.parametrize('examples', [1, 2, 7, 1437, 50_000])
def test_order_is_a_pure_permutation(examples):
    first = data.order(3, 5, examples)
    assert first.dtype == np.int32
    assert np.array_equal(np.sort(first), np.arange(examples))
    assert np.array_equal(first, data.order(3, 5, examples))


def test_order_differs_by_seed_and_epoch():
    orders = [data.order(seed, epoch, 1000).tolist() for seed in range(4) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 16


@pytest.mark.parametrize('arguments', [(-1, 0, 5), (0, -1, 5), (0, 0, 0)])
def test_order_refuses(arguments):
    with pytest.raises(ValueError, match='allowed are seeds and epochs from 0'):
        data.order(*arguments)


def test_a_pool_of_own_float_images_is_their_mean():
    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2, 1) / 8
    split = data.Split(x, np.zeros(2, np.int32))
    own = data.Dataset('own', split, split, 2, (0.0,), (1.0,))
    found = data.pool(own, 2).train.x
    np.testing.assert_array_equal(found.reshape(-1), [1.5 / 8, 5.5 / 8])
    assert found.dtype == np.float32


def test_take():
    part = data.take(split(9), 4)
    assert np.array_equal(part.x, split(9).x[:4])
    assert part.y.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize('examples', [-1, 0, 10])
def test_take_refuses(examples):
    with pytest.raises(ValueError, match=f'cannot take {examples} examples .* has 9; give 1 to 9'):
        data.take(split(9), examples)


SIZES = [(1, 1), (8, 4), (9, 4), (11, 4), (7, 7)]


@pytest.mark.parametrize('shuffled', [False, True])
@pytest.mark.parametrize(('size', 'batch_size'), SIZES)
def test_training_drops_the_ragged_batch(size, batch_size, shuffled):
    order = data.order(0, 0, size) if shuffled else None
    found = list(data.batches(split(size), batch_size, order))
    assert len(found) == size // batch_size
    ids = np.concatenate([batch['id'] for batch in found])
    expected = np.arange(size) if order is None else order
    assert np.array_equal(ids, expected[: len(ids)])
    for batch in found:
        assert set(batch) == {'x', 'y', 'id'}
        check_rows(batch, split(size), batch_size)


@pytest.mark.parametrize(('size', 'batch_size'), [*SIZES, (3, 8)])
def test_evaluation_sees_every_example_once(size, batch_size):
    found = list(data.batches(split(size), batch_size, pad=True))
    assert len(found) == -(-size // batch_size)
    ids = np.concatenate([batch['id'] for batch in found])
    mask = np.concatenate([batch['mask'] for batch in found])
    assert mask.dtype == np.float32
    assert mask.sum() == size
    assert np.array_equal(ids[mask == 1], np.arange(size))
    assert not ids[mask == 0].any()
    for batch in found:
        check_rows(batch, split(size), batch_size)


def check_rows(batch, part, batch_size):
    assert batch['id'].shape == (batch_size,)
    assert [batch[key].dtype for key in ('x', 'y', 'id')] == [np.uint8, np.int32, np.int32]
    assert np.array_equal(batch['x'], part.x[batch['id']])
    assert np.array_equal(batch['y'], part.y[batch['id']])


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'batch_size': 0}, 'batch_size 0 leaves no full batch of 9'),
        ({'batch_size': 0, 'pad': True}, 'batch_size 0'),
        ({'batch_size': 10}, 'batch_size 10 leaves no full batch of 9 .* pad=True for evaluation'),
        ({'batch_size': 2, 'order': np.array([0, 9])}, 'of 9 examples; pass ids 0 to 8'),
        ({'batch_size': 2, 'order': np.array([-1, 0])}, 'of 9 examples; pass ids 0 to 8'),
        ({'batch_size': 2, 'order': np.array([0.0, 1.0])}, 'order, float64'),
        ({'batch_size': 2, 'order': np.zeros((3, 3), int)}, r'shape \(3, 3\)'),
        ({'batch_size': 2, 'order': np.zeros(0, int)}, r'shape \(0,\)'),
    ],
)
def test_batches_refuses_at_the_call(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.batches(split(9), **arguments)


def tiny(name):
    """The examples of one file of a tiny CIFAR-10."""
    rng = np.random.default_rng(NAMES.index(name))
    pixels = rng.integers(0, 256, (ROWS, 3072), dtype=np.uint8)
    return pixels, rng.integers(0, 10, ROWS).tolist()


def text(content):
    return b'U' + bytes([len(content)]) + content


def as_pickle(name):
    """What Python 2 wrote, opcode by opcode: the published files look like this."""
    pixels, labels = tiny(name)
    array = b'cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t' + text(b'b') + b'tR'
    dtype = b'cnumpy\ndtype\n(' + text(b'u1') + b'K\x00K\x01tR(K\x03' + text(b'|') + b'NNN'
    dtype += b'J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb'
    raw = b'T' + struct.pack('<i', pixels.size) + pixels.tobytes()
    state = b'(K\x01(K' + bytes([ROWS]) + b'M\x00\x0ct' + dtype + b'\x89' + raw + b'tb'
    items = text(b'labels') + b'](' + b''.join(b'K' + bytes([n]) for n in labels) + b'e'
    return b'\x80\x02}(' + items + text(b'data') + array + state + b'u.'


def as_python_3(name):
    pixels, labels = tiny(name)
    return pickle.dumps({'data': pixels, 'labels': labels}, protocol=4)


def as_records(name):
    pixels, labels = tiny(name)
    return np.column_stack([np.array(labels, np.uint8), pixels]).tobytes()


def write_folder(folder, encode, suffix, names=NAMES):
    folder.mkdir(parents=True)
    for name in names:
        (folder / (name + suffix)).write_bytes(encode(name))


def write_archive(path, folder, encode, suffix):
    with tarfile.open(path, 'w:gz') as tar:
        for name in reversed(NAMES):  # the published archive is not in order either
            member = tarfile.TarInfo(f'{folder}/{name}{suffix}')
            raw = encode(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))


def write_prepared(root, limit=ROWS):
    """CIFAR-10 as tensorflow-datasets leaves it, each example with an id."""
    from tensorflow_datasets import features as f

    features = {'id': f.Text(), 'label': f.ClassLabel(num_classes=10)}
    features['image'] = f.Image(shape=(32, 32, 3), encoding_format='png')

    def rows(prefix, names):
        for place, name in enumerate(names):
            for i, (pixels, label) in enumerate(zip(*tiny(name), strict=True)):
                number = place * ROWS + i
                image = png(pixels.reshape(3, 32, 32).transpose(1, 2, 0))
                if i < limit:
                    yield number, {'id': f'{prefix}_{number:05d}', 'image': image, 'label': label}

    splits = {'train': rows('train', NAMES[:5]), 'test': rows('test', NAMES[5:])}
    prepare(root, 'Cifar10', '3.0.2', features, splits)


def prepare(root, name, version, features, splits):
    """What tensorflow-datasets leaves: PNG images, shuffled, as array_record."""
    import tensorflow_datasets as tfds

    builder = tfds.core.GeneratorBasedBuilder
    info = lambda self: tfds.core.DatasetInfo(
        builder=self, features=tfds.features.FeaturesDict(features)
    )
    parts = {'VERSION': tfds.core.Version(version), '_info': info}
    parts |= {'_split_generators': lambda self, manager: splits, '_generate_examples': None}
    with tfds.core.registered.skip_registration():
        made = type(name, (builder,), {'__module__': __name__, **parts})
    made(data_dir=str(root), file_format='array_record').download_and_prepare()


def png(image):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(file, 'PNG')
    return file.getvalue()


PY, BIN = 'cifar-10-batches-py', 'cifar-10-batches-bin'
FORMS = {
    'python folder': lambda root: write_folder(root / PY, as_pickle, ''),
    'python folder itself': lambda root: write_folder(root / 'x', as_pickle, ''),
    'python 3 pickles': lambda root: write_folder(root / PY, as_python_3, ''),
    'python archive': lambda root: write_archive(
        root / 'cifar-10-python.tar.gz', PY, as_pickle, ''
    ),
    'binary folder': lambda root: write_folder(root / BIN, as_records, '.bin'),
    'binary folder itself': lambda root: write_folder(root / 'x', as_records, '.bin'),
    'binary archive': lambda root: write_archive(
        root / 'cifar-10-binary.tar.gz', BIN, as_records, '.bin'
    ),
    'prepared': write_prepared,
}


@pytest.mark.parametrize('form', FORMS)
def test_all_forms_of_cifar10_are_equal(tmp_path, form):
    FORMS[form](tmp_path)
    found = data.load('cifar10', str(tmp_path / 'x' if 'itself' in form else tmp_path))
    assert (found.name, found.classes, found.mean) == ('cifar10', 10, (0.4914, 0.4822, 0.4465))
    for part, names in ((found.train, NAMES[:5]), (found.test, NAMES[5:])):
        pixels = np.concatenate([tiny(name)[0] for name in names])
        assert np.array_equal(part.x, pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        assert part.y.tolist() == [label for name in names for label in tiny(name)[1]]
        assert part.x.dtype == np.uint8
        assert part.y.dtype == np.int32


def test_look_up_order(tmp_path):
    FORMS['python archive'](tmp_path)
    (tmp_path / BIN).mkdir()
    assert len(data.load('cifar10', str(tmp_path)).train.y) == 5 * ROWS


class Payload:
    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def nested(payload):
    return {b'data': [payload], b'labels': (payload,)}


@pytest.mark.parametrize('protocol', range(6))
@pytest.mark.parametrize('wrap', [lambda payload: payload, nested])
@pytest.mark.parametrize('function', [os.system, exec, eval])
def test_a_hostile_pickle_runs_nothing(tmp_path, protocol, wrap, function):
    proof = tmp_path / 'proof'
    line = f'touch {proof}' if function is os.system else f"open({str(proof)!r}, 'w').close()"
    raw = pickle.dumps(wrap(Payload(function, line)), protocol)
    write_folder(tmp_path / PY, lambda name: raw, '')
    with pytest.raises(ValueError, match=r'data_batch_1: .* it would import .*; refused'):
        data.load('cifar10', str(tmp_path))
    assert not proof.exists()
    pickle.loads(raw)
    assert proof.exists(), 'the payload was harmless, the test shows nothing'


@pytest.mark.parametrize(
    'name',
    [
        b'numpy\nload',
        b'numpy\nndarray.tofile',
        b'numpy.core.multiarray\nfromfile',
        b'numpy._core.multiarray\nndarray',
        b'builtins\ngetattr',
        b'copyreg\n_reconstructor',
    ],
)
def test_only_the_names_of_an_array_are_admitted(tmp_path, name):
    write_folder(tmp_path / PY, lambda _: b'\x80\x02c' + name + b'\n.', '')
    with pytest.raises(ValueError, match=r'it would import .*; refused'):
        data.load('cifar10', str(tmp_path))


def dumped(**changes):
    pixels, labels = tiny('data_batch_3')
    return pickle.dumps({'data': pixels, 'labels': labels} | changes, protocol=4)


BAD_PICKLES = {
    'truncated': (as_pickle('data_batch_3')[:-500], 'not a python batch of CIFAR-10'),
    'empty': (b'', '0 bytes that are not a python batch'),
    'foreign': (b'<html>not found</html>', '22 bytes that are not a python batch'),
    'a list': (pickle.dumps([1, 2], 4), 'it holds a list'),
    'no data': (pickle.dumps({'labels': [1]}, 4), "its 'data' is not a uint8 array"),
    'floats': (dumped(data=np.zeros((ROWS, 3072))), "its 'data' is not a uint8 array"),
    'shape': (dumped(data=np.zeros((ROWS, 784), np.uint8)), r'of shape \(4, 784\); allowed is'),
    'one dimension': (dumped(data=np.zeros(3072, np.uint8)), "its 'data' is not a uint8 array"),
    'few labels': (dumped(labels=[1]), "its 'labels' are not a list of 4 numbers"),
    'label 10': (dumped(labels=[0, 1, 2, 10]), "some of its 'labels' are not 0 to 9"),
    'label of text': (dumped(labels=[0, 1, 2, 'cat']), "some of its 'labels' are not 0 to 9"),
    'fewer examples': (
        dumped(data=np.zeros((2, 3072), np.uint8), labels=[0, 1]),
        "'data_batch_3': 2, .*allowed are six files of one size",
    ),
}


@pytest.mark.parametrize('case', BAD_PICKLES)
def test_damaged_python_batches(tmp_path, case):
    raw, message = BAD_PICKLES[case]
    write_folder(tmp_path / PY, as_pickle, '')
    (tmp_path / PY / 'data_batch_3').write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        data.load('cifar10', str(tmp_path))
    assert 'data_batch_3' in str(caught.value)
    assert 'download it again' in str(caught.value)


BAD_RECORDS = {
    'truncated': (
        as_records('data_batch_3')[:-1],
        '12,291 bytes; allowed are whole records of 3073',
    ),
    'empty': (b'', '0 bytes; allowed are whole records'),
    'label': (bytes([200]) + bytes(3072), 'label 200; allowed are 0 to 9'),
    'fewer examples': (as_records('data_batch_3')[:3073], 'six files of one size'),
}


@pytest.mark.parametrize('case', BAD_RECORDS)
def test_damaged_binary_batches(tmp_path, case):
    raw, message = BAD_RECORDS[case]
    write_folder(tmp_path / BIN, as_records, '.bin')
    (tmp_path / BIN / 'data_batch_3.bin').write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        data.load('cifar10', str(tmp_path))
    assert 'data_batch_3.bin' in str(caught.value)
    assert 'download it again' in str(caught.value)


@pytest.mark.parametrize('gone', NAMES)
def test_missing_batch(tmp_path, gone):
    write_folder(tmp_path / PY, as_pickle, '', [name for name in NAMES if name != gone])
    with pytest.raises(ValueError, match=f"'{gone}': 0.*download it again"):
        data.load('cifar10', str(tmp_path))


@pytest.mark.parametrize('cut', [lambda raw: raw[: len(raw) // 2], lambda raw: raw[:-30]])
@pytest.mark.parametrize('form', ['python archive', 'binary archive'])
def test_truncated_archive(tmp_path, form, cut):
    FORMS[form](tmp_path)
    (archive,) = tmp_path.iterdir()
    archive.write_bytes(cut(archive.read_bytes()))
    with pytest.raises(ValueError, match=rf'{archive.name}: [\d,]+ bytes that cannot be read'):
        data.load('cifar10', str(tmp_path))


@pytest.mark.parametrize('raw', [b'', b'<html>', gzip.compress(b'no tar inside' * 99, mtime=0)])
def test_foreign_archive(tmp_path, raw):
    (tmp_path / 'cifar-10-python.tar.gz').write_bytes(raw)
    with pytest.raises(ValueError, match=r'cifar-10-python.tar.gz: .*download it again'):
        data.load('cifar10', str(tmp_path))


def test_prepared_in_another_format(tmp_path):
    write_prepared(tmp_path)
    info = tmp_path / 'cifar10' / '3.0.2' / 'dataset_info.json'
    info.write_text(info.read_text().replace('array_record', 'tfrecord'))
    with pytest.raises(ValueError, match='tfds convert_format --out_file_format=array_record'):
        data.load('cifar10', str(tmp_path))


def test_prepared_with_examples_missing(tmp_path):
    write_prepared(tmp_path, limit=ROWS - 1)
    with pytest.raises(ValueError, match=r'3\.0\.2: .*allowed is cifar10 prepared'):
        data.load('cifar10', str(tmp_path))


@pytest.mark.parametrize('damage', [lambda file: file.unlink(), lambda file: file.write_bytes(b'')])
def test_prepared_with_a_damaged_file(tmp_path, damage):
    write_prepared(tmp_path)
    for file in (tmp_path / 'cifar10' / '3.0.2').glob('*array_record*'):
        damage(file)
    with pytest.raises(ValueError, match=r'3\.0\.2: .*allowed is cifar10 prepared'):
        data.load('cifar10', str(tmp_path))


@pytest.mark.parametrize(
    ('folder', 'error', 'message'),
    [
        (None, ValueError, 'data_dir is None; pass the folder'),
        ('', FileNotFoundError, 'no CIFAR-10 in .*cifar-10-binary.tar.gz.*download=True'),
        ('absent', FileNotFoundError, 'absent is not a folder'),
    ],
)
def test_cifar10_is_not_there(tmp_path, folder, error, message):
    with pytest.raises(error, match=message):
        data.load('cifar10', None if folder is None else str(tmp_path / folder))


@pytest.fixture
def published(tmp_path):
    """A folder, and the address at which a server of this machine publishes it."""
    folder = tmp_path / 'published'
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(
        ('127.0.0.1', 0), functools.partial(Quiet, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f'http://127.0.0.1:{server.server_address[1]}'
    server.shutdown()
    server.server_close()


def md5(path):
    return f'md5:{hashlib.md5(path.read_bytes()).hexdigest()}'


def test_cifar10_is_downloaded_once_and_checked(tmp_path, published, monkeypatch):
    """The archive as published; one that was changed on its way is refused and not kept."""
    folder, address = published
    FORMS['python archive'](folder)
    [archive] = folder.iterdir()
    monkeypatch.setattr(cifar10, '_ADDRESS', f'{address}/{archive.name}')
    monkeypatch.setattr(cifar10, '_DIGEST', md5(archive))
    home = tmp_path / 'data'
    first = data.load('cifar10', str(home), download=True)
    assert [p.name for p in home.iterdir()] == [archive.name]
    archive.unlink()
    again = data.load('cifar10', str(home), download=True)
    assert np.array_equal(first.train.x, again.train.x)
    FORMS['python archive'](folder)
    monkeypatch.setattr(cifar10, '_DIGEST', f'md5:{"0" * 32}')
    other = tmp_path / 'other'
    with pytest.raises(ConnectionError, match=r'could not be fetched .*hash.*or put .*there'):
        data.load('cifar10', str(other), download=True)
    assert not list(other.iterdir())


def test_mnist_is_downloaded(tmp_path, published, monkeypatch):
    _, address = published
    asked = []
    monkeypatch.setattr(mnist, '_ADDRESS', address)
    monkeypatch.setattr(mnist, 'fetch', lambda a, root, digest: asked.append((a, digest)))
    with pytest.raises(FileNotFoundError):
        data.load('mnist', str(tmp_path), download=True)
    assert [a.rpartition('/')[2] for a, _ in asked] == [f'{n}.gz' for n in mnist._FILES]


def test_download_without_a_network_asks_once(tmp_path, published, monkeypatch):
    _, address = published
    monkeypatch.setattr(cifar10, '_ADDRESS', f'{address}/nothing.tar.gz')
    with pytest.raises(ConnectionError, match=r'could not be fetched .*404.*or put nothing.tar.gz'):
        data.load('cifar10', str(tmp_path / 'new'), download=True)
    assert not list((tmp_path / 'new').iterdir())


def idx(images, labels):
    """The two files of a split: big-endian headers, then bytes."""
    n = len(labels)
    head = struct.pack('>4i', 2051, n, 28, 28), struct.pack('>2i', 2049, n)
    return head[0] + images.tobytes(), head[1] + labels.tobytes()


@pytest.fixture
def mnist_files(tmp_path, monkeypatch):
    """Small files in MNIST's form, one of them packed, with their own checksums."""
    r, contents = np.random.default_rng(0), {}
    for part, n in (('train', 5), ('t10k', 3)):
        images = r.integers(0, 256, (n, 28, 28), np.uint8)
        files = idx(images, np.arange(n, dtype=np.uint8))
        contents |= {
            f'{part}-{kind}-ubyte': f
            for kind, f in zip(('images-idx3', 'labels-idx1'), files, strict=True)
        }
    digests = {name: (hashlib.sha256(c).hexdigest(), '') for name, c in contents.items()}
    assert list(digests) == list(mnist._FILES)
    monkeypatch.setattr(mnist, '_FILES', digests)
    (tmp_path / 'mnist').mkdir()
    for name, content in contents.items():
        (tmp_path / 'mnist' / name).write_bytes(content)
    packed = tmp_path / 'mnist' / 't10k-images-idx3-ubyte'
    packed.with_name(f'{packed.name}.gz').write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    return tmp_path


def test_mnist(mnist_files):
    found = data.load('mnist', str(mnist_files))
    assert (found.name, found.classes, found.mean) == ('mnist', 10, (0.1307,))
    assert (found.train.x.shape, found.test.x.shape) == ((5, 28, 28, 1), (3, 28, 28, 1))
    assert found.train.x.dtype == np.uint8
    assert found.train.y.dtype == np.int32
    assert found.test.y.tolist() == [0, 1, 2]
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    np.testing.assert_array_equal(found.train.x[..., 0], images)
    again = data.load('mnist', str(mnist_files / 'mnist'))
    np.testing.assert_array_equal(again.test.x, found.test.x)


def test_prepared_mnist_is_the_published_one(mnist_files, tmp_path_factory):
    """In the same order, though tensorflow-datasets shuffles; checked by the same digests."""
    from tensorflow_datasets import features as f

    want, root = data.load('mnist', str(mnist_files)), tmp_path_factory.mktemp('prepared')
    image = f.Image(shape=(28, 28, 1), encoding_format='png')
    rows = lambda split, y: (
        (i, {'image': png(split.x[i, ..., 0]), 'label': y[i]}) for i in range(len(y))
    )

    def write(labels):
        shutil.rmtree(root / 'mnist', ignore_errors=True)
        splits = {'train': rows(want.train, labels), 'test': rows(want.test, want.test.y)}
        features = {'image': image, 'label': f.ClassLabel(num_classes=10)}
        prepare(root, 'Mnist', '3.0.1', features, splits)

    write(want.train.y)
    found = data.load('mnist', str(root))
    for one, other in zip((*found.train, *found.test), (*want.train, *want.test), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    write(want.train.y[::-1])
    with pytest.raises(ValueError, match=r'3\.0\.1 is not the published train-labels-idx1-ubyte'):
        data.load('mnist', str(root))


def test_mnist_refuses(mnist_files):
    folder = mnist_files / 'mnist'
    with pytest.raises(ValueError, match='mnist is not part of the package and data_dir is None'):
        data.load('mnist')
    (folder / 'train-labels-idx1-ubyte').write_bytes(b'\0' * 13)
    with pytest.raises(ValueError, match='is not the published train-labels-idx1-ubyte: sha256'):
        data.load('mnist', str(mnist_files))
    (folder / 't10k-images-idx3-ubyte.gz').write_bytes(b'no gzip')
    (folder / 'train-labels-idx1-ubyte').unlink()
    with pytest.raises(FileNotFoundError, match=r'no train-labels-idx1-ubyte and no train-labels'):
        data.load('mnist', str(mnist_files))
