"""Launch of the forward kernel of a grid on tensors, without autograd, and shared launch helpers."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from vispe.attention.backends.triton.grid.forward import forward
from vispe.attention.backends.triton.grid.row_sums import LOG2E, sums_of
from vispe.attention.backends.triton.grid.shared import FEW, NARROW
from vispe.attention.backends.triton.tiles import Tiles, cdiv, power_of_2, rows_of, tiles

MAX_LAUNCHERS = 4096  # kernels with their sizes and strides that can be launched again without inspection
Constants = dict[str, int | bool | str]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton read it when it decorated the kernels


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, packed: Tensor | None, address: Tensor | None, edge: Tensor | None,
    keep: Tensor | None, prefix: int, scale: float, visible: Tensor | None = None, copy: Tensor | None = None,
    seed: Tensor | None = None, dropout: float = 0.0, row: Tensor | None = None, col: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, n, d_v), stored as (b, n, h, d_v), and the row sums of `sums_of`.

    Args:
        q: (b, h, n, d), last stride 1; float16, bfloat16 or float32.
        k: (b, h_kv, n, d), likewise; h is a multiple of h_kv, and each key head is shared by consecutive query heads.
        v: (b, h_kv, n, d_v).
        packed: (h or 1, length) from `packed.pack`, or None for no bias.
        address: (n,) int32 from `Layout.patches_first`.
        edge: (h or 1, 2) from `packed.pack`.
        keep: (b, n) bool, True for real keys.
        prefix: number of keys whose bias is in `edge`.
        scale: factor of the logits, positive.
        visible: (h, 2) int32 from `lower_to_table.visible_offsets`, for a bias that masks many keys.
        copy: float16 copy of `packed` from `float16_runs.pack_with_copy`; `edge` is then (h or 1, 3).
        seed: (1,) int64 seed of dropout, or None.
        dropout: dropout probability, in [0, 1).
        row: gates of queries (b, h, n), float32, contiguous; the bias is ``(row_i + col_j) packed``. None without
            gates. Gates require h_kv = h, and `packed` in float32.
        col: gates of keys, likewise.
    """
    b, h, n, _ = q.shape
    out = tokens_first(q, v.shape[-1])
    lse = sums_of(q)
    size = choose("forward", q, v, packed)
    # without a bias the prefix needs no special treatment
    prefix = prefix if packed is not None else 0
    launch(
        forward,
        tiles_of(n, prefix, size.queries, "queries") * b * h,
        (
            q, k, v, *bias_of(packed, copy, address, edge, visible, row, col, q), mask_of(keep, q), seed_of(seed, q),
            out, lse,
        ),
        (*strides(q, k, v, out), *bias_strides(packed, edge), n, prefix, scale * LOG2E, dropout, b, h, h // k.shape[1]),
        {
            **constants(q, v, size, packed, keep), "HAS_COPY": copy is not None, "GATED": row is not None,
            "SKIP": visible is not None, "DROP": seed is not None,
        },
    )  # fmt: skip
    return out, lse


_LAUNCHERS: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    programs: int | tuple[int, int, int],
    operands: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: Constants,
) -> None:
    """Launch a kernel.

    Triton inspects all arguments in each call, which takes several times as long as the launch. What it compiles
    depends on the dtypes and alignment of the operands, on the numbers and on the constants. If all of these are equal
    to those of an earlier call, the kernel of that call is launched without another inspection.

    Args:
        kernel: function with the arguments `operands`, `numbers` and `constants`, in this order.
        programs: number of programs, along one or three axes.
        operands: tensors.
        numbers: integers and floats.
        constants: compile-time constants by name, and launch options of Triton.
    """
    device = -1 if INTERPRETED else driver.active.get_current_device()
    # 1 == 1.0 == True: the dtype of each number is fixed by its kernel
    kinds = [(x.dtype, x.data_ptr() % 16) for x in operands]
    key = (id(kernel), programs, device, numbers, *constants.items(), *kinds)
    launcher = _LAUNCHERS.get(key)
    if launcher is not None:
        launcher[0](*operands, *numbers, *launcher[1])
        return
    grid = (programs, 1, 1) if isinstance(programs, int) else programs
    compiled = kernel[grid](*operands, *numbers, **constants)
    # the interpreter returns nothing
    if compiled is not None:
        if len(_LAUNCHERS) >= MAX_LAUNCHERS:
            _LAUNCHERS.clear()
        names = kernel.arg_names[len(operands) + len(numbers) :]
        _LAUNCHERS[key] = compiled[grid], tuple(constants[name] for name in names)


def tiles_of(n: int, prefix: int, size: int, of: str = "keys") -> int:
    """Return the number of tiles of `size` tokens plus narrow tiles that kernels divide a grid and a prefix into.

    `of`: 'queries' for tiles of queries (WIDE in `ordered_tile`), 'keys', or 'few keys' for keys with a head_dim of
    64 + 32 columns.
    """
    whole, narrow = (n - prefix) // size, min(size, NARROW.value if of == "keys" else FEW.value)
    if of == "queries" and n - whole * size > 2 * narrow:
        whole += 1
    return whole + cdiv(max(n - whole * size, 0), narrow)


def tokens_first(q: Tensor, width: int) -> Tensor:
    """Return an empty tensor (b, h, n, width), stored as (b, n, h, width)."""
    b, h, n, _ = q.shape
    steps = n * h * width, width, h * width, 1
    return torch.empty_strided((b, h, n, width), steps, dtype=q.dtype, device=q.device)


def grads_like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for the gradients of queries, keys and values."""
    return tokens_first(q, q.shape[-1]), tokens_first(k, k.shape[-1]), tokens_first(v, v.shape[-1])


def fake_output(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """Return empty outputs of an attention operator: the output and the row sums."""
    del k, rest
    return tokens_first(q, v.shape[-1]), sums_of(q)


@cache
def missing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the stand-in for a missing operand, which kernels do not read: an empty tensor (a null pointer).

    Its dtype must be that of the operand: Triton also compiles the code after a compile-time `if` that returned, so
    another dtype would be another kernel, or one that does not compile.
    """
    return torch.empty(0, dtype=dtype, device=device)


def mask_of(keep: Tensor | None, q: Tensor) -> Tensor:
    """Return the key mask, or its stand-in."""
    return missing(torch.bool, q.device) if keep is None else keep.contiguous()


def seed_of(seed: Tensor | None, q: Tensor) -> Tensor:
    """Return the seed of dropout, or its stand-in."""
    return missing(torch.int64, q.device) if seed is None else seed


def tile_of(width: int) -> int:
    """Return the tile width for `width` columns: a power of 2, at least 16 (minimum of `tl.dot`), or 96 = 64 + 32."""
    return 96 if 64 < width <= 96 else max(16, power_of_2(width))


def choose(
    kernel: str, q: Tensor, v: Tensor, packed: Tensor | None = None, product: str | None = None
) -> Tiles:
    """Return the tiles of a kernel for these tensors.

    Args:
        kernel: name of the kernel, as in `tiles`.
        q: queries.
        v: values.
        packed: the strip that it reads, if any.
        product: precision of matrix products; `product_of(q)` by default.
    """
    # without a strip, tiles are those of float16 strips
    strip = torch.float16 if packed is None else packed.dtype
    rows = rows_of(q.dtype, product or product_of(q))
    return tiles(kernel, max(q.shape[-1], v.shape[-1]), q.shape[2], rows, is_older(q), strip)


def product_of(q: Tensor) -> str:
    """Return the precision of matrix products in kernels: DOT of `matmul`.

    Float32 products are exact (IEEE) unless torch allows TF32 for its own. Then each number is split into two TF32
    numbers, and the three largest products are summed: errors as in float32, on the tensor cores.
    """
    if q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32x3"
    return "wider" if INTERPRETED and q.dtype == torch.bfloat16 else "ieee"


def is_older(q: Tensor) -> bool:
    """Whether the GPU has little shared memory: compute capability below 9, or 12."""
    # without a GPU (interpreter) use the tiles of the H100
    arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    return arch < (9, 0) or arch[0] == 12


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, heads and tokens of all tensors."""
    steps: tuple[int, ...] = ()
    for tensor in tensors:
        steps += tensor.stride()[:3]
    return steps


def bias_of(
    packed: Tensor | None, copy: Tensor | None, address: Tensor | None, edge: Tensor | None, visible: Tensor | None,
    row: Tensor | None, col: Tensor | None, q: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the bias operands, or their stand-ins."""
    strip = torch.float32 if q.dtype == torch.float32 else torch.float16
    dtypes = strip, torch.float16, torch.int32, torch.float32, torch.int32, torch.float32, torch.float32
    operands = packed, copy, address, edge, visible, row, col
    return tuple(
        missing(dtype, q.device) if tensor is None else tensor
        for tensor, dtype in zip(operands, dtypes, strict=True)
    )


def bias_strides(packed: Tensor | None, edge: Tensor | None) -> tuple[int, int]:
    """Return the head strides of runs and prefix biases, 0 if heads share one bias."""
    if packed is None or edge is None:
        return 0, 0
    return (packed.stride(0), edge.stride(0)) if packed.shape[0] > 1 else (0, 0)


def constants(q: Tensor, v: Tensor, size: Tiles, packed: Tensor | None, keep: Tensor | None) -> Constants:
    """Return the compile-time constants and launch options of a kernel."""
    return {
        **_constants(q.shape[-1], v.shape[-1], size, packed is not None, keep is not None),
        "DOT": product_of(q),
    }


@cache
def _constants(width: int, wide: int, size: Tiles, has_bias: bool, has_keep: bool) -> Constants:
    return {
        "D": width, "BD": tile_of(width), "E": wide, "BE": tile_of(wide),
        "BM": size.queries, "BN": size.keys, "HAS_BIAS": has_bias, "HAS_KEEP": has_keep, **size.options,
        "enable_fp_fusion": True,  # required by the kernels; the default differs between versions of Triton
    }  # fmt: skip
