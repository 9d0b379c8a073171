"""Launching the kernels on tensors: plain functions, no autograd."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from vispe.attention.backends.triton.grid.forward import forward
from vispe.attention.backends.triton.grid.shared import FEW, NARROW
from vispe.attention.backends.triton.tiles import Tiles, rows_of, tiles

LOG2E = 1.4426950408889634
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton read it when its kernels were made


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, packed: Tensor | None, address: Tensor | None, edge: Tensor | None,
    keep: Tensor | None, prefix: int, scale: float, sight: Tensor | None = None, copy: Tensor | None = None,
    seed: Tensor | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, n, d_v), tokens before heads in memory, and the sums of rows of `sums_of`.

    Args:
        q: (b, h, n, d), last stride 1; float16, bfloat16 or float32.
        k: (b, h_kv, n, d), likewise; h is a multiple of h_kv, and each head serves as many query heads in a row.
        v: (b, h_kv, n, d_v).
        packed: (h or 1, length) of `strip.pack`, or None for no bias.
        address: (n,) int32 of `Layout.patches_first`.
        edge: (h or 1, 2) of `strip.pack`.
        keep: (b, n) bool, True for real keys.
        prefix: how many keys take their bias from `edge`.
        scale: factor of the logits, positive.
        sight: (h, 2) int32 of `strip.sight_of`, for a bias that hides keys.
        copy: of `narrow.pack_both`, like `packed` but float16; `edge` is then (h or 1, 3).
        seed: (1,) int64 of the weights that are dropped, or None.
        dropout: the share of weights that are dropped, in [0, 1).
    """
    b, h, n, _ = q.shape
    out = tokens_first(q, v.shape[-1])
    lse = sums_of(q)
    size = choose("forward", q, v, packed)
    prefix = prefix if packed is not None else 0
    forward[(tiles_of(n, prefix, size.queries, "queries") * b * h,)](
        q, k, v, *bias_of(packed, copy, address, edge, sight, q), mask_of(keep, q), seed_of(seed, q), out, lse,
        *strides(q, k, v, out), *bias_strides(packed, edge), n, prefix, scale * LOG2E,
        dropout, b, h, h // k.shape[1], **constants(q, v, size, packed, keep), HAS_COPY=copy is not None,
        SKIP=sight is not None, DROP=seed is not None,
    )  # fmt: skip
    return out, lse


def tiles_of(n: int, prefix: int, size: int, of: str = "keys") -> int:
    """Return in how many tiles of `size` tokens, and narrow ones behind them, kernels divide a grid and a prefix.

    `of`: 'queries' for those of a loop over keys, which `place` says WIDE of; 'few keys' for those of 64 + 32 columns.
    """
    whole, narrow = (n - prefix) // size, min(size, NARROW.value if of == "keys" else FEW.value)
    if of == "queries" and n - whole * size > 2 * narrow:
        whole += 1
    return whole + cdiv(max(n - whole * size, 0), narrow)


def sums_of(q: Tensor) -> Tensor:
    """Return empty memory (2, b, h, n) for log2 of the sums of rows and their shares, rows as `numbers_of_rows`.

    Kernels of a grid count patches first in the sums, and all count tokens as they stand in the shares.
    """
    return numbers_of_rows(q, 2)


def numbers_of_rows(q: Tensor, *several: int) -> Tensor:
    """Return empty memory (..., b, h, n) float32 for a number of each row, apart as `pitch_of` of the kernels says."""
    b, h, n, _ = q.shape
    return torch.empty(*several, b, h, -(-n // 128) * 128, dtype=torch.float32, device=q.device)[..., :n]


def apart(lse: Tensor) -> Tensor:
    """Return sums of rows as `sums_of` lays them out, which a compiler may have changed."""
    h, n = lse.shape[2:]
    pitch = -(-n // 128) * 128
    if lse.stride() == (lse.shape[1] * h * pitch, h * pitch, pitch, 1):
        return lse
    return torch.nn.functional.pad(lse, (0, pitch - n))[..., :n]


def shared(grad: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the output times the share of each row, with last stride 1.

    The log2 of the sum of a row whose logits are huge has no digits left for their number. Such a row has its largest
    logit there, and one over the sum here; a backward pass is linear in this gradient. Shares of other rows are 1.
    """
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    return torch.mul(grad, lse[1, ..., None], out=torch.empty_like(grad))


def tokens_first(q: Tensor, width: int) -> Tensor:
    """Return empty memory (b, h, n, width) in which the heads of a token lie together."""
    b, h, n, _ = q.shape
    return torch.empty(b, n, h, width, dtype=q.dtype, device=q.device).transpose(1, 2)


def grads_like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty memory for the gradients of queries, keys and values."""
    return tokens_first(q, q.shape[-1]), tokens_first(k, k.shape[-1]), tokens_first(v, v.shape[-1])


def fake_output(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """Return what an attention operator returns, without numbers: the output, and the sums of rows."""
    del k, rest
    return tokens_first(q, v.shape[-1]), sums_of(q)


def mask_of(keep: Tensor | None, q: Tensor) -> Tensor:
    """Return the mask of keys; any tensor stands in for one that is not read."""
    return q if keep is None else keep.contiguous()


def seed_of(seed: Tensor | None, q: Tensor) -> Tensor:
    """Return the seed of dropout; any tensor stands in for one that is not read."""
    return q if seed is None else seed


def tile_of(width: int) -> int:
    """Return the columns of tiles that hold `width`: a power of 2, at least what a matrix product takes, or 64 + 32."""
    return 96 if 64 < width <= 96 else max(16, next_power_of_2(width))


def choose(
    kernel: str, q: Tensor, v: Tensor, packed: Tensor | None = None, product: str | None = None
) -> Tiles:
    """Return the tiles of a kernel for these tensors.

    `packed` is the strip that it reads, if any; `product` how it multiplies, which `product_of` says otherwise.
    """
    strip = torch.float16 if packed is None else packed.dtype
    rows = rows_of(q.dtype, product or product_of(q))
    return tiles(kernel, max(q.shape[-1], v.shape[-1]), q.shape[2], rows, is_older(q), strip)


def product_of(q: Tensor) -> str:
    """Return how kernels multiply matrices: DOT of `product`.

    Those of float32 are exact, unless torch is allowed to round float32 to TF32 in its own. Then each number is split
    into two of TF32, of whose products the three largest are taken: errors as in float32 on the tensor cores.
    """
    if q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32x3"
    return "wider" if INTERPRETED and q.dtype == torch.bfloat16 else "ieee"


def is_older(q: Tensor) -> bool:
    """Whether the GPU has little shared memory: those before compute capability 9, and those of 12."""
    # without a GPU (interpreter) tiles are those of the H100
    arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    return arch < (9, 0) or arch[0] == 12


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, heads and tokens of all tensors."""
    return tuple(s for t in tensors for s in t.stride()[:3])


def bias_of(
    packed: Tensor | None, copy: Tensor | None, address: Tensor | None, edge: Tensor | None, sight: Tensor | None,
    q: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the bias operands; any tensor stands in for those that are not read."""
    return tuple(q if given is None else given for given in (packed, copy, address, edge, sight))


def bias_strides(packed: Tensor | None, edge: Tensor | None) -> tuple[int, int]:
    """Return the strides of heads, 0 where heads share one bias."""
    if packed is None or edge is None:
        return 0, 0
    return (packed.stride(0), edge.stride(0)) if packed.shape[0] > 1 else (0, 0)


def constants(
    q: Tensor, v: Tensor, size: Tiles, packed: Tensor | None, keep: Tensor | None
) -> dict[str, int | bool | str]:
    """Return what a kernel is compiled for."""
    width, wide = q.shape[-1], v.shape[-1]
    return {
        "D": width, "BD": tile_of(width), "E": wide, "BE": tile_of(wide),
        "BM": size.queries, "BN": size.keys, "HAS_BIAS": packed is not None, "HAS_KEEP": keep is not None,
        "DOT": product_of(q), **size.options,
        "enable_fp_fusion": True,  # what kernels count on; the default changes between versions
    }  # fmt: skip
