"""Random inputs of a case, and the float64 reference output."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention import Bias, DistanceBias, TableBias
from vispe.errors import OptionError
from vispe.experimental.speed.cases import STRUCTURED, Case, Mode, is_forward
from vispe.experimental.speed.structured_calls import Structured, exact_rows

SETS = 4  # number of sets of inputs, which are used in turn
ROWS = 1024  # max number of queries of the reference output


class CaseInputs:
    """Inputs of one case and mode. `begin` creates new positions for every contender.

    Args:
        case: the shape.
        mode: mode, which determines the tensors with gradients.
        device: device of all tensors.
        backend: backend of vispe.
        dry: whether compilation is disabled.
    """

    def __init__(self, case: Case, mode: Mode, device: str, backend: str = "auto", dry: bool = False) -> None:
        self.case, self.mode, self.device, self.backend, self.dry = case, mode, device, backend, dry
        make = torch.Generator(device).manual_seed(0)
        learned = not is_forward(mode)
        size = (case.batch, case.tokens, case.heads, case.width)

        def random() -> Tensor:  # tokens precede heads in memory, as in the output of projections
            return torch.randn(size, generator=make, device=device, dtype=case.torch_dtype).transpose(1, 2)

        # q, k, v and the gradient of the output
        self.sets = [(*(random().requires_grad_(learned) for _ in range(3)), random()) for _ in range(SETS)]
        slopes = 2.0 ** (-8.0 * torch.arange(1, case.heads + 1, device=device) / case.heads)
        self.slopes = slopes.requires_grad_(mode == "slopes")
        entries = (case.heads, *(2 * n - 1 for n in case.shape))
        self.table = torch.randn(entries, generator=make, device=device).requires_grad_(mode == "table")
        self.numbers = tuple(slopes.tolist())
        self.begin()

    def begin(self) -> None:
        """Reset everything that a contender cached with the positions."""
        self.pos = self.case.grid.positions(self.device)
        self._structured: Structured | None = None
        if self.mode in STRUCTURED:
            make = torch.Generator(self.device).manual_seed(1)
            case, kind = self.case, self.mode.split()[0]
            size = (case.batch, case.heads, case.tokens, case.width)
            self._structured = Structured(
                kind, self.pos, size, self.numbers,
                lambda shape: torch.randn(shape, generator=make, device=self.device),
            )  # fmt: skip
            for leaf in self.leaves:
                leaf.requires_grad_()

    def structured(self) -> Structured:
        """Return the structured inputs of a mode of `STRUCTURED`.

        Raises:
            OptionError: the mode is not structured.
        """
        if self._structured is None:
            raise OptionError(
                f"Setup: mode must be one of {', '.join(STRUCTURED)}, got {self.mode!r}. Use one of these."
            )
        return self._structured

    @property
    def kind(self) -> str:
        """Kind of bias of the mode, 'distance' or 'table'."""
        return "table" if self.mode == "table" else "distance"

    def bias(self, kind: str | None = None) -> Bias:
        """Return the bias of the mode, or of `kind`."""
        if (kind or self.kind) == "table":
            return TableBias(self.table, self.pos)
        return DistanceBias(self.slopes if self.mode == "slopes" else self.numbers, self.pos)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The parameters of the bias that have a gradient."""
        if self._structured is not None:
            return () if is_forward(self.mode) else tuple(self._structured.leaves())
        return tuple(t for t in (self.slopes, self.table) if t.requires_grad)

    def cells(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return row and column of every token, and whether it has a position, (n,) each."""
        cells = self.pos.cells()[0].to(torch.int64)
        return cells[:, 0], cells[:, 1], self.pos.spatial[0]

    def bias_rows(self, kind: str | None, head: int, rows: Tensor) -> Tensor | float:
        """Return the bias of the queries `rows` in one head, (r, n) float64, from its definition."""
        if kind is None:
            return 0.0
        y, x, has_position = self.cells()
        dy, dx = (line[rows, None] - line[None] for line in (y, x))
        if kind == "table":
            h, w = self.case.shape
            values = self.table[head].detach().double()[dy + h - 1, dx + w - 1]
        else:
            values = -self.slopes[head].detach().double() * (dy.double() ** 2 + dx.double() ** 2).sqrt()
        return values.masked_fill(~(has_position[rows, None] & has_position[None]), 0.0)

    @torch.no_grad()
    def error(self, out: Tensor, kind: str | None) -> tuple[float, float]:
        """Return relative and max absolute error of an output for the first set, in one head of the first sample."""
        head = self.case.heads // 2
        step = max(1, self.case.tokens // ROWS)
        rows = torch.arange(0, self.case.tokens, step, device=self.device)
        q, k, v = (t[0, head].double() for t in self.sets[0][:3])
        if kind == "structured":
            expected = exact_rows(self.structured().sample(head), q, k, v, rows)
        else:
            logits = self.case.width**-0.5 * q[rows] @ k.T + self.bias_rows(kind, head, rows)
            expected = logits.softmax(-1) @ v
        gap = out[0, head, rows].double() - expected
        return (gap.norm() / expected.norm()).item(), gap.abs().max().item()
