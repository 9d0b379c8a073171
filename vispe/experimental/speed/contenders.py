"""Benchmarked implementations: fused kernels, SDPA with and without dense bias, FlexAttention, extra columns, eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vispe.attention import attention
from vispe.attention.backend_selection import Backend
from vispe.errors import BackendUnavailable
from vispe.experimental.speed.case_inputs import CaseInputs
from vispe.experimental.speed.cases import GRID_MODES, STRUCTURED, BenchmarkPlan, Mode
from vispe.experimental.speed.flex_attention import make_flex, maker
from vispe.experimental.speed.structured_calls import Attend

EAGER_LIMIT = 2053  # tokens
AUTOTUNE = "max-autotune-no-cudagraphs"  # of torch.compile
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Contender:
    """An implementation of attention.

    Args:
        name: name in reports.
        bias: 'distance', 'table', 'mode' (that of the mode), 'structured' (of the structured mode) or None.
        make: maps the inputs of a case to the timed function.
        modes: supported modes.
        slow: whether it is slow to compile or to run.
        exact: whether the bias is computed exactly instead of approximately.
        device: 'cuda', 'cpu' or 'any'.
    """

    name: str
    bias: str | None
    make: Callable[[CaseInputs], Attend]
    modes: tuple[Mode, ...] = GRID_MODES
    slow: bool = False
    exact: bool = True
    device: str = "any"

    def kind(self, mode: Mode) -> str | None:
        """Return the kind of bias in a mode."""
        return ("table" if mode == "table" else "distance") if self.bias == "mode" else self.bias


def contenders(plan: BenchmarkPlan, device: str) -> list[Contender]:
    """Return the implementations for a device, fast ones first."""
    modes: tuple[Mode, ...] = ("forward", "frozen")
    every = [
        Contender("vispe", "mode", ours("mode")),
        Contender("vispe, table", "table", ours("table"), ("forward",)),
        Contender("vispe, no bias", None, ours(None), modes),
        *(
            Contender(f"sdpa {k}, no bias", None, plain(k), modes, device="cuda")
            for k in ("flash", "cudnn", "efficient")
        ),
        Contender("sdpa flash, no bias", None, plain("flash"), modes, device="cpu"),
        *(
            Contender(f"sdpa {k}, dense bias cached", "distance", dense(k, True), modes, device="cuda")
            for k in ("efficient", "cudnn")
        ),
        *(
            Contender(f"sdpa {k}, dense bias built", "mode", dense(k, False), device="cuda")
            for k in ("efficient", "cudnn")
        ),
        Contender("sdpa, dense bias cached", "distance", dense(None, True), modes, device="cpu"),
        Contender("sdpa, dense bias built", "mode", dense(None, False), device="cpu"),
        *(
            Contender(f"sdpa, {r} extra columns", "distance", columns(r), ("forward", "frozen", "slopes"), exact=False)
            for r in (8, 16)
        ),
        Contender("eager", "mode", eager),
        Contender("flex, distance", "distance", make_flex("distance"), ("forward", "frozen", "slopes"), slow=True),
        Contender("flex, table", "table", make_flex("table"), ("forward", "frozen", "table"), slow=True),
        Contender("flex flash, distance", "distance", flex_flash, modes, slow=True, device="cuda"),
        Contender("flex max-autotune, distance", "distance", make_flex("distance", None, AUTOTUNE), modes, slow=True,
                  device="cuda"),
        Contender("flash-attention 3, no bias", None, flash3, modes, device="cuda"),
        Contender("vispe by flex", "mode", ours("mode", "flex"), modes, slow=True, device="cuda"),
        Contender("vispe", "structured", structured(), STRUCTURED),
        Contender("sdpa, dense bias built", "structured", structured("sdpa"), STRUCTURED),
    ]  # fmt: skip
    if plan.dry:
        return list({(c.name, c.modes): c for c in every}.values())
    return [c for c in every if c.device in (device, "any") and (plan.slow or not c.slow)]


@maker
def ours(setup: CaseInputs, kind: str | None, backend: Backend | None = None) -> Attend:
    """Return `vispe.attention` with the bias of the mode, a table, or none."""
    if backend == "flex" and setup.dry:
        raise BackendUnavailable("FlexAttention is not compiled in a dry run.")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = None if kind is None else setup.bias(None if kind == "mode" else kind)
        return attention(q, k, v, bias=bias, backend=backend or setup.backend)

    return call


@maker
def structured(setup: CaseInputs, backend: Backend | None = None) -> Attend:
    """Return `vispe.attention` with the bias, rotation or mask of a mode of `STRUCTURED`."""
    return lambda *qkv: setup.structured().attend(*qkv, backend or setup.backend)


@maker
def plain(setup: CaseInputs, kernel: str) -> Attend:
    """Return SDPA without a bias, by one kernel."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(_KERNELS[kernel]):
            return F.scaled_dot_product_attention(q, k, v)

    return call


@maker
def dense(setup: CaseInputs, kernel: str | None, cached: bool) -> Attend:
    """Return SDPA with a dense bias (1, h, n, n) in the dtype of q, built once or in every call."""
    dtype = setup.case.torch_dtype
    mask = setup.bias().dense().to(dtype) if cached else None
    backends = list(_KERNELS.values()) if kernel is None else [_KERNELS[kernel]]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = setup.bias().dense().to(dtype) if mask is None else mask
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return call


def eager(setup: CaseInputs) -> Attend:
    """Return attention by explicit matrix products and a softmax; a fixed bias is cached."""
    if setup.case.tokens > EAGER_LIMIT:
        raise BackendUnavailable(f"not tried above {EAGER_LIMIT} tokens: it writes b h n^2 numbers.")
    dtype, scale = setup.case.torch_dtype, setup.case.width**-0.5
    mask = None if setup.leaves else setup.bias().dense().to(dtype)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = setup.bias().dense().to(dtype) if mask is None else mask
        return (q @ k.transpose(-1, -2) * scale + bias).softmax(-1) @ v

    return call


@maker
def columns(setup: CaseInputs, rank: int) -> Attend:
    """Return SDPA with the distance bias as extra columns of q and k, from its largest singular values."""
    dtype, width = setup.case.torch_dtype, setup.case.width
    y, x, has_position = setup.cells()
    points = torch.stack([y, x], -1).float()
    distance = torch.cdist(points, points) * (has_position[:, None] & has_position[None])
    # small grids have fewer singular values than columns: pad with 0
    rank_ = min(rank, len(points))
    left, values, right = torch.svd_lowrank(distance, min(rank_ + 8, len(points)), niter=4)
    root = values[:rank_].sqrt()
    row, col = left[:, :rank_] * -root * math.sqrt(width), right[:, :rank_] * root
    row, col = (F.pad(t, (0, rank - rank_)) for t in (row, col))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, n, _ = q.shape
        per_head = (setup.slopes[:, None, None] * row).to(dtype)
        wide = torch.cat([q, per_head.expand(b, h, n, rank)], -1)
        keys = torch.cat([k, col.to(dtype).expand(b, h, n, rank)], -1)
        with sdpa_kernel(_KERNELS["flash"]):
            out = F.scaled_dot_product_attention(wide, keys, F.pad(v, (0, rank)), scale=width**-0.5)
        return out[..., :width]

    return call


def flash3(setup: CaseInputs) -> Attend:
    """Return the kernels of flash-attention 3 without a bias, if that package is installed."""
    if find_spec("flash_attn_interface") is None:
        raise BackendUnavailable("the package flash_attn_interface (flash-attention 3) is not installed.")
    kernel = import_module("flash_attn_interface").flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = kernel(*(t.transpose(1, 2) for t in (q, k, v)))
        # some versions also return the log-sum-exp
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def flex_flash(setup: CaseInputs) -> Attend:
    """Return FlexAttention by the kernels of flash-attention 4, if that package is installed."""
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        raise BackendUnavailable("the package flash_attn.cute is not installed.")
    return make_flex("distance", {"BACKEND": "FLASH"})(setup)
