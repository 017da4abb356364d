"""Fine-tuning of a pretrained decoder, cut into four stages: give it a checkpoint and a text.

python train.py --config=finetune --config.model.path=HuggingFaceTB/SmolLM2-135M \
    --config.model.train='lora(8)'
The checkpoint is a folder in Hugging Face's layout, a GGUF file, or a name of the hub. The text
here is Alice's Adventures in Wonderland. WORKDIR/model is then a folder that transformers (or PEFT)
loads. An epoch of low-rank updates of SmolLM2-135M takes about three minutes on two CPU cores.
"""

from jaxmp.config import Config, load


def get_config() -> Config:
    """What differs from configs/common.py."""
    c = load('common')
    c.name = 'finetune'
    c.data.name = 'alice'
    c.data.sequence_length = 256
    c.model.name = 'pretrained'
    c.model.param_dtype = ''  # of a GGUF file under lora its own blocks, else float32
    c.model.remat = True  # on a CPU it takes no more time: residuals cost as much as they save
    # Of those tried it adds least to the perplexity of both SmolLM2-135M and Gemma 3 270M, at any
    # number of cuts (docs/depth.md); a token is coded by itself, as generation needs.
    c.fwd = 'outliers(asinh(8), channels=4, causal=True)'
    c.bwd = 'nvfp4'
    c.optimizer.name = 'adamw'
    c.optimizer.schedule = 'linear'
    c.optimizer.lr = 2e-4
    c.optimizer.clip_norm = 1.0
    c.epochs = 1
    c.batch_size = 4
    return c
