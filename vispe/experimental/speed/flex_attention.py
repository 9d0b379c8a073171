"""FlexAttention with a distance or a table, as written by its users."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from vispe.experimental.speed.case_inputs import CaseInputs
from vispe.experimental.speed.structured_calls import Attend


def maker(function: Callable[..., Attend]) -> Callable[..., Callable[[CaseInputs], Attend]]:
    """Curry a function of a setup and options: called with the options, returns a function of the setup."""
    return lambda *options: lambda setup: function(setup, *options)


@maker
def make_flex(
    setup: CaseInputs, kind: str, options: dict[str, Any] | None = None, mode: str | None = None
) -> Attend:
    """Return FlexAttention.

    Every instance is compiled separately with fullgraph=True: one compiled function for many grids would reach the
    recompilation limit and silently run without fusion.

    Args:
        setup: inputs of a case.
        kind: 'distance' (square root per score) or 'table' (one load per score).
        options: kernel options of FlexAttention.
        mode: mode of `torch.compile`, such as 'max-autotune-no-cudagraphs'.
    """
    score = _distance(setup) if kind == "distance" else _table(setup)
    compiled: Any = flex_attention
    if not setup.dry:
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False, mode=mode)
    return partial(compiled, score_mod=score, kernel_options=options)


def _distance(setup: CaseInputs) -> Any:
    y, x, has_position = setup.cells()
    y, x, slopes = y.float(), x.float(), setup.slopes

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        dy, dx = y[i] - y[j], x[i] - x[j]
        distance = torch.sqrt(dy * dy + dx * dx)
        return score - slopes[h] * torch.where(has_position[i] & has_position[j], distance, 0.0)

    return score_mod


def _table(setup: CaseInputs) -> Any:
    y, x, has_position = setup.cells()
    y, x, table = y.to(torch.int32), x.to(torch.int32), setup.table
    rows, cols = setup.case.shape

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        value = table[h, y[i] - y[j] + rows - 1, x[i] - x[j] + cols - 1]
        return score + torch.where(has_position[i] & has_position[j], value, 0.0)

    return score_mod
