"""Values of an encoding for every query and key of a grid, and their compact form."""

from __future__ import annotations

import base64
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.compose import bias_of, transform_of
from vispe.encodings.creation import create_encoding
from vispe.encodings.multi_softmax import calls_of, weights_of
from vispe.encodings.registry import encoding_class, parse_spec
from vispe.errors import UnsupportedCombination, VispeError, counted
from vispe.grid import Grid
from vispe.utils.declared_options import option_choices

HEAD_DIM = 64
HIDDEN = 65535
"""Stored integer of an infinite value: the key is hidden from the query."""

_EFFECTS = {"additive": Additive, "mixing": Mixing, "bias": Biased, "rotation": Rotary}


def variants(name: str) -> list[str]:
    """Return specs of an encoding: its defaults, its presets, and every other value of options with fixed choices.

    Args:
        name: encoding without preset and options.

    Raises:
        UnknownEncoding: the encoding does not exist.

    Example:
        >>> variants("learned")
        ['learned', 'learned(resample=tile)', 'learned(resample=nearest)', 'learned(resample=linear)']
    """
    cls = encoding_class(name)
    specs = [name, *(f"{name}.{preset}" for preset in cls.presets)]
    choices = option_choices(cls)
    for option in inspect.signature(cls).parameters.values():
        others = [value for value in choices.get(option.name, []) if value != option.default]
        texts = [str(value).lower() if isinstance(value, bool) else value for value in others]
        specs += [f"{name}({option.name}={text})" for text in texts]
    return specs


def pairwise_values(
    spec: str, side: int, built_for: int, num_heads: int = 4, layer: int = 0
) -> tuple[str, np.ndarray]:
    """Return the meaning of the values, and the values (1 or heads, query patches, key patches) in float64.

    Queries and keys of all patches are equal, with random channels. Learned parameters have their initial values
    (seed 0).

    Args:
        spec: an encoding as text.
        side: patches along each axis of the grid.
        built_for: side of the grid that the encoding is created for.
        num_heads: number of heads, with head_dim 64.
        layer: index of the block.

    Raises:
        UnknownEncoding: the encoding or preset does not exist.
        OptionError: an option does not exist or has an invalid value.
        UnsupportedCombination: there are no values for each pair of patches, or several kinds of them.

    Example:
        >>> pairwise_values("alibi2d", 4, 4)[1].shape
        (1, 16, 16)
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        width, depth = num_heads * HEAD_DIM, max(12, layer + 1)
        facts: dict[str, Any] = {"dim": width, "num_heads": num_heads, "depth": depth}
        encoding = create_encoding(spec, **facts, grid=(built_for, built_for)).eval()
        meaning, values = _values(encoding, spec, Grid((side, side)), num_heads, layer)
    dense = values.double().numpy()
    return meaning, dense[:1] if all(np.array_equal(head, dense[0]) for head in dense) else dense


def _values(encoding: Encoding, spec: str, grid: Grid, num_heads: int, layer: int) -> tuple[str, Tensor]:
    parts = encoding.parts()
    if lacking := [part for part in parts if grid.axes not in part.ndim]:
        axes = " or ".join(counted(n, "axis") for n in lacking[0].ndim)
        raise UnsupportedCombination(
            f"explore: {lacking[0].name} needs a grid with {axes}, got {counted(grid.axes, 'axis')}. "
            "Use an encoding of vispe.list_encodings(ndim=2)."
        )
    pos = encoding.prepare(grid.positions())
    effects = [name for name, kind in _EFFECTS.items() if any(isinstance(part, kind) for part in parts)]
    if len(parts) > 1 and len(effects) > 1:
        raise UnsupportedCombination(
            f"explore: {spec} has several effects ({', '.join(effects)}), got a sum of them. "
            "Pass its encodings separately."
        )
    # equal channels would hide that a rotation belongs to an axis
    content = torch.randn(1, num_heads, 1, HEAD_DIM).expand(-1, -1, grid.tokens, -1)
    x = torch.randn(1, 1, num_heads * HEAD_DIM).expand(-1, grid.tokens, -1)
    if any(part.multi_softmax for part in parts):
        weights = weights_of(calls_of(content, content, content, parts, pos, layer, x))
        return "attention weights between equal tokens", weights[0]
    if (bias := bias_of(parts, pos, layer, x)) is not None:
        return "added to the logits", bias.dense(pos, pos, q=content, k=content, scale=HEAD_DIM**-0.5)[0]
    if "rotation" in effects:
        transform = transform_of(parts, pos, layer, x)
        scores = transform.query(content).double() @ transform.key(content).double().mT
        norm = content.double().square().sum(-1, keepdim=True)
        return "similarities of equal queries and keys", (scores / norm)[0]
    if effects == ["additive"] and not any(part.reads_tokens for part in parts):
        added = torch.stack([part.table(pos)[0].expand(grid.tokens, -1) for part in parts]).sum(0)
        unit = normalize(added.double(), dim=-1)
        return "cosine similarities of the added vectors", (unit @ unit.T)[None]
    raise UnsupportedCombination(
        f"explore: {spec} has no values for each pair of patches in this block, got layer={layer}. "
        "Use another layer or encoding."
    )


def compressed(dense: np.ndarray, side: int) -> dict[str, Any]:
    """Return values as 16-bit integers between their bounds: one per offset if only the offset matters, else all.

    Offsets are key minus query, from -(side - 1) along rows and columns. `HIDDEN` is minus infinity.

    Args:
        dense: (heads, side**2, side**2), finite or minus infinity.
        side: patches along each axis.

    Example:
        >>> grid = compressed(pairwise_values("alibi2d", 4, 4)[1], 4)
        >>> grid["heads"], grid["offsets"], grid["low"]
        (1, True, -1.0)
    """
    cells = np.arange(side * side)
    rows, columns = (cell[None] - cell[:, None] + side - 1 for cell in np.divmod(cells, side))
    table = np.zeros((len(dense), 2 * side - 1, 2 * side - 1))
    table[:, rows, columns] = dense
    finite = np.isfinite(dense)
    low, high = float(dense[finite].min()), float(dense[finite].max())
    shared = table[:, rows, columns]
    # differences below half a step are those of rounding in float32
    gap = np.abs(np.where(finite, shared, 0) - np.where(finite, dense, 0)).max()
    by_offset = np.array_equal(np.isfinite(shared), finite) and gap <= max((high - low) / HIDDEN / 2, 1e-6)
    stored = table if by_offset else dense
    steps = np.full(stored.shape, HIDDEN)
    inside = np.isfinite(stored)
    steps[inside] = np.rint((stored[inside] - low) / max(high - low, 1e-12) * (HIDDEN - 1))
    text = base64.b64encode(steps.astype("<u2").tobytes()).decode()
    return {"heads": len(dense), "offsets": bool(by_offset), "low": low, "high": high, "values": text}


def explorer_data(
    specs: Sequence[str], sizes: Sequence[int], num_heads: int, layer: int, expand: bool
) -> dict[str, Any]:
    """Return the data of an explorer: encoding, options, kind of values, and values by grid.

    With `expand`, a name without options stands for its `variants`. Those are omitted that need further options, or
    whose values equal those of an earlier one.

    Raises:
        VispeError: as `pairwise_values` raises for a spec of the caller.
    """
    data: dict[str, Any] = {}
    for spec in map(str.strip, specs):
        terms = parse_spec(spec)
        name = terms[0]["name"] if len(terms) == 1 else spec
        known = data.setdefault(name, {})
        for variant in variants(spec) if expand and spec == name and len(terms) == 1 else [spec]:
            entry: dict[str, Any] = {"kind": "", "grids": {}}
            try:
                for side in sizes:
                    entry["kind"], dense = pairwise_values(variant, side, sizes[0], num_heads, layer)
                    entry["grids"][str(side)] = compressed(dense, side)
            except VispeError:
                if variant == spec:
                    raise
                continue
            if variant == spec or entry not in known.values():
                known[variant.removeprefix(name) or "default"] = entry
    return data
