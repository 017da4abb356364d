"""The paper's second experiment: GPT-2 small, four stages, fine-tuned on WikiText-2 (Table 5).

python train.py --config=configs/wikitext_gpt2.py --config.data_dir=TEXT \
    --config.tokenizer=GPT2 --config.init_from=GPT2
TEXT holds WikiText-2 (jaxmp/data/wikitext.py says how), GPT2 the published weights and tokeniser
(`jaxmp.hub.fetch` gets them). It takes a GPU, and was not run: no pretrained weights were at hand.
The paper, compression on: perplexity 21.01 without compression, 74.51 with Top10 % whose gradients
reuse the activation's indices, 2,990 with indices of their own.
"""

import ml_collections

from configs import text_gpt2


def get_config() -> ml_collections.ConfigDict:
    """As the published fine-tuning: AdamW 5e-5, falling linearly, no warm-up, clipped at 1."""
    c = text_gpt2.get_config()
    c.name = 'wikitext_gpt2'
    c.data = 'wikitext-2-raw'
    c.sequence_length = 1024
    c.width, c.blocks, c.heads = 768, 12, 12
    c.dropout = 0.1
    c.fwd, c.bwd = 'top_k(0.1)', 'same_support()'
    c.epochs = 4
    c.batch_size = 8
    c.lr = 5e-5
    c.checkpoint_every = 1
    return c
