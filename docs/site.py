"""What mkdocs adds to the pages of this folder.

The README is the first page. Made from the code: a page for each package of the API, to which a
link to the package's folder leads, one for the commands and the configuration, whose file is
`jaxmp/config/`, one for each notebook. A link to a file of the repository that is none of
these and no page leads to the repository, or becomes the file's name where no address of it is
configured. In the finished text codes, numbers and tables get what decides where lines break.
"""

import html
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from jaxmp.__main__ import COMMANDS
from jaxmp.config import KEYS, Key
from jaxmp.config.files import files, first_line

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r'\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)')
COLOURS = re.compile(r'\x1b\[[\d;]*m')  # of a terminal
FROM_ROOT = {
    'README.md': 'index.md',
    'CONTRIBUTING.md': 'contributing.md',
    'results/bench/table.md': 'bench_table.md',
}
FROM_CODE = {'jaxmp/config/__init__.py': 'config.md'}
GROUPS = {
    '': 'The run',
    'data': 'Data',
    'model': 'Model',
    'optimizer': 'Optimizer',
    'parallel': 'Runtime, replicas and micro-batches',
}


def on_config(config: Any) -> Any:
    """Names the pages that are made, in the navigation."""
    at = {name: part for entry in config.nav for name, part in entry.items()}
    at['Tutorials'] += [{title(p): f'notebooks/{p.stem}.md'} for p in notebooks()]
    at['Reference'] += [{'API': [{f'jaxmp.{r}': f'api/{r}.md'} for r in packages()]}]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages that are made."""
    made = {page: (ROOT / file).read_text() for file, page in FROM_ROOT.items()}
    made[FROM_CODE['jaxmp/config/__init__.py']] = configuration()
    made |= {f'notebooks/{p.stem}.md': notebook(p) for p in notebooks()}
    made |= {f'api/{name}.md': package(name, of) for name, of in packages().items()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


# The API.


def packages() -> dict[str, list[str]]:
    """The modules of each package, a file or a folder of files."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / 'jaxmp').rglob('*.py')):
        parts = path.relative_to(ROOT).with_suffix('').parts
        if parts[1] in ('__init__', 'version') or parts[-1] == '__main__':
            continue
        found.setdefault(parts[1], []).append('.'.join(p for p in parts if p != '__init__'))
    return found


def package(name: str, modules: list[str]) -> str:
    """The page of a package."""
    return '\n'.join([f'# jaxmp.{name}\n', *map(section, modules)])


def section(module: str) -> str:
    """A module's part of a page, whose title is the package; what a module only passes on is shown
    where it is made.
    """
    init = ROOT / module.replace('.', '/') / '__init__.py'
    passes = init.exists() and '__all__' in init.read_text()
    head = f'## `{module}`\n\n' * (module.count('.') > 1)
    return f'{head}::: {module}\n' + '    options: {members: false}\n' * passes


# Commands and configuration.


def configuration() -> str:
    """The page of all commands, configurations and keys."""
    parts = [
        '# Commands and configuration\n',
        'Made from `jaxmp.config.KEYS`; `jaxmp train --help` prints the same. A key is set on the '
        'command line as `--config.KEY=VALUE`, and in a file of your own by `c.KEY = VALUE`:\n',
        '```python title="mine.py"\nfrom jaxmp.config import load\n\n\ndef get_config():\n'
        "    c = load('digits_resnet')  # what differs from there follows\n"
        "    c.name = 'mine'\n    c.optimizer.lr = 0.05\n    return c\n```\n",
        '`jaxmp train --config=mine.py` trains it. A misspelt key and a value that is not allowed '
        'are refused in one line that names the nearest key or the allowed values. *Own* means '
        'that an import path, `package.module:name` or `file.py:name`, may stand there too: its '
        'function is called as the table says.\n',
        '## Commands\n',
        table('command', 'what it does', [(f'`jaxmp {n}`', l) for n, (_, l) in COMMANDS.items()]),
        '`jaxmp COMMAND --help` says more; `python train.py` is `jaxmp train`.\n',
        '## Configurations\n',
        table('`--config=`', 'what it trains', [(f'`{p.stem}`', first_line(p)) for p in files()]),
    ]
    for group, name in GROUPS.items():
        rows = [(f'`{k}`', key) for k, key in KEYS.items() if k.rpartition('.')[0] == group]
        parts += [f'## {name}\n', keys(rows)]
    return '\n'.join(parts)


def keys(rows: list[tuple[str, Key]]) -> str:
    """A table of keys."""
    cells = [f'| {name} | `{key.default!r}` | {meaning(key)} |' for name, key in rows]
    return '\n'.join(['| key | default | meaning |', '|---|---|---|', *cells, ''])


def meaning(key: Key) -> str:
    """What a key means, what it may be, who reads it."""
    said = [key.line[0].upper() + key.line[1:]]
    if key.words:
        said.append('one of ' + ', '.join(f'`{w}`' if w else 'empty' for w in key.words))
    if key.own:
        said.append(f'own: `{key.own}`')
    if key.model:
        said.append(f'read by `model.name={"` or `".join(key.model.split())}` only')
    if key.free:
        said.append('may change when a run continues')
    return '; '.join(said).replace('|', '&#124;') + '.'


def table(left: str, right: str, rows: list[tuple[str, str]]) -> str:
    """Two columns."""
    lines = [f'| {a} | {b} |' for a, b in rows]
    return '\n'.join([f'| {left} | {right} |', '|---|---|', *lines, ''])


# Notebooks.


def notebooks() -> list[Path]:
    """The notebooks, the first to read first."""
    found = sorted((ROOT / 'notebooks').glob('*.ipynb'))
    return sorted(found, key=lambda p: p.stem != 'quickstart')


def cells(path: Path) -> list[Any]:
    """The cells of a notebook."""
    return json.loads(path.read_text())['cells']


def title(path: Path) -> str:
    """The heading of a notebook."""
    return next(
        line.removeprefix('# ').strip()
        for c in cells(path)
        for line in c['source']
        if line.startswith('# ')
    )


def notebook(path: Path) -> str:
    """A notebook as a page: its text, its code and what the code has printed and drawn."""
    return '\n\n'.join(part for c in cells(path) for part in shown(c))


def shown(cell: Any) -> Iterator[str]:
    """A cell, as Markdown."""
    source = ''.join(cell['source'])
    if cell['cell_type'] == 'markdown':
        yield source
        return
    yield f'```python\n{source}\n```'
    outputs = itertools.groupby(cell['outputs'], lambda output: output['output_type'] == 'stream')
    for printed, group in outputs:
        if printed:
            text = ''.join(line for output in group for line in output['text'])
            yield f'```text\n{COLOURS.sub("", text).rstrip()}\n```'
        else:
            for output in group:
                yield displayed(output['data'])


def displayed(data: Any) -> str:
    """A table in Markdown, or a picture."""
    if 'text/markdown' in data:
        return ''.join(data['text/markdown'])
    png = ''.join(data['image/png']).replace('\n', '')
    return f'<p><img alt="what the cell above draws" src="data:image/png;base64,{png}"></p>'


# Links, which in the repository lead from file to file.


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Makes a link to a file one to its page, or to the repository, or the file's name."""
    here = page.file.src_uri
    made = {page: file for file, page in FROM_ROOT.items()}
    source = here if here.startswith('notebooks/') else made.get(here, f'docs/{here}')

    def link(found: re.Match) -> str:
        file = os.path.normpath(os.path.join(os.path.dirname(source), found[2]))
        if files.get_file_from_path(page_of(file)):
            to = os.path.relpath(page_of(file), os.path.dirname(here) or '.')
            return f'[{found[1]}]({to}{found[3] or ""})'
        if config.repo_url:
            return f'[{found[1]}]({config.repo_url.rstrip("/")}/blob/HEAD/{file})'
        if file.startswith(found[1].strip('`')):
            return f'`{file}`'
        before = markdown[: found.start()].rpartition('\n\n')[2]
        inside = before.count('(') > before.count(')')
        return f'{found[1]}: `{file}`' if inside else f'{found[1]} (`{file}`)'

    return LINK.sub(link, markdown)


def page_of(file: str) -> str:
    """The page of a file of the repository."""
    made = re.sub(r'^(notebooks/\w+)\.ipynb$', r'\1.md', file)
    made = re.sub(r'^jaxmp/(\w+)$', r'api/\1.md', made)
    return (FROM_ROOT | FROM_CODE).get(made, made.removeprefix('docs/'))


# Where lines break. The classes are those of site.css.

PIECE = re.compile(r'(<pre.*?</pre>|<code>[^<]*</code>|<[^>]*>)', re.DOTALL)
TABLE = re.compile(r'<table>.*?</table>', re.DOTALL)
ROW = re.compile(r'<tr[^>]*>.*?</tr>', re.DOTALL)
CODE = re.compile(r'<code>.*?</code>', re.DOTALL)
NAMED = re.compile(r'(<tr>\s*<td>)([^<]{1,16})(?=</td>)')
CELL = re.compile(r'<t[hd][^>]*>(.*?)</t[hd]>', re.DOTALL)
PRINTED = re.compile(r'(<div class="language-text)( highlight">.*?</div>)', re.DOTALL)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Keeps a number with its percent sign and a word of code in one piece, and tells columns of
    text from others, and messages from what is aligned.
    """
    content = PRINTED.sub(lambda m: m[1] + ' message' * (not aligned(m[2])) + m[2], content)
    parts = PIECE.split(content)
    parts[::2] = [re.sub(r'(?<=\d) %', '\N{NO-BREAK SPACE}%', text) for text in parts[::2]]
    parts[1::2] = [whole(p) if p.startswith('<code>') else p for p in parts[1::2]]
    return TABLE.sub(lambda m: with_texts(m[0]), ''.join(parts))


def on_post_template(output_content: str, *, template_name: str, **kwargs: Any) -> str:
    """Says more where there is no page."""
    if template_name != '404.html':
        return output_content
    said = '<p>There is no such page. The search above and the tabs lead to those that exist.</p>'
    return output_content.replace('</h1>', f'</h1>\n{said}', 1)


def whole(code: str) -> str:
    """Inline code whose words with hyphens do not break there, if they are short enough."""
    return re.sub(
        r'(?<![^\s>])[^\s<>]*-[^\s<>]*',
        lambda m: f'<span class="word">{m[0]}</span>' if len(html.unescape(m[0])) < 37 else m[0],
        code,
    )


def with_texts(table: str) -> str:
    """A table whose columns with long cells have the class ``text``, whose codes break after an
    opening parenthesis, and whose rows have short names that do not break.
    """
    table = CODE.sub(lambda m: re.sub(r'(?<=\w)[([](?=\w)|\);', r'\g<0><wbr>', m[0]), table)
    table = NAMED.sub(r'\1<span class="word">\2</span>', table)
    head, *rows = ROW.findall(table)
    sizes = [[len(plain(cell)) for cell in CELL.findall(row)] for row in rows]
    longest = map(max, zip(*sizes, strict=False))
    marked = re.sub(r'<th\b', lambda m: '<th class="text"' if next(longest, 0) > 28 else m[0], head)
    return table.replace(head, marked, 1)


def plain(cell: str) -> str:
    """What a reader sees of it."""
    return ' '.join(html.unescape(re.sub(r'<[^>]*>', '', cell)).split())


def aligned(block: str) -> bool:
    """Whether its lines have columns, which would be torn apart if long lines were wrapped."""
    return re.search(r'\S {3,}\S|[^\x00-\u2000]', html.unescape(block)) is not None
