"""Codecs of 0.5 to 4.5 bits per element against none: CIFAR-10 made small, MNIST, two texts.

jaxmp sweep configs/few_bits.py --scale=cpu --out=results/few_bits --set data.dir=DIR
jaxmp sweep configs/few_bits.py --scale=mnist --out=results/few_bits --set data.dir=DIR
jaxmp sweep configs/few_bits.py --scale=converged --out=results/few_bits --set data.dir=DIR
jaxmp sweep configs/few_bits.py --scale=text --out=results/few_bits
jaxmp sweep configs/few_bits.py --scale=tune --out=results/few_bits --set data.dir=TEXT \
    --set model.path=BASE-{seed}/model --set data.tokenizer=BASE-0/model
python train.py --config=configs/few_bits.py:trellis2 --config.data.dir=DIR

A run takes about a minute of one core, of MNIST two, of text four, until it has converged ten to
twenty; of a fine-tuning two, after the quarter of an hour that makes each of BASE-0, BASE-1, ..:
`wikitext_gpt2_small:pretrain` with config.seed=0, 1, ..
"""

from __future__ import annotations

from jaxmp.config import Config, load
from jaxmp.sweep.study import study_of

NARROW = 'study.bottleneck:build'  # a GPT-2 with learned projections and embeddings
EXACT = 'top_k(0.1, values=fp16)'
COARSE = 'top_k(0.4, values=log_scale(4), indices=bitmap)'
TRIPLES = ', triples=65536'  # forward


def anchors(forward: str, backward: str, more: str = '') -> tuple[str, str]:
    """Anchors of pairs of tokens, and of targets; bits of all boundaries, or of each of three."""
    quantiser = 'anchored(rotate(trellis({}{})), vocabulary, {}pairs=65536{})'
    fwd = [quantiser.format(b, '', '', more) for b in forward]
    bwd = [quantiser.format(b, ', unbiased=True', 'window=64, ', ', target=True') for b in backward]
    return ';'.join(fwd), ';'.join(bwd)


def patches(
    *bits: float, first: int = 100, side: int = 4, words: str = '', backward: str = ''
) -> tuple[str, str]:
    """Components of patches of 4 (or ``side``), 4 and 2 pixels a side, each boundary's bits."""
    of = 'klt({}, refresh={}, patch={}, by_sample=True{})'
    rows = [*zip(bits, (first, 200, 200), (side, 4, 2), strict=True)]
    fwd, bwd = (';'.join(of.format(*row, word) for row in rows) for word in (words, backward))
    return fwd, bwd


RELU = ', signed=False'
WEIGHED = RELU + ', by_gradient=0.3'
SENT = WEIGHED + ', entropy=True'
ENTROPY, _ = patches(2.665, 2.565, 2.565, words=SENT)
BACKWARD, _ = patches(2.65, 2.55, 2.55)


CHANNELS = {  # forward and backward
    'none': ('raw', 'raw'),
    # 2.4 to 2.6 bits: few exact values, or many coarse ones
    'top10-fp16': (EXACT,) * 2,
    'top10-fp16-local': ('top_k(0.1, values=fp16, indices=block_local)',) * 2,
    'top20-log8': ('top_k(0.2, values=log_scale(8), indices=bitmap)',) * 2,
    'top40-log4': (COARSE,) * 2,
    'top40-uniform4': ('top_k(0.4, values=uniform(4), indices=bitmap)',) * 2,
    'top53-log3': ('top_k(0.53, values=log_scale(3), indices=bitmap)',) * 2,
    'block2': ('block(2)',) * 2,
    'random16-fp16': ('random_k(0.1625, values=fp16)',) * 2,
    # the same in one direction
    'top10-fp16-forward': (EXACT, 'raw'),
    'top40-log4-forward': (COARSE, 'raw'),
    'top10-fp16-backward': ('raw', EXACT),
    'top40-log4-backward': ('raw', COARSE),
    # 2 bits
    'lloyd2': ('rotate(lloyd(2))',) * 2,
    'trellis2': ('rotate(trellis(2))',) * 2,
    # 1 bit
    'lloyd1': ('rotate(lloyd(1))',) * 2,
    'trellis1': ('rotate(trellis(1))',) * 2,
    # 4 bits
    'lloyd4': ('rotate(lloyd(4))',) * 2,
    'top10': ('top_k(0.1)',) * 2,
    'block4': ('block(4)',) * 2,
    # few bits first, four at the end: 2.7 and 2.0 on average of a run
    'weaned2-4': ('block(4)',) * 2,
    'weaned1-2-4': ('rotate(lloyd(4))',) * 2,
    # 2.7 bits again: levels for what a ReLU sends; one bit for half of the run, four for the rest
    'weaned2-4-relu': ('lloyd(4, signed=False)', 'rotate(lloyd(4))'),
    'weaned1-4-relu': ('lloyd(4, signed=False)', 'rotate(lloyd(4))'),
    # 2.6 bits: five at the end, when the rate is small and errors count most
    'weaned2-5-relu': ('lloyd(5, signed=False)', 'rotate(lloyd(5))'),
    # principal components, and what they cost
    'klt-half': ('klt(0.5)',) * 2,
    'klt1': ('klt(1)',) * 2,
    'klt2': ('klt(2)',) * 2,
    # the same of patches of pixels, for images: 2.0 and 2.7 bits; 1.0 and 2.0 where a boundary of
    # half as many elements has half a bit more
    'patches1-uneven': patches(0.63, 1.1, 1.6, first=200),
    'patches2': patches(1.95, 1.85, 1.85),
    'patches2.7': patches(2.65, 2.55, 2.55),
    'patches2-uneven': patches(1.65, 2.1, 2.6, first=200),
    # the first boundary's patches with four times the pixels, and zero for what a ReLU cannot send
    'patches2.7-relu': patches(2.55, 2.55, 2.55, first=500, side=8, words=RELU),
    # errors counted by the gradient that returns: 2.0 and 2.7 bits, and 1.0
    'weighed2': patches(1.95, 1.85, 1.85, words=WEIGHED),
    'weighed2.7': patches(2.65, 2.55, 2.55, words=WEIGHED),
    'weighed1': patches(0.63, 1.1, 1.6, first=200, words=WEIGHED),
    # 2.7 bits, two for two thirds of the run and four at the end
    'weighed-weaned2.7': patches(4.05, 3.95, 3.95, words=WEIGHED),
    # components written by their entropy: 2.7 bits; backward too
    'entropy2.7': (ENTROPY, BACKWARD),
    'entropy2.7-both': (ENTROPY, patches(2.665, 2.565, 2.565, backward=', entropy=True')[1]),
    # the same bits forward, 2.2 for two thirds of the run and 3.7 at the end
    'entropy-weaned2.7': (patches(3.665, 3.565, 3.565, words=SENT)[0], BACKWARD),
    # 2.0 bits, fewer first
    'patches-weaned2': patches(2.8, 2.8, 2.8, words=RELU),
    # of 96 channels 24 or 60 that are learned: 1.1 and 2.8 bits per element of the 96
    'learned24-block4': ('block(4)',) * 2,
    'learned60-block4': ('block(4)',) * 2,
    # 8 bits, one range for the tensor
    'uniform8': ('uniform(8)',) * 2,
    # what tokens tell, sent apart: 2.0, 2.7 and 3.0 bits, and 1.0 of 48 learned channels
    'anchors2': anchors('2', '2'),
    'anchors2.7': anchors('332', '233'),
    'anchors3': anchors('3', '3'),
    'learned48-anchors2': anchors('2', '2'),
    'triples2': anchors('2', '2', TRIPLES),
    'triples2.7': anchors('332', '233', TRIPLES),
    # the same where each later stage embeds the tokens: 1.0 bit, the second of 128 channels and
    # for fine-tuning; 2.7 bits; no compression
    'embedded32-anchors3': anchors('3', '3'),
    'embedded32-triples3': anchors('3', '3', TRIPLES),
    'embedded42-anchors3': anchors('3', '3'),
    'embedded86-anchors3': anchors('3', '3'),
    'embedded': ('raw', 'raw'),
}
BOTTLENECKS = {
    'learned24-block4': 24,
    'learned60-block4': 60,
    'learned48-anchors2': 48,
    'embedded32-anchors3': 32,
    'embedded32-triples3': 32,
    'embedded42-anchors3': 42,
    'embedded86-anchors3': 86,
}


def first(bits: tuple[str, str]) -> str:
    """Channels of the first 20 epochs."""
    return ' | '.join(bits).replace(';', '&') + '@:20'


PHASES = {
    'weaned2-4': 'rotate(trellis(2))@:22',
    'weaned1-2-4': 'rotate(trellis(1))@:10; rotate(trellis(2))@10:25',
    'weaned2-4-relu': 'lloyd(2, signed=False) | rotate(lloyd(2))@:20',
    'weaned1-4-relu': 'rotate(lloyd(1))@:14',
    'patches-weaned2': first(patches(1.45, 1.45, 1.45, words=RELU)),
    'weighed-weaned2.7': first(patches(1.95, 1.85, 1.85, words=WEIGHED)),
    'entropy-weaned2.7': first((patches(2.165, 2.065, 2.065, words=SENT)[0], BACKWARD)),
    'weaned2-5-relu': 'lloyd(2, signed=False) | rotate(lloyd(2))@:24',
}  # of 30 epochs
EMBEDDED = {name for name in CHANNELS if name.startswith('embedded')}
IMAGES = {
    name for name in CHANNELS if name.startswith(('patches', 'weighed', 'entropy'))
}  # of 16 x 16 pixels
THREE = {'triples2', 'triples2.7'}
TEXT = {
    *BOTTLENECKS,
    *EMBEDDED,
    *THREE,
    'anchors2',
    'anchors2.7',
    'anchors3',
    'uniform8',
}  # no images
TUNED = {'embedded42-anchors3', 'embedded'}
WITHOUT = {  # what a scale has not; the others neither TEXT, IMAGES nor PHASES
    'converged': TEXT,
    'text': {'embedded42-anchors3', *IMAGES, *PHASES},
    'tune': {*BOTTLENECKS, *EMBEDDED, *IMAGES, *PHASES, *THREE, 'uniform8'} - TUNED,
}
SEEDS = {'smoke': 1, 'cpu': 5, 'mnist': 5, 'converged': 5, 'text': 3, 'tune': 3}


def smoke() -> Config:
    """The digits, for two epochs: that everything runs."""
    c = load('digits_resnet')
    c.update(model={'width': 2}, data={'train_examples': 320}, epochs=2, batch_size=32)
    return c


def cpu() -> Config:
    """The setting of Tables 1-4 in `paper_tables` at the same scale: 600 steps."""
    return study_of('paper_tables').cpu(1)


def mnist() -> Config:
    """The setting of Tables 1-4 in `paper_tables` at the same scale: 6,000 steps."""
    return study_of('paper_tables').mnist(1)


def converged() -> Config:
    """The setting of Tables 1-4 in `paper_tables` at the same scale: 15,000 steps."""
    return study_of('paper_tables').converged(1)


def text() -> Config:
    """A GPT-2 trained from nothing on a book, byte by byte."""
    return load('text_gpt2')


def tune() -> Config:
    """A GPT-2 that knows WikiText-2 learns a part of it again, with a vocabulary of 4,096."""
    return load('wikitext_gpt2_small:tune')


SCALES = {
    'smoke': smoke,
    'cpu': cpu,
    'mnist': mnist,
    'converged': converged,
    'text': text,
    'tune': tune,
}


def get_config(name: str = 'none', scale: str = 'cpu') -> Config:
    """A row of the study.

    Args:
      name: of `CHANNELS`.
      scale: of `SCALES`.
    """
    c = SCALES[scale]()
    fwd, bwd = CHANNELS[name]
    c.update(name=name, fwd=fwd, bwd=bwd, phases=PHASES.get(name, ''))
    if (channels := BOTTLENECKS.get(name, 0)) or name in EMBEDDED:
        with c.unlocked():
            c.model.update(name=NARROW, bottleneck=channels, embed_every_stage=name in EMBEDDED)
    return c


def get_study(scale: str, tables: tuple[int, ...] = (1,)) -> list[tuple[int, Config]]:
    """The runs, as seeds and configurations: all channels with the first seed, then the second."""
    del tables
    study = []
    for seed in range(SEEDS[scale]):
        for name in CHANNELS:
            if name in WITHOUT.get(scale, {*TEXT, *IMAGES, *PHASES}):
                continue
            c = get_config(name, scale)
            c.seed = seed
            study.append((seed, c))
    return study
