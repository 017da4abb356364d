"""The paper's second experiment: GPT-2 small, four stages, fine-tuned on WikiText-2 (Table 5).

python train.py --config=configs/wikitext_gpt2.py --config.data.dir=TEXT \
    --config.data.tokenizer=GPT2 --config.model.path=GPT2
TEXT holds WikiText-2 (jaxmp/data/wikitext.py says how), GPT2 the published weights and tokeniser
(`jaxmp.models.huggingface.fetch` gets them). It takes a GPU, and was not run: no pretrained weights
were at hand.
The paper, compression on: perplexity 21.01 without compression, 74.51 with Top10 % whose gradients
reuse the activation's indices, 2,990 with indices of their own.
"""

from jaxmp.config import Config, load


def get_config() -> Config:
    """As the published fine-tuning: AdamW 5e-5, falling linearly, no warm-up, clipped at 1."""
    c = load('text_gpt2')
    c.name = 'wikitext_gpt2'
    c.data.name = 'wikitext-2-raw'
    c.data.sequence_length = 1024
    c.model.width, c.model.blocks, c.model.heads = 768, 12, 12
    c.model.dropout = 0.1
    c.fwd, c.bwd = 'top_k(0.1)', 'same_support()'
    c.epochs = 4
    c.batch_size = 8
    c.optimizer.lr = 5e-5
    c.checkpoint_every = 1
    return c
