"""Kinds of released checkpoints: names of their entries, number of heads, and the encodings that they may have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vispe.encodings.registry import encoding_class


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model, inferred from its weights."""

    root: str  # prefix of all names
    dim: int
    depth: int
    heads: int | None  # None if they cannot be inferred
    entries: dict[str, Tensor]  # the entries of the encoding, without the prefix


@dataclass(frozen=True)
class ReleasedKind:
    """One kind of released checkpoints.

    Attributes:
        pattern: pattern of the entry names of the positional encoding, after the prefix of the model.
        example: an entry name that matches the pattern.
        heads: function that infers the number of heads from entries and width; None if that is impossible.
        specs: function that returns the possible encodings, the most likely first.
    """

    pattern: re.Pattern[str]
    example: str
    heads: Callable[[dict[str, Tensor], int], int | None]
    specs: Callable[[ModelFacts], Iterable[dict[str, Any]]]


def _slope_heads(entries: dict[str, Tensor], dim: int) -> int:
    del dim
    return next(iter(entries.values())).numel()


def _unknown_heads(entries: dict[str, Tensor], dim: int) -> None:
    del entries, dim


def _rpe_heads(entries: dict[str, Tensor], dim: int) -> int | None:
    """Return the number of heads of an iRPE model: from its tables, or the width divided by that of a vector."""
    name, table = next(iter(entries.items()))
    if table.shape[0] > 1:
        return table.shape[0]
    if table.ndim < 3:
        return None
    width = table.shape[2] if ".rpe_v." in name else table.shape[1]
    return dim // width if width and dim % width == 0 else None


def _rpe_specs(facts: ModelFacts) -> Iterable[dict[str, Any]]:
    """Yield the possible specs of an iRPE model: the published variants, on the projections that have tables."""
    letters = "".join(c for c in "qkv" if any(f".rpe_{c}." in name for name in facts.entries))
    name, table = next(iter(facts.entries.items()))
    mode = "bias" if name.endswith("_bias") else "contextual"
    specs: list[dict[str, Any]] = []
    for preset in encoding_class("irpe").presets.values():
        spec = {"name": "irpe", **preset, "on": letters, "mode": mode, "shared": table.shape[0] == 1}
        if spec not in specs:
            specs.append(spec)
            yield spec


def _peg_specs(facts: ModelFacts) -> Iterable[dict[str, Any]]:
    kernels = [t for t in facts.entries.values() if t.ndim == 4]
    if kernels:
        yield {"name": "peg", "first": len(kernels), "kernel_size": kernels[0].shape[-1]}


def _gpsa_specs(facts: ModelFacts) -> Iterable[dict[str, Any]]:
    layers = sorted(
        {int(match[1]) for name in facts.entries if (match := re.match(r"blocks\.(\d+)\.", name))}
    )
    yield {"name": "gpsa", "layers": layers, "late_prefix": True}


_PEG = r"pos_block\.(\d+)\.proj\.(?:0\.)?(?:weight|bias)"
KINDS: dict[str, ReleasedKind] = {
    "dino-saw": ReleasedKind(
        re.compile(r"blocks\.\d+\.attn\.m"),
        "blocks.0.attn.m",
        _slope_heads,
        lambda facts: [{"name": "alibi2d", "slopes": "learned"}],
    ),
    "rope-vit": ReleasedKind(
        re.compile(r"(?:rope\.)?freqs"), "freqs", _unknown_heads, lambda facts: [{"name": "rope_mixed"}]
    ),
    "deit-irpe": ReleasedKind(
        re.compile(r"blocks\.\d+\.attn\.rpe_[qkv]\..*"),
        "blocks.0.attn.rpe_k.lookup_table_weight",
        _rpe_heads,
        _rpe_specs,
    ),
    "convit": ReleasedKind(
        re.compile(r"blocks\.\d+\.attn\.(?:gating_param|pos_proj\.(?:weight|bias))"),
        "blocks.0.attn.gating_param",
        lambda entries, dim: next(t.numel() for name, t in entries.items() if name.endswith("gating_param")),
        _gpsa_specs,
    ),
    "cpvt": ReleasedKind(re.compile(_PEG), "pos_block.0.proj.weight", _unknown_heads, _peg_specs),
    "twins": ReleasedKind(re.compile(_PEG), "pos_block.0.proj.0.weight", _unknown_heads, _peg_specs),
}
