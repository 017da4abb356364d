"""Text of one's own: documents of files and of the hub, chats, tokenizers, blocks in a cache."""

import json
import re
import threading
import time
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import data
from jaxmp.data import chat, documents, text, tokenizer
from jaxmp.training import agreement
from jaxmp.training.tasks import task

TALK = [
    {'role': 'user', 'content': 'hehe?'},
    {'role': 'assistant', 'content': 'he he'},
    {'role': 'user', 'content': 'eh'},
    {'role': 'assistant', 'content': '\n漢heh'},
]
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']


def write_tokenizer(folder, template=TEMPLATE, begin=False):
    """A byte-level BPE in ``tokenizer.json``, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), 'he', 'Ġhe', 'ĊĊ']
    merges = [('h', 'e'), ('Ġ', 'he'), ('Ċ', 'Ċ')]
    made = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(w, special=True) for w in SPECIAL])
    if begin:
        made.post_processor = processors.TemplateProcessing(
            single='<|im_start|> $A', special_tokens=[('<|im_start|>', 1)]
        )
    made.enable_truncation(3)  # as some published files have it
    folder.mkdir(exist_ok=True)
    made.save(str(folder / 'tokenizer.json'))
    about = {
        'eos_token': {'content': SPECIAL[0], '__type': 'AddedToken'},
        'tokenizer_class': 'PreTrainedTokenizerFast',
    }
    about |= {'chat_template': template} if template else {}
    (folder / 'tokenizer_config.json').write_text(json.dumps(about))
    return str(folder), words, merges


def lines(path, field, contents):
    path.write_text(''.join(json.dumps({'id': 1, field: c}) + '\n' for c in contents))


def load(root, pattern, length=4, words='bytes', tests='', field='text', share=0.25):
    sources = documents.load(pattern, tests, field, share, str(root))
    return text.from_sources(sources, length, words, str(root / 'cache'))


def said(dataset, part='train'):
    return dataset.tokenizer.decode(getattr(dataset, part).x.reshape(-1))


def test_the_end_of_each_file_is_the_test(tmp_path):
    (tmp_path / 'b.txt').write_text('one two\nthree\nfour five six\nse\nseven ei\nten\n')
    (tmp_path / 'a.txt').write_text('né')
    found = load(tmp_path, '*.txt', length=2)
    assert said(found) == 'néone two\nthree\nfour five six\nse\nseven ei'
    assert said(found, 'test') == 'ten\n'
    assert (found.classes, found.train.x.dtype) == (256, np.int32)
    assert found.train.y is found.train.x
    base = found.train.x
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)  # nothing is read before it is indexed
    first = next(data.batches(found.train, 2, np.array([3, 1])))
    assert first['id'].tolist() == [3, 1]
    np.testing.assert_array_equal(first['x'], found.train.x[[3, 1]])


def test_what_is_tested_is_not_trained_on(tmp_path, monkeypatch):
    """Neither a file that both globs match, nor a document that equals one of the test."""
    lines(tmp_path / 'a.jsonl', 'text', ['abcd', 'efgh', 'ijkl', ' ', 'efgh\n'])
    lines(tmp_path / 'b.jsonl', 'text', ['efgh', 'mnop'])
    lines(tmp_path / 'copy_of_b.jsonl', 'text', ['efgh', 'mnop'])
    (tmp_path / 'c.txt').write_text('efgh')
    for name in ('b.txt', 'copy_of_b.txt'):  # each is read in several pieces
        (tmp_path / name).write_text('qrst uv\nwxyz')
    monkeypatch.setattr(documents, 'PIECE', 4)
    found = load(tmp_path, '*.*[tl]', tests='b.*')
    assert said(found) == 'abcdijkl'
    assert said(found, 'test') == 'efghmnopqrst uv\nwxyz'


@pytest.mark.parametrize('words', ['bytes', 'folder'])
def test_pieces_are_tokens_of_the_whole(tmp_path, monkeypatch, words):
    """A cut is where no tokenizer joins; documents have their beginning and end once."""
    if words == 'folder':
        words, _, _ = write_tokenizer(tmp_path / 'tokenizer', begin=True)
    whole = 'he  he\n\n  heé\nehe 漢字漢字漢字漢字漢字漢字漢字\nhehe\n' * 9 + 'x'
    (tmp_path / 'a.txt').write_text(whole)
    rows = ['he', 'é' * 99, 'eh']
    lines(tmp_path / 'b.jsonl', 'text', rows)
    lines(tmp_path / 'z.jsonl', 'text', ['test'])
    monkeypatch.setattr(documents, 'PIECE', 24)
    found = load(tmp_path, '[ab].*', 2, words, 'z.jsonl')
    t = found.tokenizer
    wanted = [i for ids in t.encode([whole, *rows]) for i in (*t.begin, *ids, *t.end)]
    assert found.train.x.reshape(-1).tolist() == wanted[: len(wanted) // 2 * 2]


def test_a_killed_process_is_followed_by_one_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, 'PIECE', 50)
    lines(tmp_path / 'a.jsonl', 'text', [f'line {i}, of many' for i in range(40)])
    sources = documents.load('a.jsonl', '', 'text', 0.25, str(tmp_path))
    whole = text.from_sources(sources, 8, 'bytes', str(tmp_path / 'one'))
    starts, deaths = [], [1, 2]

    def dying(place):
        starts.append(place)
        for i, piece in enumerate(sources[0].read(place)):
            if i == 4 and deaths:
                deaths.pop()
                raise KeyboardInterrupt
            yield piece

    for _ in deaths.copy():
        with pytest.raises(KeyboardInterrupt):
            text.from_sources(
                (sources[0]._replace(read=dying), sources[1]), 8, 'bytes', str(tmp_path)
            )
        [part] = tmp_path.glob('*/train.part')
        with part.open('ab') as file:
            file.write(b'written, but not noted')
    found = text.from_sources(
        (sources[0]._replace(read=dying), sources[1]), 8, 'bytes', str(tmp_path)
    )
    np.testing.assert_array_equal(found.train.x, whole.train.x)
    onward = [p for p in starts if p != (0, 0)]
    assert len(onward) == 2
    assert onward == sorted(onward)
    assert not [*tmp_path.glob('*/*.part'), *tmp_path.glob('*/*.note')]


def test_a_text_is_written_once_by_one_of_many(tmp_path):
    (tmp_path / 'a.txt').write_text('abc def\n' * 99)
    sources = documents.load('a.txt', '', 'text', 0.25, str(tmp_path))
    reads, found = [], []

    def counted(place):
        reads.append(place)
        time.sleep(0.05)
        yield from sources[0].read(place)

    own = sources[0]._replace(read=counted), sources[1]
    make = lambda: found.append(text.from_sources(own, 8, 'bytes', str(tmp_path)))
    threads = [threading.Thread(target=make) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(found) == 4
    assert len(reads) == 2  # to see what the first document is, and to write
    make()
    assert len(reads) == 2
    folders = lambda: {p.parent for p in tmp_path.glob('*/train.blocks')}
    before = folders()
    (tmp_path / 'a.txt').write_text('abc dEf\n' * 99)
    changed = documents.load('a.txt', '', 'text', 0.25, str(tmp_path))
    assert 'E' in said(text.from_sources(changed, 8, 'bytes', str(tmp_path)))
    text.from_sources(changed, 9, 'bytes', str(tmp_path))
    assert len(folders()) == len(before) + 2
    damaged = next(iter(before)) / 'train.blocks'
    damaged.write_bytes(damaged.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r'train.blocks has .* bytes, and .* were written; delete'):
        make()


def test_a_tokenizer_is_learned_from_files_once(tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_text('the cat, the hat, the mat\n' * 40)
    first = load(tmp_path, 'a.txt', words='bpe-261')
    monkeypatch.setattr(tokenizer, 'learn', None)
    again = load(tmp_path, 'a.txt', words='bpe-261')
    assert first.classes == again.classes == 261
    assert said(again).startswith('the cat, the hat')
    assert first.tokenizer.end == again.tokenizer.end == (0,)
    assert len(first.train.x) < 40 * 26 * 0.75 / 4


def test_the_answers_of_chats_are_what_transformers_says(tmp_path):
    from transformers import AutoTokenizer

    folder, *_ = write_tokenizer(tmp_path / 'tokenizer')
    other = [*TALK[:1], {**TALK[1], 'content': 'he'}]
    lines(tmp_path / 'a.jsonl', 'messages', [TALK, other])
    lines(tmp_path / 'b.jsonl', 'messages', [TALK[2:]])
    found = load(tmp_path, 'a.jsonl', 5, folder, 'b.jsonl', 'messages')
    auto = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    auto.backend_tokenizer.no_truncation()
    ids = []
    for talk in (TALK, other):
        both = auto.apply_chat_template(
            talk, return_dict=True, return_assistant_tokens_mask=True, truncation=False
        )
        ids += zip(both['input_ids'], both['assistant_masks'], strict=True)
    rows = np.array(ids)[: len(ids) // 5 * 5].reshape(-1, 5, 2)
    rows = rows[(rows[:, 1:, 1] > 0).any(1)]  # a block without an answer teaches nothing
    assert found.train.x.tolist() == rows[:, :, 0].tolist()
    learnt = found.train.y != data.NO_LOSS
    np.testing.assert_array_equal(learnt, rows[:, :, 1] > 0)
    np.testing.assert_array_equal(found.train.y[learnt], found.train.x[learnt])
    data.check(found, tokens=True)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(*rows.shape[:2], found.classes)))
    plain = found._replace(
        train=data.Split(*[found.train.x] * 2), test=data.Split(*[found.test.x] * 2)
    )
    for dataset, wanted in ((found, task.score_targets), (plain, task.score_tokens)):
        scores = task.reader(dataset, ()).score(logits, dataset.train.y)
        np.testing.assert_array_equal(scores['loss'], wanted(logits, dataset.train.y)['loss'])
    assert not np.allclose(
        *(task.reader(d, ()).score(logits, d.train.y)['loss'] for d in (found, plain))
    )
    with pytest.raises(ValueError, match=r'gives float32.*, and a text of 262 tokens needs'):
        task.reader(found, ()).score(logits[..., :-1], found.train.y)


def test_scores_are_means_over_targets():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 5)), jnp.float32)
    y = jnp.array([[0, 1, -1, 2], [3, 3, 3, 3], [1, -1, -1, -1]])
    found = task.score_targets(logits, y)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    nats = [-np.log([p[0, 0, 1], p[0, 2, 2]]).mean(), -np.log(p[1, :3, 3]).mean(), 0]
    np.testing.assert_allclose(found['loss'], nats, rtol=1e-5)
    best = np.argmax(logits, -1)
    right = [np.mean([best[0, 0] == 1, best[0, 2] == 2]), np.mean(best[1, :3] == 3), 0]
    np.testing.assert_allclose(found['accuracy'], right)
    plain = task.score_tokens(logits[1:2], y[1:2])
    np.testing.assert_allclose(plain['loss'], found['loss'][1:2], rtol=1e-6)


def test_what_compares_data_reads_it_in_parts(monkeypatch):
    """The digests of before, in little memory, also where targets are every second row."""
    a = np.zeros((4096, 2, 256), np.int32)
    a[:, 1] = np.arange(4096)[:, None]
    y = a[:, 1]
    monkeypatch.setattr(data, 'PART', 2**16)
    whole = data.Dataset('a', data.Split(a[:, 0], y), data.Split(a[:, 0], y), 4096, (), ())
    tracemalloc.start()
    found = agreement.digest(y)
    data.check(whole, tokens=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == 'int32[4096, 256] ' + agreement.digest(y.copy()).split()[-1]
    monkeypatch.setattr(data, 'PART', 2**40)
    assert found == agreement.digest(y)
    assert peak < 2**19 < y.nbytes
    y[7, 3] = -2
    with pytest.raises(ValueError, match='y of the train split has -2 to 4095, and classes=4096'):
        data.check(whole._replace(tokenizer=tokenizer.byte_level()), tokens=True)


def test_a_mapped_file_is_not_kept_in_memory(tmp_path, monkeypatch):
    """Neither by the check of its range, nor by comparing it, nor by the batches of an epoch."""
    monkeypatch.setattr(data, 'PART', 2**20)
    file = tmp_path / 'a'
    file.write_bytes(np.arange(2**23, dtype=np.int32).tobytes())  # 32 MB
    x = np.memmap(file, np.int32, 'r').view(np.ndarray).reshape(-1, 1024)
    mapped = data.Dataset('a', data.Split(x, x), data.Split(x, x), 2**23, (), ())
    status = lambda: Path('/proc/self/status').read_text()
    resident = lambda: int(re.search(r'RssFile:\s+(\d+)', status())[1]) * 1024
    before = resident()
    uses = {
        'check': lambda: data.check(mapped, tokens=True),
        'digest': lambda: agreement.digest(x),
        'batches': lambda: list(data.batches(mapped.train, 64)) and None,
        'order': lambda: [
            b['id'] for b in data.batches(mapped.train, 64, data.order(0, 0, len(x)))
        ],
    }
    for use in uses.values():
        use()
        assert resident() - before < 2**23 < x.nbytes / 3


def test_a_gguf_has_the_tokens_and_the_template_of_the_folder(tmp_path):
    gguf = pytest.importorskip('gguf')
    folder, words, merges = write_tokenizer(tmp_path / 'tokenizer')

    def write(name, model='gpt2', pre='gpt-2', begin=False):
        writer = gguf.GGUFWriter(tmp_path / name, 'llama')
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(words)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(words) - len(SPECIAL)))
        writer.add_token_merges([' '.join(m) for m in merges])
        writer.add_eos_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(begin)
        writer.add_chat_template(TEMPLATE)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return str(tmp_path / name)

    one, two = (tokenizer.tokenizer_of(n) for n in (folder, write('a.gguf')))
    samples = ['he 12 hehe<|im_end|>\n', 'né 漢', '']
    assert [a.tolist() for a in one.encode(samples)] == [a.tolist() for a in two.encode(samples)]
    assert [two.decode(ids) for ids in two.encode(samples)] == samples
    assert (
        (one.size, one.begin, one.end) == (two.size, two.begin, two.end) == (len(words), (), (0,))
    )
    assert chat.answers(one.template, TALK) == chat.answers(two.template, TALK)
    (tmp_path / 'saved').mkdir()
    two.save(tmp_path / 'saved')
    three = tokenizer.tokenizer_of(str(tmp_path / 'saved'))
    assert (three.size, three.end, three.template) == (two.size, two.end, two.template)
    begins = tokenizer.tokenizer_of(write('e.gguf', begin=True))
    begins.save(tmp_path / 'saved')  # whoever reads a run's folder begins a text as the run does
    assert begins.begin == tokenizer.tokenizer_of(str(tmp_path / 'saved')).begin == (1,)
    with pytest.raises(ValueError, match='kind llama, gpt-2; of a GGUF file gpt2 is read'):
        tokenizer.tokenizer_of(write('b.gguf', model='llama'))
    with pytest.raises(ValueError, match='kind gpt2, tekken; of a GGUF file gpt2 is read'):
        tokenizer.tokenizer_of(write('c.gguf', pre='tekken'))
    (tmp_path / 'd.gguf').write_bytes(b'nothing of the kind')
    with pytest.raises(ValueError, match=r'd.gguf is damaged or cut off: 19 bytes .*download the '):
        tokenizer.tokenizer_of(str(tmp_path / 'd.gguf'))


WRONG = {
    'no file': (lambda d: None, {}, FileNotFoundError, r"data.files='\*' matches no file in "),
    'another kind': (
        lambda d: (d / 'a.md').touch(), {}, ValueError, r'matches .*a.md, and text is '
    ),
    'empty': (
        lambda d: (d / 'a.txt').touch(), {}, ValueError, r"files='\*': all of its 1 files are"
    ),
    'only tests': (
        lambda d: (d / 'a.txt').write_text('abc'), {'tests': '*'}, ValueError,
        r"matches only files of config.data.test_files='\*'; give files that are not tested on",
    ),
    'no tests': (
        lambda d: (d / 'a.txt').write_text('ab ' * 9), {'tests': 'b.*'}, FileNotFoundError,
        r"data.test_files='b.\*' matches no file",
    ),
    'short': (
        lambda d: (d / 'a.txt').write_text('ab ' * 9), {'length': 16}, ValueError,
        r'the test text has 4 tokens .*no block.* of 16, .*sequence_length.*test_share',
    ),
    'no field': (
        lambda d: (d / 'a.jsonl').write_text('{"text": "a"}\n\n{"body": "b", "id": 3}\n'),
        {'share': 0.01}, ValueError, r"a.jsonl, line 3 has no field 'text', but body, id; name it",
    ),
    'no object': (
        lambda d: (d / 'a.jsonl').write_text('[1]\n'), {}, ValueError, 'line 1 has no field .text'
    ),
    'no JSON': (
        lambda d: (d / 'a.jsonl').write_text('{"text": "a"}\n{"text": "b"\n'), {'share': 0.01},
        ValueError, r'a.jsonl, line 2 is not JSON .*mend or remove the line',
    ),
    'neither': (
        lambda d: lines(d / 'a.jsonl', 'text', [7]), {}, ValueError,
        "a.jsonl, line 1: the field 'text' is neither a text nor chat messages.*but 7; mend or",
    ),
    'no UTF-8': (
        lambda d: (d / 'a.txt').write_bytes(b'abc\xff'), {}, ValueError,
        r'a.txt, line 1 is not UTF-8 text .byte 0xff, invalid start byte.; convert it',
    ),
    'test documents alone': (
        lambda d: [lines(d / f'{n}.jsonl', 'text', ['abcdefgh', x]) for n, x in ('a ', 'b.')],
        {'tests': 'b.*'}, ValueError,
        r'in no block of 4, and no block .documents left out as blank or as one of the test: 2.; s',
    ),
    'no template': (
        lambda d: lines(d / 'a.jsonl', 'text', [TALK] * 4), {}, ValueError,
        'a.jsonl, line [14] holds chat messages, and the tokenizer has no chat template; give',
    ),
    'no answer': (
        lambda d: lines(d / 'a.jsonl', 'text', [TALK[:1]] * 4), {'words': 'folder'}, ValueError,
        'line 4: a conversation without a message of the assistant of weight 1 .it has user.; re',
    ),
    'a chat among texts': (
        lambda d: lines(d / 'a.jsonl', 'text', ['abcdefgh', TALK, *['abcdefgh'] * 40]),
        {'words': 'folder'}, ValueError,
        'line 2 holds chat messages, and the first document is a text; give them as two',
    ),
    'no tokenizer': (
        lambda d: (d / 'a.txt').write_text('ab'), {'words': 'nowhere'}, FileNotFoundError,
        'no tokenizer.json, and no vocab.json and no merges.txt in nowhere',
    ),
    'no gguf': (
        lambda d: (d / 'a.txt').write_text('ab'), {'words': 'nowhere.gguf'}, FileNotFoundError,
        'there is no file nowhere.gguf',
    ),
}  # fmt: skip


USER = {'role': 'user', 'content': 'he'}
CALL = {'role': 'assistant', 'content': None, 'tool_calls': [{'function': {'name': 'he'}}]}
IMAGE = {'type': 'image_url', 'image_url': {'url': 'a.png'}}
REFUSED = {  # contents of the second line's field, and what is said of it
    'null': (None, "field 'text' is neither a text nor chat messages, .* but null; mend"),
    'number': (5, 'but 5; mend'),
    'empty': ([], r'but \[\]; mend'),
    'half a character': ('cut \ud83d here', r"has '.ud83d', half of a character .a surrogate pair"),
    'half in a chat': ([USER, {**CALL, 'tool_calls': ['\ud83d']}], r"has '.ud83d', half of"),
    'null answer': (
        [USER, {**CALL, 'tool_calls': None}],
        'message 2 of 2 has the content null; allo',
    ),
    'null question': (
        [{**USER, 'content': None}],
        'message 1 of 1 has the content null; allowed are',
    ),
    'an image': (
        [{**USER, 'content': [IMAGE]}],
        r'message 1 of 1 has the content .*image_url.*; all',
    ),
    'a part of a number': (
        [{**USER, 'content': [{'type': 'text', 'text': 5}]}],
        'has the content .*5',
    ),
    'words': (
        [{**USER, 'content': ['he']}],
        r'message 1 of 1 has the content \["he"\]; allowed are',
    ),
    'true': ([{**USER, 'content': True}], 'has the content true; allowed are a text, parts of the'),
    'an object': (
        [{**USER, 'content': {'a': 1}}],
        'has the content {"a": 1}; allowed are a text, pa',
    ),
    'no role': ([{'content': 'he'}], r'message 1 of 1 has no role, but {"content": "he"}; allowed'),
    'a role of a number': (
        [{**USER, 'role': 1}],
        'has the role 1; allowed are system, developer, us',
    ),
    'another role': (
        [{'from': 'bing', 'value': ''}],
        'has the from "bing"; allowed are .* human, gpt:',
    ),
    'no value': ([{'from': 'gpt', 'text': 'he'}], 'message 1 of 1 has the value null; allowed are'),
    'calls left out': (
        [USER, CALL],
        r'message 2 of 2 has tool_calls=.* allowed is no such key: remove the key or the conv',
    ),
    'a call of the old form': (
        [USER, {**CALL, 'tool_calls': None, 'function_call': {'name': 'he'}}],
        "message 2 of 2 has function_call={'name': 'he'}; allowed is no such key",
    ),
    'thoughts': ([USER, {**TALK[1], 'thinking': 'he'}], "has thinking='he'; allowed is no such ke"),
    'two forms': (
        [{**USER, 'value': 'eh'}, TALK[1]],
        "message 1 of 2 has value='eh'; allowed is n",
    ),
    'half a weight': ([USER, {**TALK[1], 'weight': 0.5}], 'weight=0.5; allowed is 0 or 1 or None'),
    'a weight of text': ([USER, {**TALK[1], 'weight': '0'}], "weight='0'; allowed is 0 or 1 or No"),
    'nothing to learn': (
        [USER, {**TALK[1], 'weight': 0}],
        'of the assistant of weight 1 .it has assistant, user.; remove it',
    ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_content_that_is_none_is_refused_with_its_line(tmp_path, case):
    content, message = REFUSED[case]
    words, *_ = write_tokenizer(tmp_path / 'tokenizer')
    (tmp_path / 'in').mkdir()
    lines(tmp_path / 'in' / 'a.jsonl', 'text', [TALK, content])
    lines(tmp_path / 'in' / 'b.jsonl', 'text', [TALK])
    with pytest.raises(ValueError, match=f'a.jsonl, line 2.*{message}'):
        load(tmp_path / 'in', 'a.*', words=words, tests='b.*')


def read_lines(file, field='text'):
    source = documents.of_files('', [documents.all_of(file)], field)
    return [d.content for piece, _ in source.read((0, 0)) for d in piece]


def test_chats_in_parts_and_of_sharegpt_are_messages(tmp_path):
    parts = [{'type': 'text', 'text': 'he'}, {'type': 'text', 'text': ' eh', 'image': None}]
    other = [{'from': 'system', 'value': 'a'}, {'from': 'human', 'value': 'b', 'weight': None}]
    other.append({'from': 'gpt', 'value': 'c'})
    talks = [[{**USER, 'content': parts}, CALL], other]
    lines(tmp_path / 'a.jsonl', 'conversations', talks)
    one, two = read_lines(tmp_path / 'a.jsonl', 'conversations')
    assert [m['content'] for m in one] == ['he eh', '']
    assert one[1]['tool_calls'] == CALL['tool_calls']
    assert 'weight' not in two[1]
    assert [(m['role'], m['content']) for m in two] == [
        *zip(('system', 'user', 'assistant'), 'abc', strict=True)
    ]


def test_what_is_about_a_message_is_not_learnt():
    template = chat.Template(TEMPLATE)
    text, spans = chat.answers(template, TALK)
    talk = [{**m, 'weight': 0, 'model': 'a', 'tool_calls': []} for m in TALK[:3]]
    talk.append({**TALK[3], 'weight': 1, 'end_turn': True})
    assert chat.answers(template, talk) == (text, spans[1:])
    thinks = TEMPLATE.replace('{% generation %}', '{% generation %}{{ m.thinking }}')
    text, spans = chat.answers(chat.Template(thinks), [*TALK[:3], {**TALK[3], 'thinking': 'hm'}])
    assert text[slice(*spans[1])] == f'hm{TALK[3]["content"]}<|im_end|>'
    calls = '{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}'
    with pytest.raises(ValueError, match="refuses the messages: 'int' object is not iterable"):
        chat.answers(chat.Template(calls), [{**TALK[1], 'tool_calls': 5}])


@pytest.mark.parametrize('size', [16, 2**18])
def test_files_of_windows_are_read_as_those_of_others(tmp_path, monkeypatch, size):
    """Byte order marks, also where files were joined, and line ends, wherever a piece ends."""
    monkeypatch.setattr(documents, 'PIECE', size)
    mark = '\ufeff'.encode()
    (tmp_path / 'a.txt').write_bytes(mark + b'one\r\n\r\n\r\ntwo\r\n' + mark + b'three')
    assert ''.join(read_lines(tmp_path / 'a.txt')) == 'one\n\n\ntwo\nthree'
    rows = mark + b'{"text": "one\\r\\n"}\r\n' + mark + b'{"text": "\\ufefftwo"}\r\n' + mark
    (tmp_path / 'a.jsonl').write_bytes(rows)
    assert read_lines(tmp_path / 'a.jsonl') == ['one\r\n', 'two']
    for name in ('b.txt', 'b.jsonl'):
        for code, said in (
            ('utf-16', 'those of UTF-16'),
            ('utf-16-le', 'a NUL byte, as in UTF-16'),
        ):
            (tmp_path / name).write_bytes('{"text": "one"}\n'.encode(code))
            with pytest.raises(
                ValueError, match=f'{name}, line 1 is not UTF-8 text .*{said}.*iconv'
            ):
                read_lines(tmp_path / name)


@pytest.mark.parametrize('case', WRONG)
def test_a_text_that_makes_no_sense(tmp_path, case):
    write, more, error, message = WRONG[case]
    (tmp_path / 'in').mkdir()
    write(tmp_path / 'in')
    if more.get('words') == 'folder':
        more = {**more, 'words': write_tokenizer(tmp_path / 'tokenizer')[0]}
    with pytest.raises(error, match=message):
        load(tmp_path / 'in', '*', **more)


def test_templates_that_refuse(tmp_path):
    changes = chat.Template(
        '{% for m in messages %}{{ m.content if loop.last else "" }};{% endfor %}', ()
    )
    with pytest.raises(ValueError, match='renders message 2 of 4 otherwise once the conversation'):
        chat.answers(changes, TALK)
    with pytest.raises(ValueError, match='refuses the messages: only users'):
        chat.render(chat.Template('{{ raise_exception("only users") }}'), TALK)
    with pytest.raises(ValueError, match=r'refuses the messages: .*unsafe'):
        chat.render(chat.Template('{{ messages.__class__.__mro__ }}'), TALK)
    (tmp_path / 'two').mkdir()
    write_tokenizer(tmp_path / 'two', template='in the other file')
    (tmp_path / 'two' / 'chat_template.jinja').write_text('of its own')
    assert tokenizer.tokenizer_of(str(tmp_path / 'two')).template.source == 'of its own'


def test_a_data_set_that_the_package_datasets_loads(tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')
    from jaxmp.data import hub

    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'hf')
    (tmp_path / 'in').mkdir()
    rows = [f'{i} tokens, and a few more' for i in range(40)]
    lines(tmp_path / 'in' / 'train.jsonl', 'body', [*rows, 'tested'])
    sources = hub.load(str(tmp_path / 'in'), 'body', 0.1)
    found = text.from_sources(sources, 8, 'bytes', str(tmp_path / 'cache'))
    assert said(found) == ''.join(rows[:37])[: found.train.x.size]
    assert said(found, 'test').endswith('tested'[: found.test.x.size - sum(map(len, rows[37:]))])
    with pytest.raises(ValueError, match="has no field 'text', but id, body; name it"):
        hub.load(str(tmp_path / 'in'), 'text', 0.1)
    lines(tmp_path / 'in' / 'validation.jsonl', 'body', ['tested', 'on these rows'])
    sources = hub.load(str(tmp_path / 'in'), 'body', 0.1)
    found = text.from_sources(sources, 8, 'bytes', str(tmp_path / 'cache'))
    assert said(found) == ''.join(rows)[: found.train.x.size]
    assert said(found, 'test') == 'testedon these rows'[:16]
    (tmp_path / 'in' / 'train.jsonl').unlink()
    with pytest.raises(ValueError, match="has the splits validation and no 'train'"):
        hub.load(str(tmp_path / 'in'), 'body', 0.1)
    with pytest.raises(FileNotFoundError, match=r'absent. is no folder; give one with text'):
        hub.load(str(tmp_path / 'absent'), 'body', 0.1)
