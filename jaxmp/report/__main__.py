"""python -m jaxmp.report FOLDER --out DIR: table.md and accuracy_bits.png of the runs in FOLDER.

python -m jaxmp.report polar ROWS.jsonl ... --out NAME: NAME.md and NAME.png of what the benches of
the polar codes and of the gradient codecs wrote.
"""

import argparse
import re
import sys
from pathlib import Path

from jaxmp.report import compare, polar

MARKS = re.compile(r'(<!-- results -->\n).*?(<!-- /results -->)', re.DOTALL)


def main(argv: list[str] | None = None) -> None:
    """Reads finished runs, writes their table and picture."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ['polar']:
        return _polar(words[1:])
    parser = argparse.ArgumentParser(
        prog='python -m jaxmp.report',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('folder', type=Path, help='a folder of summaries or of workdirs')
    parser.add_argument('--out', type=Path, required=True, help='where the report goes')
    parser.add_argument('--into', type=Path, help='a page whose <!-- results --> part is renewed')
    args = parser.parse_args(words)
    try:
        summaries = compare.load(args.folder)
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f'jaxmp.report: {error}')
    text = compare.table(summaries) + '\n'
    (args.out / 'table.md').write_text(text)
    compare.draw(summaries, args.out / 'accuracy_bits.png')
    if args.into:
        page = args.into.read_text()
        args.into.write_text(MARKS.sub(lambda m: m[1] + text + m[2], page))
    print(text)


def _polar(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog='python -m jaxmp.report polar')
    parser.add_argument('rows', type=Path, nargs='+', help='what the benches wrote, *.jsonl')
    parser.add_argument('--out', type=Path, required=True, help='the report without its ending')
    args = parser.parse_args(words)
    try:
        print(polar.write(args.rows, args.out))
    except (OSError, ValueError) as error:
        sys.exit(f'jaxmp.report: {error}')


if __name__ == '__main__':
    main()
