"""Benchmark cases: grids, batches, heads, dtypes and modes, in order of importance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from vispe.errors import OptionError
from vispe.grid import Grid

Mode = Literal[
    "forward", "frozen", "slopes", "table", "dropped forward", "dropped", "decomposed forward", "decomposed",
    "gated forward", "gated", "rotary forward", "rotary",
]  # fmt: skip
MODES: dict[Mode, str] = {
    "forward": "forward pass, fixed bias",
    "frozen": "forward and backward pass, fixed bias",
    "slopes": "forward and backward pass, learned slopes",
    "table": "forward and backward pass, learned table",
    "dropped forward": "forward pass, tokens in any order",
    "dropped": "forward and backward pass, tokens in any order",
    "decomposed forward": "forward pass, a table per axis that queries read",
    "decomposed": "forward and backward pass, a table per axis that queries read",
    "gated forward": "forward pass, gates of queries and keys",
    "gated": "forward and backward pass, gates of queries and keys",
    "rotary forward": "forward pass, rotated queries and keys with a bias",
    "rotary": "forward and backward pass, rotated queries and keys with a bias",
}
GRID_MODES: tuple[Mode, ...] = ("forward", "frozen", "slopes", "table")  # the other modes are in `STRUCTURED`
STRUCTURED: tuple[Mode, ...] = tuple(mode for mode in MODES if mode not in GRID_MODES)


def is_forward(mode: Mode) -> bool:
    """Whether only the forward pass is measured."""
    return mode.endswith("forward")


@dataclass(frozen=True)
class Case:
    """One shape of attention.

    Args:
        shape: rows and columns of the grid.
        prefix: number of prefix tokens, which have no position.
        batch: batch size, b.
        heads: number of heads, h.
        width: head_dim, d.
        dtype: name of the dtype.

    Example:
        >>> case = Case((3, 4), prefix=1, batch=2, heads=6)
        >>> print(case)
        3x4+1 b2 h6 d64 bfloat16
        >>> case.tokens, case.flop("forward")
        (13, 519168)
    """

    shape: tuple[int, int]
    prefix: int
    batch: int
    heads: int
    width: int = 64
    dtype: str = "bfloat16"

    @property
    def grid(self) -> Grid:
        """The grid."""
        return Grid(self.shape, self.prefix)

    @property
    def tokens(self) -> int:
        """Number of tokens, n."""
        return self.grid.tokens

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return getattr(torch, self.dtype)

    def flop(self, mode: Mode) -> int:
        """Return operations by the usual count: 4 b h n^2 d forward, 10 b h n^2 d backward."""
        return (4 if is_forward(mode) else 14) * self.batch * self.heads * self.tokens**2 * self.width

    def __str__(self) -> str:
        h, w = self.shape
        return f"{h}x{w}+{self.prefix} b{self.batch} h{self.heads} d{self.width} {self.dtype}"


@dataclass(frozen=True)
class BenchmarkPlan:
    """Configuration of a benchmark run.

    Args:
        cases: cases in order of importance.
        modes: modes that are measured for every case.
        structured: number of leading cases that are also measured in the modes of `STRUCTURED`.
        reps: min number of timed calls per contender.
        slow: whether to include contenders that are slow to compile or to run.
        largest: grids for training with a learned table, smallest first.
        check_shapes: grids, prefixes and head_dim of the correctness checks.
        check_dtypes: dtypes of the correctness checks.
        warmup: seconds of warm-up calls.
        dry: include all contenders, even those that cannot run on this device; no compilation and no warm-up.

    Example:
        >>> plan = BenchmarkPlan((Case((3, 4), 1, 1, 1, 16),), reps=1, dry=True)
        >>> len(plan.cases), plan.check_dtypes
        (1, ('float32', 'float16', 'bfloat16'))
    """

    cases: tuple[Case, ...]
    modes: tuple[Mode, ...] = GRID_MODES
    structured: int = 0
    reps: int = 50
    slow: bool = True
    largest: tuple[Case, ...] = ()
    check_shapes: tuple[tuple[tuple[int, int], int, int], ...] = ()
    check_dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    warmup: float = 0.1
    dry: bool = False


_GRIDS = (  # grid, prefixes, samples for 6, 12 and 16 heads: 1e9 to 4e9 scores
    ((14, 14), (1,), (1024, 512, 256)),
    ((16, 16), (1, 5), (1024, 512, 256)),
    ((32, 32), (1,), (128, 64, 64)),
    ((37, 37), (1, 5), (64, 32, 32)),
    ((32, 64), (5,), (32, 16, 16)),
    ((64, 64), (0, 5), (8, 4, 4)),
    ((73, 73), (1,), (4, 4, 2)),
    ((128, 128), (0,), (1, 1, 1)),
)
_WIDE = tuple(Case(s, p, b, 16, 128) for s, p, b in (((32, 32), 1, 64), ((64, 64), 0, 4), ((128, 128), 0, 1)))
_MAIN = (Case((32, 32), 1, 64, 12), Case((37, 37), 1, 32, 12), Case((64, 64), 0, 4, 12))
_FIRST = (
    *_MAIN, *_WIDE[:2], Case((16, 16), 1, 512, 12), Case((128, 128), 0, 1, 12), Case((14, 14), 1, 512, 12),
    Case((32, 64), 5, 16, 12), *(replace(c, dtype="float16") for c in _MAIN), _WIDE[2],
)  # fmt: skip
_CHECKS = (((14, 14), 1, 64), ((37, 37), 5, 64), ((16, 16), 0, 128), ((9, 40), 1, 80), ((64, 64), 0, 64))


def protocol() -> BenchmarkPlan:
    """Return the full protocol for a GPU."""
    every = [
        Case(shape, prefix, batch, heads)
        for shape, prefixes, batches in _GRIDS
        for prefix in prefixes
        for heads, batch in zip((6, 12, 16), batches, strict=True)
    ]
    rest = sorted((c for c in every if c not in _FIRST), key=lambda c: c.heads != 12)
    largest = (Case((128, 128), 0, 1, 16), Case((256, 256), 0, 1, 16))
    return BenchmarkPlan((*_FIRST, *rest), structured=3, largest=largest, check_shapes=_CHECKS)


def protocol_cpu() -> BenchmarkPlan:
    """Return the protocol for a CPU, without cases that need a GPU."""
    sizes = (((16, 16), 1), ((32, 32), 1), ((32, 64), 1))
    cases = [Case(s, p, 2, 6, dtype=d) for s, p in sizes for d in ("float32", "bfloat16")]
    shapes = (((14, 14), 1, 64), ((9, 25), 5, 32))
    return BenchmarkPlan(tuple(cases), structured=2, check_shapes=shapes, warmup=0.0)


def quick(device: str) -> BenchmarkPlan:
    """Return a plan of a few minutes: small batches, the main shapes and modes."""
    if device == "cpu":
        plan = protocol_cpu()
        fewer = {"cases": plan.cases[:4], "modes": ("forward", "frozen", "table"), "reps": 20}
        return replace(plan, **fewer, slow=False, structured=0)
    sizes = (((32, 32), 1, 16), ((16, 16), 1, 64), ((37, 37), 1, 8), ((64, 64), 0, 2))
    cases = tuple(Case(s, p, b, 12) for s, p, b in sizes)
    return BenchmarkPlan(cases, ("forward", "frozen", "table"), structured=1, check_shapes=_CHECKS[:2])


def dry() -> BenchmarkPlan:
    """Return a plan that runs every code path on tiny tensors; its times are meaningless."""
    cases = (Case((3, 4), 1, 1, 1, 16, "float16"),)
    checks = {"check_shapes": (((3, 5), 1, 16),), "check_dtypes": ("float32",)}
    return BenchmarkPlan(cases, structured=1, reps=1, largest=cases, **checks, warmup=0.0, dry=True)


def plan_for(kind: str, device: str) -> BenchmarkPlan:
    """Return the plan `kind` ('protocol', 'quick' or 'dry') for a device ('cuda' or 'cpu').

    Raises:
        OptionError: an unknown plan.

    Example:
        >>> plan_for("dry", "cpu").dry
        True
    """
    if kind == "protocol":
        return protocol_cpu() if device == "cpu" else protocol()
    if kind not in ("quick", "dry"):
        raise OptionError(f"There is no plan {kind!r}; choose protocol, quick or dry.")
    return quick(device) if kind == "quick" else dry()
