"""`Config`: sizes and switches of a decoder; its blocks may be of several kinds.

References:
  LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jax.typing import DTypeLike

PROJECTIONS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')


class Lora(NamedTuple):
    r"""Low-rank updates of kernels, ``W + (alpha / rank) B A``, of which only A and B are trained.

    Attributes:
      rank: rows of A.
      alpha: scale.
      targets: names of projections.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = PROJECTIONS


class Kind(NamedTuple):
    """What attention has of its own in some blocks.

    Attributes:
      frequencies: of the rotary positions, D / 2 of them.
      scale: what cosine and sine are multiplied with.
      window: number of positions that a query sees; 0: all.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    window: int = 0


Stored = tuple[tuple[str, tuple[str, ...]], ...]  # kinds of blocks by the name of a module


@dataclass(frozen=True)
class Config:
    """Sizes and switches of a decoder.

    Attributes:
      vocabulary: rows of the token table, V.
      width: of the residual stream, C.
      inner: width inside the MLP.
      heads: of the queries, H.
      kv_heads: of keys and values, G.
      head_width: width of a head, D.
      kinds: the kinds of blocks.
      layers: the number of each block's kind; as many as there are blocks.
      epsilon: added to the mean square in normalisation.
      activation: of the MLP's gate, ``'silu'`` or ``'gelu_pytorch_tanh'``.
      tied: whether the output layer is the token table.
      bias: whether q, k and v have one (Qwen 2).
      head_norms: whether each head of q and k is normalised (Qwen 3, Gemma 3).
      norm_offset: added to the scale of each norm (1 for Gemma).
      post_norms: whether what a block adds is normalised too (Gemma).
      embedding_scale: of the embedded tokens.
      query_scale: of the logits of attention; 0 means ``1 / sqrt(D)``.
      attention_cap: bound of the logits of attention; 0: none.
      logits_cap: bound of the output; 0: none.
      dtype: dtype of the matrix products; None means that of the residual stream.
      stream: dtype of the residual stream, which stages send; None means the token table's.
      remat: recompute each block in the backward pass instead of storing its activations.
      lora: low-rank updates, or None.
      stored: kernels and tables that stay in a file's blocks, by the name of their module, with
        the kinds of these; see `jaxmp.models.blocks`.
    """

    vocabulary: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    kinds: tuple[Kind, ...]
    layers: tuple[int, ...]
    epsilon: float = 1e-6
    activation: str = 'silu'
    tied: bool = True
    bias: bool = False
    head_norms: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float = 0.0
    attention_cap: float = 0.0
    logits_cap: float = 0.0
    dtype: DTypeLike | None = None
    stream: DTypeLike | None = None
    remat: bool = False
    lora: Lora | None = None
    stored: Stored = ()

    @property
    def blocks(self) -> int:
        """Their number."""
        return len(self.layers)
