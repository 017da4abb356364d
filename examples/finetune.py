"""Fine-tunes a pretrained decoder in three stages, in an optax loop of its own.

    python examples/finetune.py HuggingFaceTB/SmolLM2-135M-Instruct

The model may also be a folder or a GGUF file. Each of the two boundaries between the stages
compresses the activations, and on the way back their gradients. At the end stand the loss on unseen
text, without and with compression, and the bytes of the messages.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmp
from jaxmp.data import order, text
from jaxmp.training.evaluation.language_model import open_language_model

SEED = 0


def is_table(path: tuple[Any, ...], parameter: jax.Array) -> bool:
    """Whether a parameter is the token table: two stages have it, so it stays as it is."""
    return 'embed_tokens' in jax.tree_util.keystr(path)


def finetune(args: argparse.Namespace) -> None:
    """Reads the model and the text, trains, and tests."""
    model = open_language_model(args.model, stages=3, tokenizer=args.tokenizer)
    pipe = jaxmp.pipeline(model.stages, jaxmp.parse(args.fwd), jaxmp.parse(args.bwd))
    alice = text.alice()  # a book of the package
    blocks = lambda rows: jnp.asarray(text.blocks(model.tokenizer.encode(rows), args.length))
    train, test = blocks(alice.train), blocks(alice.test)

    def loss(variables: Any, feedback: Any, tokens: jax.Array, key: jax.Array) -> Any:
        # The last stage gives the nats of each next token, so that no logits are kept.
        scores, _, feedback = pipe.apply(variables, feedback, tokens, jaxmp.Ctx(key))
        return scores[:, :-1, 0].mean(), (feedback, None)

    optimizer = optax.multi_transform(
        {True: optax.set_to_zero(), False: optax.adamw(args.rate)},
        lambda params: jax.tree.map_with_path(is_table, params),
    )

    @jax.jit
    def step(variables: Any, slots: Any, feedback: Any, tokens: jax.Array, key: jax.Array) -> Any:
        gradients = jaxmp.value_and_grad(loss)  # in place of jax.value_and_grad
        (nats, _), grads, feedback = gradients(variables, feedback, tokens, key)
        updates, slots = optimizer.update(grads, slots, variables)
        return optax.apply_updates(variables, updates), slots, feedback, nats

    variables, slots, key = model.variables, optimizer.init(model.variables), jax.random.key(SEED)
    crossing = pipe.likes(variables, train[: args.batch])  # shape of what crosses each boundary
    fresh = feedback = jaxmp.init_feedback(pipe.boundaries, crossing)
    for i in range(args.steps):
        ids = order(SEED, i, len(train))[: args.batch]
        at = jax.random.fold_in(key, i)
        variables, slots, feedback, nats = step(variables, slots, feedback, train[ids], at)
        print(f'step {i + 1}: {nats:.4f} nats a token', flush=True)

    tested = jax.jit(loss)
    batches = test[: len(test) // args.batch * args.batch].reshape(-1, args.batch, args.length)
    for name, state in ('without', None), ('with', fresh):  # a test remembers nothing
        mean = sum(tested(variables, state, tokens, key)[0] for tokens in batches) / len(batches)
        print(f'unseen text, {name} compression: {mean:.4f} nats a token')
    for boundary, h in zip(pipe.boundaries, crossing, strict=True):
        forward, back = (bits // 8 for bits in boundary.bits(h))
        print(f'boundary: {forward:,} bytes forward and {back:,} back, {4 * h.size:,} in float32')


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description='Fine-tune a decoder in three stages.')
    parser.add_argument('model', help='a folder, a GGUF file, or owner/name of the hub')
    parser.add_argument('--tokenizer', default='', help='if the model has none, such as bytes')
    parser.add_argument('--fwd', default='outliers(asinh(8), channels=4, causal=True)')
    parser.add_argument('--bwd', default='nvfp4')
    parser.add_argument('--steps', type=int, default=50)
    parser.add_argument('--batch', type=int, default=4, help='sequences of a step')
    parser.add_argument('--length', type=int, default=256, help='tokens of a sequence')
    parser.add_argument('--rate', type=float, default=5e-5)
    finetune(parser.parse_args())


if __name__ == '__main__':
    main()
