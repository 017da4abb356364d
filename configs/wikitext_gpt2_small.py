"""A stand-in for the paper's section 3.2 on CPU: a small GPT-2, pretrained here, then fine-tuned.

The paper fine-tunes the published GPT-2 small. Where its weights cannot be had, or no GPU, this
shows the same mechanism at a hundredth of the size, not the same numbers. TEXT holds WikiText-2 v1.

python train.py --config=configs/wikitext_gpt2_small.py:pretrain --config.data.dir=TEXT \
    --workdir=BASE
python train.py --config=configs/wikitext_gpt2_small.py --config.data.dir=TEXT \
    --config.model.path=BASE/model --config.data.tokenizer=BASE/model
One CPU core: 17 minutes of pretraining beside other work, a perplexity of 52; then a minute and a
half a run. The rows of such runs are in results/cpu, named gpt2-.
"""

from jaxmp.config import Config, load


def get_config(phase: str = 'tune') -> Config:
    """``pretrain``: all of the text, uncompressed. ``tune``: a part of it, compressed."""
    if phase not in ('pretrain', 'tune'):
        raise ValueError(f'{phase!r} is neither pretrain nor tune; write the config as FILE:tune')
    c = load('wikitext_gpt2')
    c.name = f'wikitext_gpt2_small_{phase}'
    c.data.name = 'wikitext-2'
    c.data.tokenizer = 'bpe-4096'
    c.data.sequence_length = 128
    c.model.width, c.model.blocks, c.model.heads = 128, 4, 4
    c.model.dropout = 0.0
    if phase == 'pretrain':
        c.fwd = c.bwd = 'raw'
        c.epochs = 2
        c.batch_size = 16
        c.optimizer.lr = 2e-3
    else:
        c.data.train_examples = 4000
        c.epochs = 1
        c.optimizer.lr = 3e-4
    return c
