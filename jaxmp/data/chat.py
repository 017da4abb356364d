"""Chat messages as a text, by the template of a tokenizer, and where in it the answers are.

A template is a program of jinja2, in ``tokenizer_config.json``, ``chat_template.jinja`` or a GGUF
file, which transformers runs in a sandbox. It cannot ask for today's date, so that equal messages
are equal tokens on every day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmp.data.understood import keys, understood

Messages = Sequence[Mapping[str, Any]]  # each with 'role' and 'content'
ANSWERS = 'assistant'  # the role whose messages a model learns to write
CALLS = ('tool_calls', 'function_call')  # in place of, or beside, the content of an answer
_IDLE = keys(  # of a message: what the readers use, and what is about it, not of it
    """role content name id tool_call_id annotations conversation_id country created_at date
    hashed_ip header index lang language message_id metadata model model_name parent_id redacted
    source state timestamp toxic turn turn_identifier uid uuid"""
)
_NEUTRAL = {'weight': (0, 1, None), 'end_turn': (True, None), 'recipient': ('all', None)}


class Template(NamedTuple):
    """How chat messages become a text.

    Attributes:
      source: the program.
      tokens: special tokens that it may name, such as ``{'bos_token': '<s>'}``.
    """

    source: str
    tokens: tuple[tuple[str, str], ...] = ()


def render(template: Template, messages: Messages, prompt: bool = False) -> str:
    """The text of a conversation; as a ``prompt``, up to where an answer is to begin.

    Raises:
      ValueError: if the template refuses the messages.

    >>> t = Template('{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}'
    ...              '{% endfor %}', (('eos_token', '|'),))
    >>> render(t, [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}])
    'user: Hi|assistant: Ho|'
    """
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    def strftime_now(_: str) -> str:
        raise TemplateError("it asks for today's date, and equal messages are to be equal tokens")

    words = {**dict(template.tokens), 'strftime_now': strftime_now}
    try:
        [text], _ = render_jinja_template(
            [[dict(m) for m in messages]],
            chat_template=template.source,
            add_generation_prompt=prompt,
            **words,
        )
    except Exception as error:  # a template is a program, which may fail at any value
        raise ValueError(f'the chat template refuses the messages: {error}') from error
    return text


def answers(template: Template, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where in it the answers begin and end, in characters.

    An answer is what follows the text at whose end the template asks for one, up to the token that
    ends it; the white space from there to the next message is not. A message of ``weight`` 0, as
    in OpenAI's files, is read and not learnt.

    Raises:
      ValueError: if there is no answer, the template leaves a part of a message out, or it renders
        what was before an answer otherwise once the conversation goes on.

    >>> t = Template('{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}'
    ...              '{% if add_generation_prompt %}<assistant>{% endif %}')
    >>> answers(t, [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}])
    ('<user>Hi;<assistant>Ho;', [(20, 23)])
    """
    _check_keys(template, messages)
    text, spans = render(template, messages), []
    for i, message in enumerate(messages):
        if message['role'] == ANSWERS and message.get('weight') != 0:
            before = render(template, messages[:i], prompt=True)
            through = render(template, messages[: i + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise ValueError(
                    f'the chat template renders message {i + 1} of {len(messages)} otherwise once '
                    'the conversation goes on, so that its answer has no place; give each answer '
                    'as the end of a conversation of its own'
                )
            spans.append((len(before), len(through.rstrip())))
    if not spans:
        roles = ', '.join(sorted({str(m['role']) for m in messages}))
        raise ValueError(
            f'a conversation without a message of the {ANSWERS} of weight 1 (it has {roles}); '
            'remove it'
        )
    return text, spans


def _check_keys(template: Template, messages: Messages) -> None:
    """Raises ValueError for a key of a message that nobody reads: the template has to name it."""
    named = {a or b for a, b in re.findall(r"""\.(\w+)|['"](\w+)['"]""", template.source)}
    for i, message in enumerate(messages, 1):
        understood(
            f'message {i} of {len(messages)}',
            {k: v for k, v in message.items() if v not in ('', [], {})},
            _IDLE | named - _NEUTRAL.keys(),
            _NEUTRAL,
            'remove the key or the conversation, or give the tokenizer of a model whose chat '
            'template writes it',
        )
