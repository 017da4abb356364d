"""`jaxmp generate PATH_OR_RUN`: text from a language model.

    jaxmp generate HuggingFaceTB/SmolLM2-135M-Instruct --chat --prompt 'What is a codec?'
    jaxmp generate runs/text_gpt2 --prompt 'Alice was' 'The Queen' --tokens 200

A checkpoint is a folder, a GGUF file or a name of the hub. A finished run continues a prompt with
its boundaries' compression off and on, by the same random numbers, so that the texts are equal as
long as the models agree. With a cache, a message has the new tokens only. GPT-2 has no cache: it
computes the whole text again for each token, and of a run a window that the run's test text fills
before the prompt.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Sequence

from jaxmp.boundary import Boundary
from jaxmp.data import chat
from jaxmp.feedback import direct
from jaxmp.training.language_model import LanguageModel, open_language_model
from jaxmp.training.sampling import choose, continuations, reader_of


def prompts_of(model: LanguageModel, texts: Sequence[str], as_chat: bool) -> list[list[int]]:
    """The tokens of prompts, after the tokenizer's first ones or as messages of a chat.

    Raises:
      ValueError: if a prompt has no token, or there is no chat template.
    """
    words = model.tokenizer
    if as_chat and words.template is None:
        raise ValueError(f'the tokenizer of {model.name} has no chat template; leave --chat out')
    if as_chat and words.template:
        asked = [[{'role': 'user', 'content': text}] for text in texts]
        texts = [chat.render(words.template, messages, prompt=True) for messages in asked]
    begin = () if as_chat else words.begin
    prompts = [[*begin, *map(int, ids)] for ids in words.encode(list(texts))]
    if not all(map(len, prompts)):
        raise ValueError('an empty prompt; give --prompt a text of at least one token')
    return prompts


def stops_of(model: LanguageModel, texts: Sequence[str]) -> frozenset[int]:
    """The model's own stop tokens and those of ``--stop``.

    Raises:
      ValueError: if a text is not one token.
    """
    ids = model.tokenizer.encode(list(texts)) if texts else []
    for text, tokens in zip(texts, ids, strict=True):
        if len(tokens) != 1:
            raise ValueError(f'--stop {text!r} is {len(tokens)} tokens; give a text of one token')
    return model.stops | {int(tokens[0]) for tokens in ids}


def check(model: LanguageModel, prompts: Sequence[Sequence[int]], count: int) -> None:
    """Raises ValueError unless the model can write ``count`` tokens after the prompts."""
    length = max(map(len, prompts)) + count
    if model.positions and length > model.positions:
        raise ValueError(
            f'a prompt of {length - count} tokens and --tokens={count} are more than the '
            f'{model.positions} positions of {model.name}; give fewer tokens or a shorter prompt'
        )


def written(
    events: Iterable[tuple[int, int | None]],
    prompts: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    hidden: Sequence[int],
    write: Callable[[str], object],
) -> None:
    """Writes texts one after another, each as soon as its tokens are there.

    Args:
      events: from `jaxmp.training.sampling.continuations`.
      prompts: their tokens.
      decode: from tokens to a text.
      hidden: the number of first tokens of each prompt that are not written.
      write: takes a part of the text.
    """
    rows, ended, now = [list(p) for p in prompts], [False] * len(prompts), 0
    shown = [len(decode(row[:n])) for row, n in zip(rows, hidden, strict=True)]
    for i, token in events:
        ended[i] |= token is None
        rows[i] += [] if token is None else [token]
        while now < len(rows):
            text = decode(rows[now])
            text = text if ended[now] else text.rstrip('\ufffd')  # half a character
            write(text[shown[now] :])
            shown[now] = max(shown[now], len(text))
            if not ended[now]:
                break
            write('\n')
            now += 1


def modes(model: LanguageModel) -> dict[str, tuple[Boundary, ...] | None]:
    """The boundaries of each text, by its headline; of a checkpoint one, without a headline.

    What a run's feedback remembers is of its training, so a boundary is plain ``C(x)``.
    """
    if model.boundaries is None:
        return {'': None}
    off, on = (f'--- compression {mode} (fwd {model.fwd}) ---' for mode in ('off', 'on'))
    if any(b.fwd.state_of == 'channel' for b in model.boundaries):
        print(
            f'fwd {model.fwd} needs its components, which the folder model of a run lacks; the '
            'text is without compression alone',
            file=sys.stderr,
        )
        return {off: None}
    cuts = tuple(Boundary(direct(b.fwd.codec), b.bwd, b.via) for b in model.boundaries)
    return {off: None, on: cuts}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog='jaxmp generate',
        description=(__doc__ or '').partition('\n\n')[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        'model', metavar='PATH_OR_RUN',
        help='folder, GGUF file or owner/name of the hub; or workdir of a finished run',
    )  # fmt: skip
    parser.add_argument('--prompt', nargs='+', default=['Alice '], help='texts to continue')
    parser.add_argument('--tokens', type=int, default=200, help='at most, after each prompt')
    parser.add_argument('--temperature', type=float, default=0.7, help='0: the likeliest token')
    parser.add_argument(
        '--top-p', type=float, default=1.0,
        help='draw among the likeliest tokens of this probability',
    )  # fmt: skip
    parser.add_argument('--chat', action='store_true', help="prompts by the model's chat template")
    parser.add_argument(
        '--stop', nargs='+', default=[], metavar='TEXT', help='tokens that end a text too'
    )
    parser.add_argument('--tokenizer', default='', help="in place of the checkpoint's own")
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args(argv)
    if args.tokens < 1 or args.temperature < 0 or not 0 < args.top_p <= 1:
        parser.error(
            f'--tokens={args.tokens} --temperature={args.temperature} --top-p={args.top_p}: give '
            'at least 1 token, a temperature of 0 or more, and a probability in (0, 1]'
        )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    args = parsed(argv)
    try:
        model = open_language_model(args.model, tokenizer=args.tokenizer)
        prompts = prompts_of(model, args.prompt, args.chat)
        stops = stops_of(model, args.stop)
        check(model, prompts, args.tokens)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f'jaxmp generate: {error}')
    chosen = functools.partial(choose, temperature=args.temperature, top_p=args.top_p)
    begin = len(model.tokenizer.begin)
    hidden = [len(p) if args.chat else begin for p in prompts]
    for name, cuts in modes(model).items():
        if name:
            print(name)
        events = continuations(
            reader_of(model, cuts), prompts, args.tokens, chosen, stops, args.seed
        )
        written(
            events, prompts, model.tokenizer.decode, hidden,
            functools.partial(print, end='', flush=True),
        )  # fmt: skip


if __name__ == '__main__':
    main()
