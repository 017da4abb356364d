"""Bytes of the collectives in a compiled program, and bytes sent on the network interfaces.

They verify `jaxmp.bits` against the operands that the compiler passes to the network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KINDS = ('all-reduce', 'all-gather', 'all-to-all', 'reduce-scatter', 'collective-permute')


class Collective(NamedTuple):
    """A collective of a compiled program.

    Attributes:
      kind: one of `KINDS`.
      nbytes: bytes of the operand of one device.
      pairs: source and target devices of a collective-permute.
    """

    kind: str
    nbytes: int
    pairs: tuple[tuple[int, int], ...]


def collectives(text: str) -> Iterator[Collective]:
    """The collectives of a program in their order; a collective in a loop is listed once.

    Args:
      text: the HLO text, ``compiled.as_text()``.

    >>> list(collectives('%a = u8[9]{0} collective-permute(%x), source_target_pairs={{0,1}}'))
    [Collective(kind='collective-permute', nbytes=9, pairs=((0, 1),))]
    """
    for shapes, kind, started, rest in re.findall(
        rf'= (.*?) ({"|".join(KINDS)})(-start)?\((.*)', text
    ):
        sizes = [_bytes_of(*shape) for shape in re.findall(r'([a-z]+\d+)\[([\d,]*)\]', shapes)]
        n, is_pair = _group(rest), started and kind in ('all-gather', 'collective-permute')
        size = sizes[0] if is_pair else sum(sizes)  # these starts list the operand, then the result
        if kind == 'all-gather' and not is_pair:
            size //= n
        if kind == 'reduce-scatter':
            size *= n
        listed = re.search(r'source_target_pairs={(.*?}})', rest)
        ends = re.findall(r'(\d+),(\d+)', listed[1]) if listed else ()
        yield Collective(kind, size, tuple((int(a), int(b)) for a, b in ends))


def operands(text: str) -> dict[str, int]:
    """Operand bytes of the collectives of one device in a compiled program, by kind.

    Args:
      text: the HLO text, ``compiled.as_text()``.

    >>> operands('%a = f32[8]{0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}')
    {'all-gather': 16}
    """
    sizes: dict[str, int] = {}
    for c in collectives(text):
        sizes[c.kind] = sizes.get(c.kind, 0) + c.nbytes
    return sizes


def permuted(text: str) -> dict[tuple[int, int], int]:
    """Operand bytes of the collective-permutes in a compiled program, by source and target device.

    Args:
      text: the HLO text, ``compiled.as_text()``.
    """
    sizes: dict[tuple[int, int], int] = {}
    for c in collectives(text):
        for pair in c.pairs:
            sizes[pair] = sizes.get(pair, 0) + c.nbytes
    return sizes


def _bytes_of(dtype: str, shape: str) -> int:
    return math.prod(int(n) for n in shape.split(',') if n) * int(re.sub(r'\D', '', dtype)) // 8


def _group(rest: str) -> int:
    """Number of devices in a group, as XLA writes it.

    >>> texts = '{{0,1}}', '[2,2]<=[4]', "mesh['r'=2,'s'=3] {'s'}"
    >>> [_group(f'replica_groups={text}') for text in texts]
    [2, 2, 3]
    """
    if listed := re.search(r'replica_groups={{([\d,]*)}', rest):
        return listed[1].count(',') + 1
    if counted := re.search(r'replica_groups=\[\d+,(\d+)\]<=', rest):
        return int(counted[1])
    if named := re.search(r'replica_groups=mesh\[(.*?)\] {(.*?)}', rest):  # JAX 0.12
        sizes = dict(part.split('=') for part in named[1].split(','))
        return math.prod(int(sizes[axis]) for axis in named[2].split(','))
    return 1


def interface_bytes() -> int:
    """Bytes sent so far on the network interfaces of this machine; 0 if that is not known."""
    try:
        lines = Path('/proc/net/dev').read_text().splitlines()[2:]
    except OSError:
        return 0
    return sum(int(line.split(':', 1)[1].split()[8]) for line in lines)
