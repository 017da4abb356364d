"""`jaxmp generate PATH_OR_RUN`: text from a language model.

    jaxmp generate HuggingFaceTB/SmolLM2-135M-Instruct --chat --prompt 'What is a codec?'
    jaxmp generate runs/text_gpt2 --prompt 'Alice was' 'The Queen' --tokens 200
    jaxmp launch --processes 4 -- jaxmp generate MODEL --codec 'mx(4)' --prompt 'Once' 'Now'

A checkpoint is a folder, a GGUF file or a name of the hub. A run continues a prompt with
its boundaries' compression off and on, by the same random numbers, so that the texts are equal as
long as the models agree. With a cache, a message has the new tokens only. GPT-2 has no cache: it
computes the whole text again for each token, and of a run a window that the run's test text fills
before the prompt.

Over several processes each has some stages and their cache, and packed messages of --codec (of a
run: its own) go between them. All prompts are under way; those that wait at a process go through it
as one batch.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from jaxmp.boundary import Boundary, boundary
from jaxmp.codecs import raw
from jaxmp.data import chat
from jaxmp.data.content import whole
from jaxmp.feedback import direct
from jaxmp.grammar import channel_of, check_channels
from jaxmp.launch.launchers import placed
from jaxmp.launch.signals import end_without_memory
from jaxmp.net.address import is_loopback
from jaxmp.net.connect import Address, connect, endpoint, owners
from jaxmp.net.group import LONG, ProcessGroup
from jaxmp.net.speed import parse as parse_link
from jaxmp.terminal import end
from jaxmp.training.evaluation.language_model import (
    LanguageModel,
    config_of_run,
    is_run,
    open_language_model,
)
from jaxmp.training.generation.sampling import Event, choose, continuations, reader_of
from jaxmp.training.tasks.named import stage_count
from jaxmp.training.tasks.task import cuts_of
from jaxmp.training.workdir.locks import WorkdirError

# Flags that differ between the processes of one text.
LOCAL = {'model', 'coordinator', 'process', 'processes', 'token_file', 'silent'}


class Text(NamedTuple):
    """A text that is being written.

    Attributes:
      head: what stands before it.
      model: its model.
      prompts: the tokens of its prompts.
      events: the tokens that follow, as `sampling.continuations` yields them.
    """

    head: str
    model: LanguageModel
    prompts: list[list[int]]
    events: Iterable[Event]


class Draw(NamedTuple):
    """How tokens are drawn; see `jaxmp.training.generation.sampling.choose`."""

    temperature: float
    top_p: float

    def __call__(
        self, logits: Float[Array, 'B V'], key: Array, first: int | Int[Array, ''] = 0
    ) -> Int[Array, ' B']:
        """The tokens of rows, the first of which has the number ``first``."""
        return choose(logits, key, self.temperature, self.top_p, first)


def prompts_of(model: LanguageModel, texts: Sequence[str], as_chat: bool) -> list[list[int]]:
    """The tokens of prompts, after the tokenizer's first ones or as messages of a chat.

    Raises:
      ValueError: if a prompt has no token, or there is no chat template.
    """
    words, texts = model.tokenizer, [whole(text, '--prompt') for text in texts]
    if as_chat and words.template is None:
        raise ValueError(f'the tokenizer of {model.name} has no chat template; leave --chat out')
    if as_chat and words.template:
        asked = [[{'role': 'user', 'content': text}] for text in texts]
        texts = [chat.render(words.template, messages, prompt=True) for messages in asked]
    begin = () if as_chat else words.begin
    prompts = [[*begin, *map(int, ids)] for ids in words.encode(texts)]
    if not all(map(len, prompts)):
        raise ValueError('an empty prompt; give --prompt a text of at least one token')
    return prompts


def stops_of(model: LanguageModel, texts: Sequence[str]) -> frozenset[int]:
    """The model's own stop tokens and those of ``--stop``.

    Raises:
      ValueError: if a text is not one token.
    """
    ids = model.tokenizer.encode([whole(t, '--stop') for t in texts]) if texts else []
    for text, tokens in zip(texts, ids, strict=True):
        if len(tokens) != 1:
            raise ValueError(f'--stop {text!r} is {len(tokens)} tokens; give a text of one token')
    return model.stops | {int(tokens[0]) for tokens in ids}


def check(model: LanguageModel, prompts: Sequence[Sequence[int]], count: int) -> None:
    """Raises ValueError unless the model can write ``count`` tokens after the prompts."""
    length = max(map(len, prompts)) + count
    if model.longest and length > model.longest:
        raise ValueError(
            f'a prompt of {length - count} tokens and --tokens={count} are more than the '
            f'{model.longest} positions of {model.name}; give fewer tokens or a shorter prompt'
        )


def written(
    events: Iterable[Event],
    prompts: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    hidden: Sequence[int],
    write: Callable[[str], object],
) -> None:
    """Writes texts one after another, each as soon as its tokens are there.

    Args:
      events: from `sampling.continuations`.
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


def timed(events: Iterable[Event], say: Callable[[str], object]) -> Iterator[Event]:
    """The events; at their end says how many tokens came in which time, from the first one on."""
    count, start = 0, 0.0
    for event in events:
        start = start or time.monotonic()
        count += event[1] is not None
        yield event
    seconds = time.monotonic() - start
    if count > 1:
        say(f'{count} tokens, {(count - 1) / seconds:.3g} a second after the first')


def modes(model: LanguageModel, codec: str) -> dict[str, tuple[Boundary, ...] | None]:
    """The boundaries of each text, by its headline; one without where there is no choice."""
    if model.boundaries is None or codec or model.fwd == 'raw':
        return {'': boundaries_of(model, codec) if codec else None}
    off, on = '--- without compression ---', f'--- with compression, fwd {model.fwd} ---'
    try:
        return {off: None, on: boundaries_of(model)}
    except ValueError as error:
        print(f'{error}; the text is without compression alone', file=sys.stderr)
        return {off: None}


def boundaries_of(model: LanguageModel, codec: str = '') -> tuple[Boundary, ...]:
    """The boundaries of a codec; without one, those of the run, or open ones of a checkpoint.

    What a run's feedback remembers is of its training, so a boundary is plain ``C(x)``.

    Raises:
      ValueError: if there are not as many codecs as boundaries, or a channel of the run has
        components, which its folder model lacks.
    """
    if codec or model.boundaries is None:
        count, names = len(model.stages) - 1, {'vocabulary': model.tokenizer.size}
        channels = [channel_of(text, names) for text in (codec or 'raw').split(';')]
        if len(channels) not in (1, count):
            raise ValueError(
                f'--codec has {len(channels)} channels and the model {count} boundaries; give one '
                'for all, or one per boundary with ; between them'
            )
        each = channels if len(channels) == count else channels * count
        return tuple(boundary(channel, direct(raw)) for channel in each)
    if any(b.fwd.state_of == 'channel' for b in model.boundaries):
        raise ValueError(
            f'fwd {model.fwd} needs its components, which the folder model of a run lacks'
        )
    return tuple(Boundary(direct(b.fwd.codec), b.bwd) for b in model.boundaries)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog='jaxmp generate',
        description=(__doc__ or '').partition('\n\n')[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        'model', metavar='PATH_OR_RUN',
        help='folder, GGUF file or owner/name of the hub; or workdir of a run',
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
    parser.add_argument('--seed', type=int, default=0, help='of 64 bits')
    parser.add_argument(
        '--codec',
        default='',
        help='between stages, such as own.py:mine(2); default raw, or of a run',
    )
    parser.add_argument('--stages', type=int, default=0, help='of a checkpoint; default processes')
    parser.add_argument('--cuts', default='', help="blocks before each boundary, such as '8 16 23'")
    apart = parser.add_argument_group('several processes', 'jaxmp launch and Slurm say these')
    apart.add_argument('--coordinator', help='host:port of process 0')
    apart.add_argument('--processes', type=int)
    apart.add_argument('--process', type=int, help='number of this process, from 0')
    apart.add_argument(
        '--token_file', '--token-file', help='with the secret of all; default $JAXMP_TOKEN'
    )
    apart.add_argument('--silent', type=float, default=60.0, help='seconds until one has failed')
    apart.add_argument('--start-timeout', type=float, default=50.0, help='seconds for all to come')
    apart.add_argument('--link', default='', help='emulated between processes, such as 20mbit,40ms')
    args = parser.parse_args(argv)
    if args.tokens < 1 or not args.temperature >= 0 or not 0 < args.top_p <= 1:  # nor nan
        parser.error(
            f'--tokens={args.tokens} --temperature={args.temperature} --top-p={args.top_p}: give '
            'at least 1 token, a temperature of 0 or more, and a probability in (0, 1]'
        )
    if not -(2**63) <= args.seed < 2**63:
        parser.error(f'--seed={args.seed}: give a whole number of 64 bits, with its sign')
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    args = parsed(argv)
    place = args.coordinator, args.processes, args.process
    group = ProcessGroup()
    try:
        check_channels(args.codec.split(';') if args.codec else [])
        cuts_of(args.cuts)
        address = placed(Address(*place, args.token_file, args.silent, 0.0, args.start_timeout))
        group, texts = (
            by_processes(args, address) if address.processes != 1 else (group, here(args))
        )
        for head, model, prompts, events in texts:
            print(head, end='')
            begin = len(model.tokenizer.begin)
            hidden = [len(p) if args.chat else begin for p in prompts]
            out = functools.partial(print, end='', flush=True)
            told = functools.partial(print, file=sys.stderr)
            written(timed(events, told), prompts, model.tokenizer.decode, hidden, out)
        group.close()
    except (OSError, ValueError, ImportError, WorkdirError) as error:
        group.fail(f'jaxmp generate: {error}')
        end('jaxmp generate', str(error))
    except BaseException as error:
        group.fail(f'{type(error).__name__}: {error}')
        raise


def here(args: argparse.Namespace) -> Iterator[Text]:
    """The texts of one process."""
    cuts = cuts_of(args.cuts)
    look = functools.partial(asked, args=args)  # before the weights are read
    model = open_language_model(args.model, args.stages, cuts, args.tokenizer, before=look)
    prompts, stops = asked(model, args)
    for name, boundaries in modes(model, args.codec).items():
        reader = reader_of(model, boundaries)
        draw = Draw(args.temperature, args.top_p)
        events = continuations(reader, prompts, args.tokens, draw, stops, args.seed)
        yield Text(f'{name}\n' * bool(name), model, prompts, events)


def by_processes(args: argparse.Namespace, address: Address) -> tuple[ProcessGroup, Iterable[Text]]:
    """The group, and in its first process the text; the others work for it until it is written."""
    from jaxmp.training.generation import serving

    path, cuts = Path(args.model).expanduser(), cuts_of(args.cuts)
    of_run = is_run(path)
    count = stage_count(config_of_run(path)) if of_run else len(cuts) + 1 if cuts else args.stages
    count = count or int(address.processes or 1)
    about = {k: v for k, v in vars(args).items() if k not in LOCAL}
    group = connect(address, range(count), about)
    end_without_memory(group.names[group.index])
    try:
        owner = owners(count, group.count)
        places = [s for s in range(count) if owner[s] == group.index]
        with group.phase('reading', LONG):
            model = open_language_model(
                args.model,
                0 if of_run else count,
                cuts,
                args.tokenizer,
                lambda n: places,
                functools.partial(asked, args=args),
            )
        if not model.cached:
            raise ValueError(f'{model.name} has no cache of keys and values; give one process')
        prompts, stops = asked(model, args)
        boundaries = boundaries_of(model, args.codec)
        serving.check_by_token(boundaries, model.stages[0].config.width)  # pyright: ignore
        draw = Draw(args.temperature, args.top_p)
        size = len(prompts), max(map(len, prompts)) + args.tokens
        stages = range(places[0], places[-1] + 1)
        part = serving.Part(model, boundaries, stages, draw, size, args.seed)
        ends = serving.Ends(group, part, parse_link(args.link) if args.link else None)
        if group.index:
            serving.serve(part, ends)
            return group, []
        # An emulated link stands for machines of their own.
        together = not args.link and is_loopback(endpoint(address)[0])
        events = serving.written(part, ends, prompts, args.tokens, stops, together)
        return group, [Text('', model, prompts, events)]
    except BaseException as error:
        group.fail(f'jaxmp generate: {error}')
        raise


def asked(model: LanguageModel, args: argparse.Namespace) -> tuple[list[list[int]], frozenset[int]]:
    """The tokens of the prompts, and those that end a text."""
    prompts = prompts_of(model, args.prompt, args.chat)
    stops = stops_of(model, args.stop)
    check(model, prompts, args.tokens)
    return prompts, stops


if __name__ == '__main__':
    main()
