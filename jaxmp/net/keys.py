"""`keys_of`: the key pairs of a run, which all its processes derive from one secret text.

The text itself is never sent. Whoever listens on the network, and records it, can try texts one by
one, so each trial is made dear and the text should be random, as `jaxmp launch` makes it.
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import zmq
from zmq.utils import z85

COST = 2**15  # of scrypt: a tenth of a second and 32 MB
SALT = b'jaxmp.net 1'


class Pair(NamedTuple):
    """A CURVE key pair, each key as 40 letters."""

    public: bytes
    private: bytes


class Keys(NamedTuple):
    """The key pairs of a run.

    Attributes:
      server: of whoever listens: the switch and each process.
      client: of whoever connects to them.
    """

    server: Pair
    client: Pair


@functools.cache
def keys_of(token: str) -> Keys:
    """The key pairs that follow from the secret of a run.

    >>> keys_of('a').client == keys_of('b').client, len(keys_of('a').server.public)
    (False, 40)
    """
    text = token.encode(errors='surrogateescape')  # as the environment has it
    root = hashlib.scrypt(text, salt=SALT, n=COST, r=8, p=1, maxmem=2**26, dklen=32)
    digest = lambda role: hashlib.blake2b(role.encode(), key=root, digest_size=32).digest()
    private = [z85.encode(digest(role)) for role in Keys._fields]
    return Keys(*(Pair(zmq.curve_public(key), key) for key in private))
