"""What mkdocs adds to the pages of this folder: the README as the first, and a page a room.

A link to a file of the repository that is no page, such as a result, becomes the file's name.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r'(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)')


def rooms() -> dict[str, list[str]]:
    """The modules of each room of the package, a file or a folder of files."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / 'jaxmp').rglob('*.py')):
        parts = path.relative_to(ROOT).with_suffix('').parts
        if parts[1] in ('__init__', 'version') or parts[-1] == '__main__':
            continue
        found.setdefault(parts[1], []).append('.'.join(p for p in parts if p != '__init__'))
    return found


def section(module: str) -> str:
    """A module's part of a page; what it only passes on is shown where it is made."""
    init = ROOT / module.replace('.', '/') / '__init__.py'
    passes = init.exists() and '__all__' in init.read_text()
    return f'## `{module}`\n\n::: {module}\n' + '    options: {members: false}\n' * passes


def on_config(config: Any) -> Any:
    """Names the rooms' pages in the navigation."""
    config.nav.insert(4, {'API': [{f'jaxmp.{r}': f'api/{r}.md'} for r in rooms()]})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the README and the rooms."""
    readme = (ROOT / 'README.md').read_text().replace('](docs/', '](')
    files.append(File.generated(config, 'index.md', content=readme))
    for room, modules in rooms().items():
        text = '\n'.join([f'# jaxmp.{room}\n', *map(section, modules)])
        files.append(File.generated(config, f'api/{room}.md', content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Keeps the links that lead to pages, and takes the others as names."""
    folder = Path(page.file.src_uri).parent

    def link(found: re.Match) -> str:
        target = found[2].partition('#')[0]
        known = files.get_file_from_path((folder / target).as_posix())
        return found[0] if known else f'{found[1]} (`{target.removeprefix("../")}`)'

    return LINK.sub(link, markdown)
