"""What a file says beside its tensors: every key is read, is neutral, or is refused by name."""

import functools
import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmp.data import tokenizer
from jaxmp.data.understood import contents
from jaxmp.models import adapters, families, gguf_file, gpt2_file, huggingface
from jaxmp.models.decoder import Lora
from jaxmp.models.rotary import KINDS, frequencies
from tests.test_decoder import described

gguf = pytest.importorskip('gguf')
SIZES = {'hidden_size': 16, 'num_attention_heads': 2, 'max_position_embeddings': 64}


# config.json.

PUBLISHED = {  # what published files say beside what transformers 5 writes
    'llama': {
        'torch_dtype': 'bfloat16', 'rope_scaling': None, 'rope_theta': 1e5,
        'rope_interleaved': False, 'is_llama_config': True, 'pretraining_tp': 1,
        'transformers.js_config': {'dtype': 'q4'},
        '_name_or_path': 'owner/name', 'max_sequence_length': 2048, 'unsloth_fixed': True,
    },
    'mistral': {'sliding_window': None, 'torch_dtype': 'bfloat16', 'head_dim': 8},
    'qwen2': {'use_mrope': False, 'max_window_layers': 21, 'sliding_window': 131072},
    'qwen3': {'attention_bias': False, 'rope_scaling': None, 'max_window_layers': 28},
    'gemma2': {
        'hidden_act': 'gelu_pytorch_tanh', 'cache_implementation': 'hybrid',
        'sliding_window_size': 4096,
    },
    'gemma3_text': {
        'cache_implementation': 'hybrid', 'rope_local_base_freq': 10000, 'rope_scaling': None,
        'sliding_window_pattern': 6,
    },
    'gpt2': {
        'n_ctx': 1024, 'task_specific_params': {'text-generation': {'do_sample': True}},
        '_num_labels': 1, 'output_past': True, 'torchscript': False, 'pruned_heads': {},
        'top_p': 1.0, 'num_beams': 1, 'is_decoder': False, 'finetuning_task': None,
    },
}  # fmt: skip


@pytest.mark.parametrize('family', PUBLISHED)
def test_the_configs_of_transformers_and_published_ones_are_read(tmp_path, family):
    transformers = pytest.importorskip('transformers')
    config = transformers.AutoConfig.for_model(family)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / 'config.json').read_text())
    for said in (saved, config.to_dict(), saved | PUBLISHED[family]):
        (tmp_path / 'config.json').write_text(json.dumps(said))
        if family == 'gpt2':
            assert gpt2_file.config_of(contents(tmp_path / 'config.json'), tmp_path).blocks == 12
        else:
            assert families.config_of(contents(tmp_path / 'config.json')).width >= 2304


@pytest.mark.parametrize(
    ('case', 'said', 'message'),
    [
        ('llama', {'logit_scale': 0.5}, 'logit_scale=0.5; allowed is no such key: give another'),
        ('llama', {'attention_dropout': 0.1}, 'attention_dropout=0.1; allowed is 0 or None'),
        ('llama', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5; allowed is 1'),
        ('llama', {'sliding_window': 8}, 'sliding_window=8; allowed is no such key'),
        ('qwen2', {'use_mrope': True}, 'use_mrope=True; allowed is False or None'),
        ('llama', {'quantization_config': {'bits': 4}}, "quantization_config={'bits': 4}; allowed"),
        ('llama', {'rope_parameters': {'mrope_section': [1]}}, r'mrope_section=\[1\]; allowed'),
        ('llama', {'rope_parameters': {'type': 'dynamic'}}, "type='dynamic'; allowed is 'default'"),
        ('qwen2', {'num_key_value_heads': [1, 2]}, r'heads=\[1, 2\], which is not a whole number'),
        ('llama', {'num_key_value_heads': 0}, 'num_key_value_heads=0, which is not a whole number'),
        ('llama', {'tie_word_embeddings': 'false'}, "embeddings='false'; allowed is True or False"),
        ('qwen2', {'use_sliding_window': 1}, 'use_sliding_window=1; allowed is True or False or N'),
        ('llama', {'rms_norm_eps': None}, 'rms_norm_eps=None, which is not a number above 0; down'),
        ('llama', {'rms_norm_eps': -1}, 'rms_norm_eps=-1, which is not a number above 0'),
        ('llama', {'rms_norm_eps': float('nan')}, 'rms_norm_eps=nan, which is not a number above'),
        ('llama', {'head_dim': -64}, 'head_dim=-64, which is not a whole number from 1'),
        ('llama', {'head_dim': 63}, 'heads of width 63, by head_dim .* allowed is an even number'),
        ('mistral', {'sliding_window': '512'}, "sliding_window='512', which is not a whole number"),
        ('gemma2', {'sliding_window': -5}, 'sliding_window=-5, which is not a whole number from 1'),
        ('gemma3', {'sliding_window_pattern': 0}, 'sliding_window_pattern=0, which is not a whole'),
        ('qwen2', {'max_window_layers': -1}, 'max_window_layers=-1, which is not a whole number f'),
        ('gemma2', {'attn_logit_softcapping': True}, 'attn_logit_softcapping=True, which is not a'),
        ('llama', {'rope_theta': '10000'}, "rope_theta='10000', which is not a number above 0"),
        ('llama', {'rope_scaling': [1]}, r'rope_scaling=\[1\]; allowed is an object or null; down'),
        ('llama', {'rope_parameters': 'yarn'}, "rope_parameters='yarn'; allowed is an object or n"),
        ('llama', {'rope_parameters': {'full_attention': 2}}, 'full_attention=2; allowed is an ob'),
        ('llama', {'rope_parameters': {'factor': 2.0}}, 'a factor and no rope_type; allowed is on'),
        ('llama', {'rope_parameters': {'type': 'linear', 'factor': '2'}}, "of config.json has fac"),
        ('llama', {'rope_parameters': {'rope_theta': None}}, 'rope_theta=None, which is not a num'),
        ('llama', {'rope_parameters': {'type': 'linear', 'rope_type': 'yarn'}}, 'linear and yarn;'),
        ('llama', {'rope_parameters': {'truncate': 'no'}}, "truncate='no'; allowed is True or Fal"),
        ('llama', {'layer_types': [None] * 3}, r'layer_types=\[None, None, None\]; allowed is a l'),
        ('llama', {'layer_types': 'full_attention'}, "layer_types='full_attention'; allowed is a "),
    ],
)  # fmt: skip
def test_what_config_json_says_and_nobody_reads_is_refused(case, said, message):
    with pytest.raises(ValueError, match=message):
        families.config_of(described(case) | said)


def test_a_key_of_a_gpt2_that_nobody_reads_is_refused(tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'gpt2', 'n_experts': 4}))
    with pytest.raises(ValueError, match='n_experts=4; allowed is no such key: give the directory'):
        gpt2_file.config_of(contents(tmp_path / 'config.json'), tmp_path)


# Positions.

SCALED = [
    {'rope_type': 'linear', 'factor': 4.0},
    {
        'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
        'original_max_position_embeddings': 16,
    },
    {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16},
    {
        'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16,
        'beta_fast': 8.0, 'beta_slow': 2.0, 'truncate': False, 'attention_factor': 0.7,
    },
    {
        'rope_type': 'yarn', 'factor': 8.0, 'original_max_position_embeddings': 16, 'mscale': 0.7,
        'mscale_all_dim': 0.3,
    },
    {'rope_type': 'yarn', 'factor': 4.0},
]  # fmt: skip


class Numbers(np.ndarray):
    """A tensor of torch, as far as transformers' positions need one."""

    def to(self, device=None, dtype=None):
        return self.astype(dtype) if dtype else self


TORCH = types.SimpleNamespace(
    arange=lambda *args, dtype=None: np.arange(*args, dtype=dtype).view(Numbers),
    clamp=np.clip, where=np.where, int64=np.int64, float=np.float32, float32=np.float32,
)  # fmt: skip


def of_transformers(monkeypatch, scaling):
    """The frequencies and the scale that transformers gives a Llama's heads of 16."""
    import transformers
    from transformers import modeling_rope_utils as theirs

    monkeypatch.setattr(theirs, 'torch', TORCH, raising=False)
    rope = {'rope_theta': 100.0, **scaling}
    config = transformers.LlamaConfig(**SIZES, head_dim=16, rope_parameters=rope)
    return theirs.ROPE_INIT_FUNCTIONS[scaling['rope_type']](config, None)


@pytest.mark.parametrize('scaling', SCALED)
def test_positions_are_those_of_transformers(monkeypatch, scaling):
    """By config.json's words of transformers 5 and of 4, for every kind that is accepted."""
    f, scale = of_transformers(monkeypatch, scaling)
    old = {'type' if k == 'rope_type' else k: v for k, v in scaling.items()}
    sizes = {'model_type': 'llama', **SIZES, 'head_dim': 16, 'vocab_size': 8, 'rope_theta': 100.0}
    sizes |= {'intermediate_size': 8, 'num_hidden_layers': 1}
    for words in ({'rope_parameters': scaling}, {'rope_scaling': old}, {'rope_parameters': old}):
        [kind] = families.config_of(sizes | words).kinds
        np.testing.assert_allclose(kind.frequencies, f, rtol=1e-6)
        assert kind.scale == pytest.approx(scale)
    assert {s['rope_type'] for s in SCALED} | {'default'} == {*KINDS}


# GGUF files.


def write_gguf(path, said, tensors=()):
    """A GGUF file with these entries."""
    writer = gguf.GGUFWriter(path, said.get('general.architecture', 'llama'))
    for key, value in said.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != 'general.architecture':
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, a in dict(tensors).items():
        writer.add_tensor(name, a)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MODEL = {
    'llama.context_length': 64, 'llama.embedding_length': 32, 'llama.block_count': 1,
    'llama.feed_forward_length': 8, 'llama.attention.head_count': 2,
    'llama.attention.layer_norm_rms_epsilon': 1e-5, 'llama.rope.freq_base': 100.0,
    'llama.vocab_size': 3, 'llama.rope.dimension_count': 16, 'llama.attention.value_length': 16,
    'general.name': 'A name', 'general.type': 'model', 'mradermacher.quantized_by': 'somebody',
    'quantize.imatrix.file': 'a.dat', 'tokenizer.ggml.eos_token_id': 2,
}  # fmt: skip


def opened(tmp_path, model=MODEL, **said):
    table = {'token_embd.weight': np.zeros((3, 32), np.float32)}
    return gguf_file.open_gguf(write_gguf(tmp_path / 'a.gguf', model | said, table)).described


def of_gemma(arch, **said):
    """The entries of a file of Gemma."""
    entries = {k.replace('llama.', f'{arch}.'): v for k, v in MODEL.items()}
    entries |= {'general.architecture': arch, f'{arch}.attention.sliding_window': 4}
    return {k: v for k, v in (entries | said).items() if v is not None}


@pytest.mark.parametrize(
    ('said', 'scaling'),
    [
        ({}, {'rope_type': 'default'}),
        ({'type': 'none', 'factor': 4.0}, {'rope_type': 'default'}),
        ({'type': 'linear', 'factor': 4.0}, {'rope_type': 'linear', 'factor': 4.0}),
        ({'factor': 4.0}, {'rope_type': 'linear', 'factor': 4.0}),
        ({'scale_linear': 4.0}, {'rope_type': 'linear', 'factor': 4.0}),
        ({'type': 'yarn', 'factor': 4.0, 'original_context_length': 16}, SCALED[2]),
        (
            {
                'type': 'yarn', 'factor': 4.0, 'original_context_length': 16, 'finetuned': True,
                'yarn_beta_fast': 8.0, 'yarn_beta_slow': 2.0, 'attn_factor': 1.0,
                'yarn_ext_factor': 1.0, 'yarn_log_multiplier': 0.0,
            },
            SCALED[2] | {'beta_fast': 8.0, 'beta_slow': 2.0},
        ),
    ],
)  # fmt: skip
def test_positions_of_a_gguf_file_are_those_of_transformers(tmp_path, monkeypatch, said, scaling):
    key = lambda k: f'llama.rope.{"" if k == "scale_linear" else "scaling."}{k}'
    entries = {key(k): v for k, v in said.items()}
    [kind] = families.config_of(opened(tmp_path, **entries)).kinds
    if scaling['rope_type'] == 'default':
        wanted = frequencies(16, {'rope_theta': 100.0})
    else:
        wanted = of_transformers(monkeypatch, scaling)
    np.testing.assert_allclose(kind.frequencies, wanted[0], rtol=1e-6)
    assert kind.scale == pytest.approx(wanted[1])


@pytest.mark.parametrize(
    ('said', 'message'),
    [
        ({'llama.expert_count': 8}, 'expert_count=8; allowed is 0: give a folder of safetensors'),
        ({'llama.attention.sliding_window': 8}, 'attention.sliding_window=8; allowed is 0'),
        ({'llama.attention.causal': False}, 'attention.causal=False; allowed is True'),
        ({'llama.rope.dimension_count': 8}, 'rope.dimension_count=8; allowed is 16'),
        ({'llama.attention.value_length': 8}, 'attention.value_length=8; allowed is 16'),
        ({'llama.logit_scale': 0.5}, 'logit_scale=0.5; allowed is 1'),
        ({'llama.new': 1}, 'new=1; allowed is no such key'),
        ({'split.count': 2}, 'split.count=2; allowed is 0 or 1'),
        ({'general.type': 'adapter'}, "general.type='adapter'; allowed is 'model'"),
        ({'llama.rope.scaling.yarn_attn_factor': 1.5}, 'yarn_attn_factor=1.5; allowed is no such'),
        ({'llama.rope.scaling.type': 'yarn'}, r'does not say its llama\.rope\.scaling\.factor'),
        ({'llama.attention.head_count_kv': [1, 2]}, 'has a number for each block as llama.attenti'),
        ({'llama.attention.head_count': 0}, 'a.gguf: llama has attention.head_count=0, which is n'),
        ({'llama.rope.freq_base': '1e4'}, "a.gguf has rope_theta='1e4', which is not a number abo"),
        (
            {'llama.rope.scaling.type': 'linear', 'llama.rope.scaling.factor': 0.0},
            'rope_parameters of .*a.gguf has factor=0.0, which is not a number above 0',
        ),
    ],
)  # fmt: skip
def test_an_entry_of_a_gguf_file_that_nobody_reads_is_refused(tmp_path, said, message):
    with pytest.raises(ValueError, match=message):
        families.config_of(opened(tmp_path, **said), f'{tmp_path}/a.gguf')


@pytest.mark.parametrize('depth', [16, 8])
@pytest.mark.parametrize(
    ('arch', 'blocks', 'by_width'),
    [('gemma2', 26, False), ('gemma2', 46, True), ('gemma3', 26, False), ('gemma3', 62, True)],
)
def test_a_gemma_of_a_gguf_file_is_as_llama_cpp_takes_it(tmp_path, arch, blocks, by_width, depth):
    """By default, queries of the 27B by the width of the stream."""
    sizes = {'attention.key_length': depth, 'attention.value_length': depth}
    sizes |= {'rope.dimension_count': depth, 'block_count': blocks, 'rope.freq_base': 1e6}
    entries = of_gemma(arch, **{f'{arch}.{k}': v for k, v in sizes.items()})
    c = families.config_of(opened(tmp_path, entries))
    assert c.query_scale == (16 if by_width else depth) ** -0.5
    assert (c.activation, c.norm_offset, c.tied) == ('gelu_pytorch_tanh', 1.0, True)
    assert (c.attention_cap, c.logits_cap) == ((50.0, 30.0) if arch == 'gemma2' else (0.0, 0.0))
    period = 2 if arch == 'gemma2' else 6
    assert [c.kinds[k].window for k in c.layers] == [
        4 if (i + 1) % period else 0 for i in range(blocks)
    ]
    for kind in c.kinds:
        local = arch == 'gemma3' and kind.window
        wanted = frequencies(depth, {'rope_theta': 1e4 if local else 1e6})
        assert (kind.frequencies, kind.scale) == wanted


@pytest.mark.parametrize(
    ('entries', 'message'),
    [
        (
            of_gemma('gemma3', **{'gemma3.attn_logit_softcapping': 50.0}),
            'attn_logit_softcapping=50.0; allowed is 0: give a folder of safetensors',
        ),
        (of_gemma('gemma3', **{'gemma3.attention.sliding_window': None}), 'not say its gemma3.att'),
        (
            of_gemma('gemma3', **{'gemma3.attention.sliding_window_pattern': [True]}),
            'has a number for each block as gemma3.attention.sliding_window_pattern',
        ),
        (
            of_gemma('gemma2', **{'gemma2.rope.freq_base_swa': 1e4}),
            'rope.freq_base_swa=10000.0; allowed is no such key',
        ),
        (
            of_gemma('gemma2', **{'gemma2.router_logit_softcapping': 30.0}),
            'router_logit_softcapping=30.0; allowed is no such key',
        ),
        (
            of_gemma('gemma2', **{'gemma2.attn_logit_softcapping': -1.0}),
            'attn_logit_softcapping=-1.0, which is not a number above 0',
        ),
        (of_gemma('gemma2', **{'gemma2.attention.scale': 0.1}), 'scale=0.1.*; allowed is 0'),
    ],
)
def test_an_entry_of_a_gemma_that_nobody_reads_is_refused(tmp_path, entries, message):
    with pytest.raises(ValueError, match=message):
        families.config_of(opened(tmp_path, entries))


def test_all_tokens_that_end_a_text_of_a_gguf_file_do(tmp_path):
    assert opened(tmp_path)['eos_token_id'] == 2
    ends = {'tokenizer.ggml.eot_token_id': 1, 'tokenizer.ggml.eom_token_id': 2}
    assert opened(tmp_path, **ends)['eos_token_id'] == [1, 2]


# Tokenizers: one of the package tokenizers, written as GGUF, has the same tokens.

TEXT = (
    "the cat isn't in the hat; It's 12345 o'clock, WE'LL see the caf\u00e9 and the cafe\u0301.\n"
    * 4
)
HARD = [
    "The cat's hat:\n\n  the  hat\t is 1234567 thehat  \n \u00bd \u0663\u0664 x\u00b2",
    'cafe\u0301 caf\u00e9 \u6f22\u5b57 \U0001f600\u200d\U0001f525 na\u00efve\u00a0space \r\n end ',
    '<think>the hat</think> <|end|>a<|end|> <unk> x  y [PAD9] <think',
    ' world world worldly theworld',
    '',
]
SPECIAL = ['<|begin|>', '<|end|>', '<unk>']
ADDED = ['<think>', '</think>', '  y']
WHOLE = [' world', 'hat']  # tokens that no merges make


def of_family(pre):
    """A tokenizer with the parts that the family's tokenizer.json has."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers import pre_tokenizers as parts
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    llama3 = TikTokenConverter.__init__.__defaults__[1]
    split = lambda pattern: [
        parts.Split(Regex(pattern), 'isolated'), parts.ByteLevel(False, use_regex=False)
    ]  # fmt: skip
    words = parts.Sequence({
        'gpt-2': [parts.ByteLevel(False)],
        'smollm': [parts.Digits(individual_digits=True), parts.ByteLevel(False)],
        'llama-bpe': split(llama3),
        'qwen2': split(PRETOKENIZE_REGEX),
    }[pre])  # fmt: skip
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = words
    alphabet = parts.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([TEXT], trainer)
    model = json.loads(trained.to_str())['model']
    merges = [tuple(m) for m in model['merges'] if 'h' not in m[1] or 'a' not in m[1]]
    vocabulary = model['vocab']
    for word in (*(w.replace(' ', '\u0120') for w in WHOLE), *SPECIAL, *ADDED):
        vocabulary.setdefault(word, len(vocabulary))
    words_alone = {k: v for k, v in vocabulary.items() if k not in (*SPECIAL, *ADDED)}
    made = Tokenizer(models.BPE(words_alone, merges, ignore_merges=pre == 'llama-bpe'))
    made.normalizer = normalizers.NFC() if pre == 'qwen2' else None
    made.pre_tokenizer, made.decoder = words, decoders.ByteLevel()
    made.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in SPECIAL])
    made.add_tokens([AddedToken(w, normalized=False) for w in ADDED])
    return made, vocabulary, merges


def words_of(family, vocabulary, pairs, **said):
    """The entries of the tokenizer of a GGUF file; the last token fills the table up."""
    words = [*sorted(vocabulary, key=vocabulary.get), '[PAD9]']
    kinds = {'<unk>': 2, '[PAD9]': 5, **dict.fromkeys(SPECIAL[:2], 3), **dict.fromkeys(ADDED, 4)}
    entries = {
        'model': 'gpt2', 'pre': family, 'tokens': words, 'merges': [' '.join(m) for m in pairs],
        'token_type': [kinds.get(w, 1) for w in words], 'bos_token_id': words.index('<|begin|>'),
        'eos_token_id': words.index('<|end|>'), 'add_space_prefix': False, 'padding_token_id': 0,
    }  # fmt: skip
    return {f'tokenizer.ggml.{k}': v for k, v in (entries | said).items() if v is not None}


@pytest.mark.parametrize('begin', [None, False, True])
@pytest.mark.parametrize('pre', ['gpt-2', 'smollm', 'llama-bpe', 'qwen2'])
def test_a_gguf_file_has_the_tokens_of_the_original(tmp_path, pre, begin):
    original, vocabulary, merges = of_family(pre)
    said = {} if begin is None else {'add_bos_token': begin, 'add_eos_token': begin}
    path = write_gguf(tmp_path / 'a.gguf', words_of(pre, vocabulary, merges, **said))
    made = tokenizer.tokenizer_of(str(path))
    wanted = [original.encode(text, add_special_tokens=False).ids for text in HARD]
    assert [ids.tolist() for ids in made.encode(HARD)] == wanted
    assert [made.decode(ids) for ids in wanted] == [original.decode(i, False) for i in wanted]
    whole = [original.id_to_token(i) for i in wanted[3]]
    assert ('\u0120world' in whole) == (pre == 'llama-bpe')  # else the law above is not tried
    begins = pre == 'llama-bpe' if begin is None else begin
    assert made.begin == ((vocabulary['<|begin|>'],) if begins else ())
    assert made.end == (vocabulary['<|end|>'],)
    folder = tmp_path / 'saved'
    folder.mkdir()
    made.save(folder)
    again = tokenizer.tokenizer_of(str(folder))
    assert [ids.tolist() for ids in again.encode(HARD)] == wanted
    assert (again.begin, again.end) == (made.begin, made.end)


def test_tokens_that_the_config_of_a_folder_adds_are_whole(tmp_path):
    """As for transformers; a tokenizer.json may have lost what was added to it later."""
    original, vocabulary, _ = of_family('gpt-2')
    whole = json.loads(original.to_str())
    added = {str(t.pop('id')): {**t, '__type': 'AddedToken'} for t in whole['added_tokens']}
    whole['model']['vocab'], whole['added_tokens'] = vocabulary, []
    (tmp_path / 'tokenizer.json').write_text(json.dumps(whole))
    seen = []
    for said in ({}, {'added_tokens_decoder': added}):
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps(said))
        seen.append(tokenizer.tokenizer_of(str(tmp_path)))
    ids = [[t.encode([text])[0].tolist() for text in HARD] for t in seen]
    wanted = [original.encode(text, add_special_tokens=False).ids for text in HARD]
    assert ids[1] == wanted != ids[0]
    assert seen[0].identity != seen[1].identity


PLAIN = {  # what published files say that changes no token
    'model_max_length': 1e30, 'clean_up_tokenization_spaces': False, 'chat_template': '{{ x }}',
    'tokenizer_class': 'LlamaTokenizer', 'legacy': False, 'sp_model_kwargs': {}, 'errors': 'x',
    'spaces_between_special_tokens': False, 'use_default_system_prompt': False,
    'add_prefix_space': False, 'padding_side': 'left', 'model_input_names': ['input_ids'],
    'auto_map': {}, 'add_bos_token': True, 'add_eos_token': False, 'bos_token': None,
    'eos_token': '<|end|>', 'pad_token': {'content': '<unk>', '__type': 'AddedToken'},
    'additional_special_tokens': ['<|begin|>', '<|end|>'], 'extra_special_tokens': {},
    'split_special_tokens': False, 'backend': 'tokenizers', 'is_local': True, 'auto': 1,
}  # fmt: skip
LETTER = {
    'content': 'e',
    'lstrip': True,
    'rstrip': False,
    'normalized': False,
    'single_word': False,
}


def folder_of(tmp_path, **files):
    """A folder with a tokenizer.json and these files, with ids in place of ``#word``."""
    original, vocabulary, _ = of_family('gpt-2')
    original.save(str(tmp_path / 'tokenizer.json'))
    number = lambda m: f'"{vocabulary[m[1]]}":' if m[2] else str(vocabulary[m[1]])
    for name, said in files.items():
        lines = re.sub(r'"#([^"]+)"(:?)', number, json.dumps(said))
        (tmp_path / f'{name}.json').write_text(lines)
    return original


@pytest.mark.parametrize(
    ('files', 'changes'),
    [
        ({'tokenizer_config': PLAIN}, False),
        ({'tokenizer_config': {'eos_token': 'e'}}, True),
        ({'tokenizer_config': {'pad_token': LETTER | {'__type': 'AddedToken'}}}, True),
        ({'tokenizer_config': {'image_token': 'e'}}, True),
        ({'tokenizer_config': {'additional_special_tokens': ['e']}}, True),
        ({'tokenizer_config': {'extra_special_tokens': ['e']}}, True),
        ({'tokenizer_config': {'extra_special_tokens': {'image_token': 'e'}}}, True),
        ({'special_tokens_map': {'eos_token': LETTER}}, True),
        ({'special_tokens_map': {'additional_special_tokens': ['e']}}, True),
        (
            {'special_tokens_map': {'pad_token': 'e'}, 'tokenizer_config': {'pad_token': None}},
            True,
        ),
        (
            {
                'special_tokens_map': {'eos_token': 'e'},
                'tokenizer_config': {'added_tokens_decoder': {}},
            },
            False,
        ),
        ({'tokenizer_config': {'added_tokens_decoder': {'#e': LETTER}}}, True),
        ({'tokenizer_config': {'added_tokens_decoder': {
            '#<|end|>': LETTER | {'content': '<|end|>', 'special': True},
        }}}, True),
        ({'added_tokens': {'e': '#e'}}, True),
    ],
)  # fmt: skip
def test_tokens_beside_a_tokenizer_are_those_of_transformers(tmp_path, files, changes):
    transformers = pytest.importorskip('transformers')
    plain, folder = folder_of(tmp_path, **files), str(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    texts = [*HARD, 'x <|end|> hat']
    wanted = [theirs.encode(text, add_special_tokens=False) for text in texts]
    seen = tokenizer.tokenizer_of(folder)
    assert [ids.tolist() for ids in seen.encode(texts)] == wanted
    assert (wanted != [plain.encode(t, add_special_tokens=False).ids for t in texts]) == changes


@pytest.mark.parametrize(
    ('said', 'message'),
    [
        ({'split_special_tokens': True}, 'split_special_tokens=True; allowed is False or None: wr'),
        ({'add_prefix_space': True}, 'config.json has add_prefix_space=True; allowed is False or'),
        ({'eos_token': '<new>'}, "'<new>' in tokenizer_config.json or .*, which its tok"),
        ({'extra_special_tokens': ['<new>']}, "'<new>' in .*, which its tokenizer lacks"),
        ({'extra_special_tokens': 'e'}, "extra_special_tokens='e' in .*, and allowed is a list"),
        ({'eos_token': 5}, 'eos_token=5 in .*, which is not a token; download'),
        ({'pad_token': {'content': 'e', 'width': 2}}, 'width=2; allowed is no such key'),
        ({'added_tokens_decoder': ['x']}, r"has added_tokens_decoder=\['x'\] in .*and allowed is"),
        ({'added_tokens_decoder': {'a': LETTER}}, "has the token 'e' as a in tokenizer_config"),
        ({'added_tokens_decoder': {'1': LETTER}}, "has the token 'e' as 1 in tokenizer_config"),
        ({'added_tokens_decoder': {'9999': LETTER | {'content': '<new>'}}}, "'<new>' as 9999 in"),
    ],
)  # fmt: skip
def test_tokens_beside_a_tokenizer_that_it_has_not_are_refused(tmp_path, said, message):
    folder_of(tmp_path, tokenizer_config=said)
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer.tokenizer_of(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize('role', ['eos', 'eot', 'eom', 'unknown', 'padding', 'fim_pre'])
def test_a_token_of_a_gguf_file_with_a_role_is_whole_whatever_its_kind(tmp_path, role):
    vocabulary = {w: i for i, w in enumerate(['<', 'h', 'i', '>', 'x', '<hi>', 'xx', *SPECIAL])}
    said = {f'{k}_token_id': None for k in ('bos', 'eos', 'padding')}
    said |= {f'{role}_token_id': 5, 'bos_token_id': 4, 'token_type': None}  # 4: a letter
    path = write_gguf(tmp_path / 'a.gguf', words_of('gpt-2', vocabulary, [('x', 'x')], **said))
    seen = tokenizer.tokenizer_of(str(path))
    seen.save(tmp_path)
    for t in (seen, tokenizer.tokenizer_of(str(tmp_path))):
        assert t.encode(['xx<hi>'])[0].tolist() == [6, 5]


def test_equal_tokens_of_other_kinds_are_not_found_in_a_cache(tmp_path):
    _, vocabulary, merges = of_family('gpt-2')
    seen = set()
    for i, said in enumerate(({}, {'add_bos_token': True}, {'token_type': None})):
        path = write_gguf(tmp_path / f'{i}.gguf', words_of('gpt-2', vocabulary, merges, **said))
        seen.add(tokenizer.tokenizer_of(str(path)).identity)
    assert len(seen) == 3


@pytest.mark.parametrize(
    ('said', 'message'),
    [
        ({'add_space_prefix': True}, 'add_space_prefix=True; allowed is False: give config.data.t'),
        ({'remove_extra_whitespaces': True}, 'remove_extra_whitespaces=True; allowed is False'),
        ({'precompiled_charsmap': [1]}, r'precompiled_charsmap=\[1\]; allowed is no such key'),
        ({'add_bos_token': True, 'bos_token_id': None}, 'add_bos_token=True and no bos_token_id'),
        ({'token_type': [6] * 8}, 'token_type=6; allowed is 1 or 2 or 3 or 4 or 5'),
        ({'token_type': [1] * 7}, '8 tokens, 8 of them different, and 7 kinds'),
        ({'tokens': ['a'] * 8}, '8 tokens, 1 of them different, and 8 kinds'),
        ({'merges': None}, 'is read, with tokens, merges, and gpt-2'),
        ({'tokens': 'a'}, 'is read, with tokens, merges, and gpt-2'),
        ({'merges': ['a b ab']}, r'merges that are not of two of its tokens each \(a b ab\): give'),
        ({'merges': ['a']}, r'merges that are not of two of its tokens each \(a\): give'),
        ({'merges': ['a z']}, 'merges that are not of two of its tokens each .*out of vocabulary'),
        ({'eot_token_id': 99}, 'a.gguf has eot_token_id=99; allowed is 0 to 7: give config'),
        ({'eos_token_id': -1}, 'a.gguf has eos_token_id=-1; allowed is 0 to 7: give config'),
        ({'pre': 'tekken'}, 'kind gpt2, tekken; of a GGUF file gpt2 is read'),
    ],
)  # fmt: skip
def test_words_of_a_gguf_tokenizer_that_nobody_reads_are_refused(tmp_path, said, message):
    vocabulary = {w: i for i, w in enumerate(['a', 'b', 'ab', *SPECIAL, '<think>'])}
    path = write_gguf(tmp_path / 'a.gguf', words_of('gpt-2', vocabulary, [('a', 'b')], **said))
    with pytest.raises(ValueError, match=message):
        tokenizer.tokenizer_of(str(path))


# SentencePiece's tokenizers: scores in place of merges.

PIECES = {  # with kinds and scores
    '<unk>': (2, 0.0), '<s>': (3, 0.0), '</s>': (3, 0.0), '\n\n': (4, -9.0), '  ': (4, -9.0),
    **{f'<0x{i:02X}>': (6, 0.0) for i in range(256)},
    'ab': (1, -1.0), 'bc': (1, -0.0), '\u2581a': (1, -2.0), 'abc': (1, -3.0), 'cc': (5, 5.0),
    'ca': (1, -5.0), '\u2581': (1, -7.0), 'a': (1, -8.0), 'b': (1, -9.0), 'c': (1, -10.0),
}  # fmt: skip


def pieces_of(**said):
    """The entries of SentencePiece's tokenizer in a GGUF file."""
    kinds, scores = zip(*PIECES.values(), strict=True)
    entries = {
        'model': 'llama', 'pre': 'default', 'tokens': [*PIECES], 'scores': [*scores],
        'token_type': [*kinds], 'bos_token_id': 1, 'eos_token_id': 2, 'unknown_token_id': 0,
        'add_bos_token': True, 'add_space_prefix': False,
    }  # fmt: skip
    return {f'tokenizer.ggml.{k}': v for k, v in (entries | said).items() if v is not None}


SCORED = [  # text, tokens, those with a space before
    ('abc', 'abc', '\u2581a bc'),  # bc comes before all, a space and a before abc
    ('abab', 'ab ab', '\u2581 ab ab'),
    ('cab', 'c ab', '\u2581 c ab'),
    ('cc', 'c c', '\u2581 c c'),  # cc is unused
    ('a a', 'a \u2581a', '\u2581a \u2581a'),
    ('a\n\nb', 'a \n\n b', '\u2581a \n\n \u2581 b'),
    ('</s>a', '</s> a', '</s> \u2581a'),
    ('\u00e9b\n', '<0xC3> <0xA9> b <0x0A>', '\u2581 <0xC3> <0xA9> b <0x0A>'),
]


@pytest.mark.parametrize('prefix', [False, True])
def test_pieces_are_joined_by_their_scores(tmp_path, prefix):
    """Also in what is saved, which transformers reads."""
    transformers = pytest.importorskip('transformers')
    path = write_gguf(tmp_path / 'a.gguf', pieces_of(add_space_prefix=None if prefix else False))
    made = tokenizer.tokenizer_of(str(path))
    made.save(tmp_path)
    again = tokenizer.tokenizer_of(str(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = {piece: i for i, piece in enumerate(PIECES)}
    for text, *joined in SCORED:
        wanted = [ids[piece] for piece in joined[prefix].split(' ')]
        for t in (made, again):
            assert (t.encode([text])[0].tolist(), t.begin) == (wanted, (1,))
            assert t.decode(wanted) == text or prefix
        assert theirs.encode(text) == [1, *wanted]
    assert made.decode(made.encode(['a bc'])[0]) == 'a bc'


@pytest.mark.parametrize('entry', ['tokens', 'scores'])
def test_a_list_of_a_gguf_file_that_is_cut_off(tmp_path, entry):
    said = {f'tokenizer.ggml.{entry}': pieces_of()[f'tokenizer.ggml.{entry}']}
    whole = write_gguf(tmp_path / 'a.gguf', said).read_bytes()
    for less in range(500, 504):  # in one case the bytes are whole numbers
        (path := tmp_path / f'{less}.gguf').write_bytes(whole[:-less])
        with pytest.raises(ValueError, match=rf'{less}\.gguf is damaged or cut off: [\d,]+ bytes'):
            tokenizer.tokenizer_of(str(path))


def test_spaces_that_are_a_token_are_one(tmp_path):
    for prefix in (False, True):
        path = write_gguf(tmp_path / f'{prefix}.gguf', pieces_of(add_space_prefix=prefix))
        made = tokenizer.tokenizer_of(str(path))
        assert [*PIECES].index('  ') in made.encode(['a  b'])[0]
        assert made.decode(made.encode(['a  b'])[0]).replace('   ', '  ') == 'a  b'


@pytest.mark.parametrize(
    ('said', 'message'),
    [
        ({'model': 't5'}, 'kind t5, default; of a GGUF file gpt2 is read, .* and llama is, with'),
        ({'scores': None}, 'and llama is, with tokens and scores: give config.data.tokenizer the'),
        ({'scores': [1.0, 2.0]}, '271 tokens and 2 scores, 2 of them different; allowed is a sco'),
        ({'scores': [0.0] * 271}, '271 tokens and 271 scores, 1 of them different; allowed is a'),
        ({'token_type': [7] * 271}, 'token_type=7; allowed is 1 or 2 or 3 or 4 or 5 or 6: give'),
        ({'unknown_token_id': 999}, 'unknown_token_id=999; allowed is 0 to 270: give config'),
        ({'remove_extra_whitespaces': True}, 'remove_extra_whitespaces=True; allowed is False'),
        ({'precompiled_charsmap': [1]}, r'precompiled_charsmap=\[1\]; allowed is no such key'),
    ],
)
def test_a_tokenizer_of_scores_that_is_not_understood_is_refused(tmp_path, said, message):
    path = write_gguf(tmp_path / 'a.gguf', pieces_of(**said))
    with pytest.raises(ValueError, match=message):
        tokenizer.tokenizer_of(str(path))


# adapter_config.json.

PEFT = {  # all that PEFT 0.20 writes of a LoraConfig
    'alora_invocation_tokens': None, 'alpha_pattern': {}, 'arrow_config': None,
    'auto_mapping': None, 'bias': 'none', 'corda_config': None, 'ensure_weight_tying': False,
    'eva_config': None, 'exclude_modules': None, 'fan_in_fan_out': False, 'inference_mode': True,
    'init_lora_weights': True, 'kasa_config': None, 'layer_replication': None,
    'layers_pattern': None, 'layers_to_transform': None, 'loftq_config': {}, 'lora_alpha': 8,
    'lora_bias': False, 'lora_dropout': 0.05, 'lora_ga_config': None, 'megatron_config': None,
    'megatron_core': 'megatron.core', 'modules_to_save': None, 'monteclora_config': None,
    'peft_type': 'LORA', 'peft_version': '0.20.0', 'qalora_group_size': 16, 'r': 4,
    'rank_pattern': {}, 'revision': None, 'target_modules': ['q_proj', 'v_proj'],
    'target_parameters': None, 'task_type': 'CAUSAL_LM', 'trainable_token_indices': None,
    'use_bdlora': None, 'use_dora': False, 'use_qalora': False, 'use_rslora': False,
    'velora_config': None,
}  # fmt: skip
TIED = {'model_type': 'llama', 'tie_word_embeddings': True}
ROOT = 'base_model.model.'
NAME = 'model.layers.{}.self_attn.{}_proj'
KERNELS = [NAME.format(i, p) for i in (0, 1) for p in 'qv']


@pytest.fixture
def low_rank(tmp_path):
    """Writes a base of two blocks and its adapters, and returns their folder and the arrays."""

    def write(ranks=(4, 4, 4, 4), base=(), extra=(), dtype=np.float32, **about):
        random = np.random.default_rng(0)
        draw = lambda *shape: random.standard_normal(shape).astype(dtype)
        kernels = {f'{n}.weight': draw(8, 6) for n in KERNELS} | dict(base)
        low = {f'{n}.lora_{x}': a for n, r in zip(KERNELS, ranks, strict=True)
               for x, a in (('A', draw(r, 6)), ('B', draw(8, r)))}  # fmt: skip
        for folder, file, arrays, name, said in (
            ('base', 'model', kernels, 'config', TIED),
            ('low', 'adapter_model', {f'{ROOT}{n}.weight': a for n, a in low.items()},
             'adapter_config', PEFT | {'base_model_name_or_path': str(tmp_path / 'base')} | about),
        ):  # fmt: skip
            (tmp_path / folder).mkdir(exist_ok=True)
            arrays |= dict(extra) if folder == 'low' else {}
            save_file(arrays, tmp_path / folder / f'{file}.safetensors', metadata={'format': 'pt'})
            (tmp_path / folder / f'{name}.json').write_text(json.dumps(said))
        return str(tmp_path / 'low'), kernels, low

    return write


@pytest.mark.parametrize(
    ('about', 'ranks', 'scales'),
    [
        ({}, (4, 4, 4, 4), (2, 2, 2, 2)),
        (
            {'alpha_pattern': {'q_proj': 64}, 'rank_pattern': {'v_proj': 2}},
            (4, 2, 4, 2), (16, 4, 16, 4),
        ),
        ({'alpha_pattern': {r'layers\.1\..*': 4, 'q_proj': 64}}, (4, 4, 4, 4), (16, 2, 1, 1)),
        ({'alpha_pattern': {'_proj': 64, 'proj': 4}}, (4, 4, 4, 4), (2, 2, 2, 2)),  # no whole word
        ({'rank_pattern': {'model.layers.0.self_attn.q_proj': 1}}, (1, 4, 4, 4), (8, 2, 2, 2)),
        ({'use_rslora': True, 'alpha_pattern': {'q_proj': 2}}, (4, 4, 4, 4), (1, 4, 1, 4)),
    ],
)  # fmt: skip
def test_adapters_are_merged_as_peft_does(low_rank, about, ranks, scales):
    folder, kernels, low = low_rank(ranks, **about)
    found = adapters.open_with_adapters(folder)
    for name, scale in zip(KERNELS, scales, strict=True):
        update = scale * (low[f'{name}.lora_B'] @ low[f'{name}.lora_A'])
        wanted = kernels[f'{name}.weight'] + update
        np.testing.assert_allclose(found.read(f'{name}.weight'), wanted, rtol=1e-5, atol=1e-5)


def test_adapters_of_a_base_in_16_bits_are_rounded_once(low_rank):
    folder, kernels, low = low_rank(dtype=jnp.bfloat16)
    found = adapters.open_with_adapters(folder)
    for name in KERNELS:
        a, b = (low[f'{name}.lora_{x}'].astype(np.float32) for x in 'AB')
        wanted = kernels[f'{name}.weight'].astype(np.float32) + 2 * (b @ a)
        np.testing.assert_array_equal(found.read(f'{name}.weight'), wanted)


def test_adapters_with_patterns_are_not_trained_on_as_others(low_rank):
    open_low = functools.partial(adapters.open_with_adapters, lora=Lora(4, 8, ('q_proj', 'v_proj')))
    folder, *_ = low_rank()
    assert len(open_low(folder).shapes) == 4 + 8
    folder, *_ = low_rank(use_rslora=True, lora_alpha=4)  # 4 / sqrt(4) = 8 / 4
    assert len(open_low(folder).shapes) == 4 + 8
    folder, *_ = low_rank(alpha_pattern={'q_proj': 64})
    message = (
        r"lora\(4, 8, targets='q_proj v_proj'\) and lora\(4, 64, .*'\); train the same, or all"
    )
    with pytest.raises(ValueError, match=message):
        open_low(folder)


ARRAY = np.zeros((4, 6), np.float32)


@pytest.mark.parametrize(
    ('about', 'message'),
    [
        ({'use_dora': True}, 'use_dora=True; allowed is False or None: merge them with PEFT'),
        ({'bias': 'all'}, "bias='all'; allowed is 'none' or None"),
        ({'lora_bias': True}, 'lora_bias=True; allowed is False'),
        ({'fan_in_fan_out': True}, 'fan_in_fan_out=True; allowed is False'),
        ({'modules_to_save': ['lm_head']}, r"modules_to_save=\['lm_head'\]; allowed is \[\] or"),
        ({'init_lora_weights': 'pissa'}, "init_lora_weights='pissa'; allowed is True or False or"),
        ({'layer_replication': [[0, 1]]}, 'layer_replication=.*; allowed is no such key: merge'),
        ({'trainable_token_indices': [1]}, 'trainable_token_indices='),
        ({'alora_invocation_tokens': [1]}, 'alora_invocation_tokens='),
        ({'revision': 'v2'}, "revision='v2'; allowed is 'main' or '' or None"),
        ({'new_method': 1}, 'new_method=1; allowed is no such key'),
        ({'r': 0}, 'has r=0 and lora_alpha=8 for model.layers.0.self_attn.q_proj; allow'),
        ({'r': True}, 'adapter_config.json has r=True and lora_alpha=8'),
        ({'lora_alpha': float('nan')}, 'adapter_config.json has r=4 and lora_alpha=nan'),
        ({'alpha_pattern': {'q_proj': '8'}}, "adapter_config.json has r=4 and lora_alpha='8'"),
        ({'alpha_pattern': {'q_proj(': 8}}, r'_config.json has alpha_pattern=.*; allowed is a d'),
        ({'rank_pattern': ['q_proj']}, r"_config.json has rank_pattern=\['q_proj'\].*allowed is a"),
        ({'rank_pattern': {'q_proj': 3}}, r'shapes \[\(4, 6\), \(8, 4\)\], and by .*\[\(3, 6\)'),
        ({'extra': {f'{ROOT}lm_head.weight': ARRAY}}, 'has base_model.model.lm_head.weight; a'),
        (
            {'extra': {f'{ROOT}model.embed_tokens.lora_embedding_A': ARRAY}},
            'has base_model.model.model.embed_tokens.lora_embedding_A; allowed are lora_A.weight',
        ),
        (
            {'extra': {f'{ROOT}model.layers.0.self_attn.q_proj.lora_magnitude_vector': ARRAY}},
            'q_proj.lora_magnitude_vector; allowed are lora_A',
        ),
        (
            {'extra': {f'{ROOT}model.layers.2.self_attn.q_proj.lora_A.weight': ARRAY}},
            'adapters of model.layers.2.self_attn.q_proj, which .*base lacks; merge',
        ),
        (
            {
                'base': {'lm_head.weight': np.zeros((9, 6), np.float32)},
                'extra': {
                    f'{ROOT}lm_head.lora_A.weight': ARRAY,
                    f'{ROOT}lm_head.lora_B.weight': np.zeros((9, 4), np.float32),
                },
            },
            'adapters of lm_head, which .* lacks',  # it is the token table, which has none
        ),
        (
            {'extra': {f'{ROOT}{KERNELS[0]}.lora_B.bias': ARRAY}}, 'q_proj.lora_B.bias; allowed are'
        ),
        ({'base_model_name_or_path': 'gone/a/b'}, "to 'gone/a/b', which is not there; put"),
    ],
)  # fmt: skip
def test_adapters_of_which_a_part_would_be_skipped_are_refused(low_rank, about, message):
    folder, *_ = low_rank(**about)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        adapters.open_with_adapters(folder)
    assert '\n' not in str(caught.value)


def test_adapters_of_a_gpt2_are_refused(low_rank, tmp_path):
    folder, *_ = low_rank()
    (tmp_path / 'base' / 'config.json').write_text(json.dumps({'model_type': 'gpt2'}))
    with pytest.raises(ValueError, match='has adapters of a gpt2, which are not read; merge'):
        adapters.open_with_adapters(folder)


def test_adapters_name_their_base_as_it_was_given(low_rank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    low_rank()
    assert adapters.base_of('owner/name') == 'owner/name'
    assert adapters.base_of('base') == 'base'
    assert adapters.base_of('low') == str(tmp_path / 'base')  # as it was given
    said = {'model_type': 'llama', '_name_or_path': 'owner/name'}  # perhaps of weights before
    (tmp_path / 'base' / 'config.json').write_text(json.dumps(said))
    assert adapters.base_of('base') == 'base'


def test_a_base_that_the_hub_does_not_give_is_named(low_rank, monkeypatch):
    def refuse(name):
        raise ConnectionError('the hub does not answer')

    folder, *_ = low_rank(base_model_name_or_path='owner/name')
    local = huggingface.local
    monkeypatch.setattr(
        adapters, 'local', lambda path: refuse(path) if path == 'owner/name' else local(path)
    )
    message = "belong to 'owner/name', which is not there; put its path .* does not answer"
    with pytest.raises(ConnectionError, match=message):
        adapters.open_with_adapters(folder)
