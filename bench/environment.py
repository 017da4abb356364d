"""Sizes of the packages in this environment, in MB, as JSON: V/bin/python bench/environment.py

For results/environment.json, V is a new environment in which `pip install .` was run.
"""

import json
import platform
from importlib import metadata


def size(package):
    """MB of the files that were installed, compiled Python included."""
    files = {f.locate() for f in package.files or ()}
    return sum(f.stat().st_size for f in files if f.is_file()) / 1e6


if __name__ == '__main__':
    sizes = {d.name: round(size(d), 1) for d in metadata.distributions()}
    largest = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    system = f'{platform.system()} {platform.machine()}, Python {platform.python_version()}'
    print(json.dumps({'system': system, 'packages': largest}, indent=1))
