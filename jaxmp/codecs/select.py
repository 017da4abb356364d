"""Exact selection of the K entries of largest magnitude in each row, and its bitmap.

The bit pattern of ``|x|``, read as an unsigned integer, orders as the magnitude does (a NaN comes
after infinity), so the K-th largest magnitude is found by bisection on bits: set a bit, count how
many keys reach the trial, keep the bit if at least K do. The keys are split into bytes from the
top. Once a byte of the threshold is known, only the keys that share it can decide the next byte;
the others are set to zero and no longer count. A counting pass therefore reads one byte per entry,
whatever the dtype, and 7 + 8 + 8 + 8 passes determine a float32 threshold.

The chosen entries are returned as a bitmap, one bit per entry. Among entries equal to the threshold
those with the lowest indices are chosen, as by `jax.lax.top_k`. The functions operate on bit
patterns as integers and are never differentiated: call them inside a `custom_vjp`. Those with loops
are jitted, because JAX would otherwise compile a loop again at every eager call.
"""

import functools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Shaped, UInt8, UInt32

Count = Callable[[Bool[Array, ' n']], Int32[Array, '']]

LANES = 32  # columns of a vertical sum: one vector register of bytes
FOLD = 8
SHORT = 128  # entries of a row that are compared all at once
FEW = 4  # elements of a row that are found by merging lists; XLA:CPU does not vectorise 8


def count(n: int, fraction: float) -> int:
    r"""The number K of entries, out of n, that a fraction keeps.

    .. math:: K = \max(1,\; n - \lfloor n (1 - \text{fraction}) \rfloor)

    It is evaluated in Python floats, as in the reference implementation.

    >>> count(65536, 0.1), count(288, 0.05), count(7, 1.0)
    (6554, 15, 7)
    """
    return max(1, n - int(n * (1 - fraction)))


@partial(jax.jit, static_argnames='k', inline=True)
def k_largest(x: Float[Array, 'B n'], k: int) -> UInt32[Array, 'B w']:
    r"""A bitmap of the k entries of largest magnitude in each row.

    .. math:: S = \{i : |x_i| > t\} \cup \{\text{lowest } i : |x_i| = t\}, \qquad |S| = k

    Args:
      x: rows of shape ``(B, n)``.
      k: entries to keep in each row, ``1 <= k <= n``.

    Returns:
      Bitmap of shape ``(B, ceil(n / 32))``: entry i is bit ``i % 32`` of word ``i // 32``.

    >>> hex(int(k_largest(jnp.array([[1.0, -3.0, 2.0, 2.0]]), 2)[0, 0]))
    '0x6'
    """
    if not 1 <= k <= x.shape[1]:
        raise ValueError(
            f'k_largest of rows of {x.shape[1]} entries needs 1 <= k <= n, got k = {k}'
        )
    return _each_row(
        partial(_k_largest, k=k, count=_vertical_count),
        partial(_k_largest, k=k, count=_count),
        _bits(x),  # before the loop: jax 0.12 makes the smallest bfloat16 zero in it, on a CPU
    )


@partial(jax.jit, static_argnames='k', inline=True)
def positions(words: UInt32[Array, 'B w'], k: int) -> Int32[Array, 'B k']:
    """The positions of the k set bits of each row of a bitmap, in ascending order.

    >>> positions(jnp.array([[0b10110]], jnp.uint32), 3).tolist()
    [[1, 2, 4]]
    """
    row = partial(_positions, k=k)
    return _each_row(row, row, words)


@partial(jax.jit, static_argnames='k', inline=True)
def few_largest(x: Float[Array, 'B n'], k: int) -> Int32[Array, 'B k']:
    """The positions of `k_largest`, for ``k <= FEW``, of all rows at once.

    >>> few_largest(jnp.array([[1.0, -3.0, 2.0, 2.0]]), 2).tolist()
    [[1, 2]]
    """
    return _few(_magnitude(_bits(x)), k)


def without_few(x: Float[Array, 'B n'], support: Int32[Array, 'B k']) -> Float[Array, 'B n']:
    """The rows with zeros at the positions of `few_largest`.

    A comparison of keys, which XLA fuses with what follows; setting elements would copy the rows.

    >>> without_few(jnp.array([[1.0, -3.0, 2.0, 2.0]]), jnp.array([[1, 2]])).tolist()
    [[1.0, 0.0, 0.0, 2.0]]
    """
    key, place = _magnitude(_bits(x)), jnp.arange(x.shape[1], dtype=support.dtype)
    few = gather(key, support)
    least = few.min(1, keepdims=True)
    last = jnp.where(few == least, support, -1).max(
        1, keepdims=True
    )  # of equals the first are taken
    return jnp.where(key >= least + (place > last).astype(key.dtype), 0, x)


def _few(key: Shaped[Array, 'B n'], k: int) -> Int32[Array, 'B k']:
    """The positions of the k largest keys of each row, ascending; of equals the first.

    They lie in the k runs of eight keys with the largest maxima, of equals again the first.
    """
    if key.shape[1] <= SHORT:
        return _few_of_short(key.T, k).T
    runs = jnp.pad(key, ((0, 0), (0, -key.shape[1] % FOLD))).reshape(len(key), -1, FOLD)
    run = _few(jnp.max(runs, 2), k)
    rows = jnp.take_along_axis(runs, run[:, :, None], 1, mode='clip').reshape(len(key), -1)
    support = _few_of_short(rows.T, k).T
    return FOLD * jnp.take_along_axis(run, support // FOLD, 1, mode='clip') + support % FOLD


def _few_of_short(key: Shaped[Array, 'n B'], k: int) -> Int32[Array, 'k B']:
    """The same of columns, which XLA:CPU processes side by side."""
    n, place = len(key), jnp.arange(len(key), dtype=jnp.uint32)[:, None]
    least = _least(~key, k)[-1:]  # the complement of the k-th largest key
    order = jnp.where(~key < least, place, jnp.where(~key == least, n + place, 2 * n))
    chosen = _least(order, k)  # those above the k-th, then the first of its equals
    return _least(jnp.where(chosen < n, chosen, chosen - n), k).astype(jnp.int32)


def _least(key: Shaped[Array, 'n B'], k: int) -> Shaped[Array, 'k B']:
    """The k least of each column, ascending.

    Eight parts of a column, each k lists of keys, are merged at a time: XLA:CPU merges by vectors,
    if the lists are results of one reduction over few parts.
    """
    size, most = 1 << (k - 1).bit_length(), jnp.array(jnp.iinfo(key.dtype).max, key.dtype)
    lists = [key] + [jnp.full(key.shape, most)] * (size - 1)
    while (n := len(lists[0])) > 1:
        parts = min(8, n)
        lists = [jnp.pad(a, ((0, -n % parts), (0, 0)), constant_values=most) for a in lists]
        lists = [a.reshape(parts, -1, key.shape[1]) for a in lists]
        lists = lax.reduce(tuple(lists), (most,) * size, _merged, (0,))
    return jnp.concatenate(lists, 0)[:k]


def _merged(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    """The least ``len(a)`` elements of two ascending lists of ``2**m``, ascending (bitonic)."""
    least = [jnp.minimum(p, q) for p, q in zip(a, b[::-1], strict=True)]
    apart = len(a) // 2
    while apart:
        for i in [i for i in range(len(a)) if not i & apart]:
            p, q = least[i], least[i + apart]
            least[i], least[i + apart] = jnp.minimum(p, q), jnp.maximum(p, q)
        apart //= 2
    return tuple(least)


def bitmap(support: Int32[Array, 'B k'], n: int) -> UInt32[Array, 'B w']:
    """A bitmap with the bits set that ``support`` lists: the inverse of `positions`.

    >>> bin(int(bitmap(jnp.array([[1, 2, 4]]), 5)[0, 0]))
    '0b10110'
    """

    def row(s):
        bit = jnp.uint32(1) << (s % 32).astype(jnp.uint32)
        return jnp.zeros(-(-n // 32), jnp.uint32).at[s // 32].add(bit)

    return jax.vmap(row)(support)


def gather(x: Shaped[Array, 'B n'], support: Int32[Array, 'B k']) -> Shaped[Array, 'B k']:
    """The entries of each row that ``support`` lists."""
    return jax.vmap(lambda row, s: row.at[s].get(mode='clip'))(x, support)


def scatter(
    values: Shaped[Array, 'B k'], support: Int32[Array, 'B k'], n: int
) -> Shaped[Array, 'B n']:
    """Rows of n zeros with the values written at distinct positions: the inverse of `gather`."""

    def row(v, s):
        return jnp.zeros(n, v.dtype).at[s].set(v, unique_indices=True)

    return jax.vmap(row)(values, support)


def _each_row(cpu, default, x):
    """Processes one row at a time on a CPU, where a row fits the cache; all at once elsewhere."""
    return lax.platform_dependent(x, cpu=partial(lax.map, cpu), default=jax.vmap(default))


def _k_largest(bits: Shaped[Array, ' n'], k: int, count: Count) -> UInt32[Array, ' w']:
    key = _magnitude(jnp.pad(bits, (0, -bits.size % (FOLD * LANES))))
    t = _threshold(key, k, count)
    reach = _pack(key >= t)

    def settle_ties():
        above = _pack(key > t)
        return above | _lowest(reach ^ above, k - _ones(above).sum(dtype=jnp.int32))

    words = lax.cond(_ones(reach).sum() == k, lambda: reach, settle_ties)
    return words[: -(-bits.size // 32)]


def _bits(x):
    return lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')


def _magnitude(bits):
    return bits & bits.dtype.type(jnp.iinfo(bits.dtype).max >> 1)


def _threshold(key, k: int, count: Count):
    """The k-th largest key, found byte by byte from the top."""

    def next_byte(shift, carry, first=0):
        t, left = carry
        byte = (key ^ t) >> shift
        byte = jnp.where(byte <= 255, byte, 0).astype(jnp.uint8)
        digit, above = _digit(byte, left, first, count)
        return t | digit.astype(key.dtype) << shift, left - above

    zero, top = _zero(key), 8 * key.dtype.itemsize - 8
    carry = zero, zero.astype(jnp.int32) + k
    if key.dtype.itemsize > 4:  # a loop compiles in half the time of eight copies, but runs longer
        shift = lambda i: (top - 8 * i).astype(key.dtype)
        return lax.fori_loop(0, top // 8 + 1, lambda i, c: next_byte(shift(i), c), carry)[0]
    for shift in range(top, -1, -8):
        carry = next_byte(shift, carry, int(shift == top))
    return carry[0]


def _zero(x):
    # Computed from the data: in shard_map a constant may not enter a loop whose result varies.
    return x[0] ^ x[0]


def _digit(byte: UInt8[Array, ' n'], k, first: int, count: Count):
    """The largest digit that at least k bytes reach, and how many bytes exceed it."""

    def test_bit(i, carry):
        digit, above = carry
        trial = digit | jnp.uint8(128) >> i.astype(jnp.uint8)
        reach = count(byte >= trial)
        keep = reach >= k
        return jnp.where(keep, trial, digit), jnp.where(keep, above, reach)

    zero = _zero(byte)
    return lax.fori_loop(first, 8, test_bit, (zero, zero.astype(jnp.int32)))


def _count(hits):
    return hits.sum(dtype=jnp.int32)


def _vertical_count(hits):
    """Counts in bytes, along columns: at most FOLD * 16 = 128 per byte before bytes are widened.

    XLA:CPU vectorises sums over the leading axis only. It fuses the comparison into explicit
    additions, but not into a reduction.
    """
    rows = hits.astype(jnp.uint8).reshape(FOLD, -1)
    folded = functools.reduce(jnp.add, rows).reshape(-1, LANES)
    zero = folded.dtype.type(0)
    columns = lax.reduce_window(folded, zero, lax.add, (16, 1), (16, 1), 'SAME')
    return columns.sum(0, dtype=jnp.int32).sum(dtype=jnp.int32)


def _pack(mask):
    octets = jnp.packbits(mask.reshape(-1, 4, 8), axis=-1, bitorder='little')
    return lax.bitcast_convert_type(octets[..., 0], jnp.uint32)


def _ones(words):
    return lax.population_count(words).astype(jnp.int32)


def _ones_before(words):
    """The number of set bits in all earlier words, by a matrix product in blocks of 32.

    The products are small integers, which are exact in any precision.
    """
    blocks = jnp.pad(_ones(words), (0, -words.size % 32)).reshape(-1, 32)
    inside = blocks.astype(jnp.float32) @ jnp.triu(jnp.ones((32, 32), jnp.float32), 1)
    total = blocks.sum(1, dtype=jnp.int32)
    before = inside.astype(jnp.int32) + (jnp.cumsum(total, dtype=jnp.int32) - total)[:, None]
    return before.reshape(-1)[: words.size]


def _select(word, rank):
    """Position of the set bit that has `rank` set bits below it, by halving the word."""
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        low = _ones(word & jnp.uint32(2**half - 1))
        up = rank >= low
        rank = jnp.where(up, rank - low, rank)
        word = jnp.where(up, word >> half, word)
        position = jnp.where(up, position + half, position)
    return position


def _lowest(words, m):
    """The m lowest set bits of a row."""
    room = m - _ones_before(words)
    below = (jnp.uint32(1) << _select(words, jnp.maximum(room, 0)).astype(jnp.uint32)) - 1
    return jnp.where(room < _ones(words), words & below, words)


def _positions(words, k: int):
    """The positions of k set bits: find the word and the rank in it for each slot, then the bit.

    Each word writes its number as a mark into the slot of its first bit. The following slots copy
    the mark, less one per slot, so that its low five bits give the rank within the word.
    """
    number = jnp.arange(1, words.size + 1, dtype=jnp.int32)
    mark = jnp.zeros(k, jnp.int32).at[_ones_before(words)].max(32 * number + 31, mode='drop')
    for step in (1, 2, 4, 8, 16):
        mark = jnp.maximum(mark, jnp.pad(mark, (step, 0))[:k] - step)
    word = (mark >> 5) - 1
    return 32 * word + _select(words.at[word].get(mode='clip'), 31 - (mark & 31))
