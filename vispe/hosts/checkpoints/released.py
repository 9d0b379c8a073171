"""Conversion of released checkpoints to the parameter names of vispe's encodings.

Entries are renamed by `Encoding.rename_checkpoint_keys`, which also lets converted models load such files directly.
What is not stored in a file is inferred: the encoding, from the names of its entries, and its options, from their
shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vispe.encodings.base import Encoding
from vispe.encodings.creation import create_encoding
from vispe.encodings.registry import Spec, parse_spec
from vispe.encodings.spec import spec_to_text
from vispe.errors import InputError, OptionError, VispeError, counted, did_you_mean
from vispe.hosts.checkpoints.kinds import KINDS, ModelFacts
from vispe.hosts.checkpoints.model_facts import facts_of, kind_of


@dataclass(frozen=True)
class Converted:
    """Weights with vispe's names, and a record of the conversion.

    Attributes:
        weights: all tensors, including those that were not renamed.
        kind: kind of the checkpoint.
        specs: possible encodings of these weights, as values of `pos_embed`; several if their shapes are
            equal.
        renamed: (old, new) name of every renamed entry; an entry may be split into several, and several may
            be merged into one.
        dropped: names of removed entries; the encoding computes their values.
        notes: assumptions of the conversion, one sentence each.
    """

    weights: dict[str, Tensor]
    kind: str
    specs: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def unchanged(self) -> int:
        """Number of entries with unchanged names."""
        return len(self.weights) - len({new for _, new in self.renamed})


def convert_weights(
    weights: Mapping[str, Tensor],
    kind: str | None = None,
    *,
    num_heads: int | None = None,
    spec: Spec | None = None,
) -> Converted:
    """Return the weights of a released checkpoint with vispe's names.

    Example:
        >>> slopes = {'blocks.0.attn.qkv.weight': torch.zeros(192, 64), 'blocks.0.attn.m': torch.ones(2, 1, 1)}
        >>> convert_weights(slopes).specs
        ('alibi2d(slopes=learned)',)

    Args:
        weights: a state dict; it is not changed.
        kind: one of `KINDS`; default: inferred from the names.
        num_heads: number of heads, if it cannot be inferred; the default corresponds to a head_dim of 64.
        spec: the encoding, if it is not one of the published variants.

    Raises:
        InputError: the weights match no kind or several kinds, or the entries do not belong to one ViT.
        OptionError: `kind` is not one of `KINDS`, or `spec` is a sum.
    """
    if kind is not None and kind not in KINDS:
        raise OptionError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.{did_you_mean(kind, KINDS)}")
    if any(re.search(r"(?:^|\.)pos_enc\.", name) for name in weights):
        raise InputError("The weights already have names of vispe (pos_enc). Load them without conversion.")
    kind = kind or kind_of(weights)
    facts, notes = facts_of(weights, kind, num_heads)
    candidates = list(KINDS[kind].specs(facts)) if spec is None else parse_spec(spec)
    if spec is not None and len(candidates) != 1:
        raise OptionError(
            f"spec must be a single encoding, got the sum {spec!r}. Pass the encoding of these weights."
        )
    result: Converted | None = None
    fits: list[str] = []
    problem: VispeError | None = None
    for candidate in candidates:
        try:
            renamed = _renamed(weights, facts, candidate, kind)
        except VispeError as error:
            problem = problem or error
            continue
        fits.append(_text(candidate, keep_abs=f"{facts.root}pos_embed" in weights))
        result = result or renamed
    if result is None:
        name, tensor = next(iter(facts.entries.items()))
        raise InputError(
            f"No published {kind} encoding of a model with width {facts.dim}, {counted(facts.depth, 'block')} and "
            f"{counted(facts.heads, 'head')} has these weights ({problem}), got {facts.root}{name} of shape "
            f"{tuple(tensor.shape)}. Pass the encoding as `spec`."
        )
    return Converted(result.weights, kind, tuple(fits), result.renamed, result.dropped, tuple(notes))


def _renamed(weights: Mapping[str, Tensor], facts: ModelFacts, spec: dict[str, Any], kind: str) -> Converted:
    """Return the weights renamed for the encoding `spec`.

    Raises:
        VispeError: the weights do not belong to this encoding.
    """
    state = dict(weights)
    supplied = {"dim": facts.dim, "num_heads": facts.heads, "depth": facts.depth}
    with torch.device("meta"):
        encoding = create_encoding(spec, **{k: v for k, v in supplied.items() if v is not None})
    pairs: list[tuple[str, str]] = []
    removed: list[str] = []
    for holder in _holders(encoding, facts):
        before = dict(state)
        prefix = f"{holder}pos_enc."
        encoding.rename_checkpoint_keys(state, holder, prefix)
        gone = sorted(name for name in before if name not in state)
        new = sorted(name for name in state if name not in before)
        _check(encoding, state, [name for name in new if name.startswith(prefix)], prefix)
        pairs += _paired(gone, new, holder, prefix, facts.root + next(iter(facts.entries)))
        removed += gone
    remaining = [name for name in (facts.root + short for short in facts.entries) if name in state]
    if remaining:
        raise InputError(f"{remaining[0]} belongs to no block of the encoding {_text(spec, False)}")
    old = {o for o, _ in pairs}
    return Converted(state, kind, (), tuple(pairs), tuple(name for name in removed if name not in old))


def _paired(
    gone: Sequence[str], new: Sequence[str], holder: str, prefix: str, shared: str
) -> list[tuple[str, str]]:
    """Return pairs (old, new) of names; if counts differ, entries were split or merged."""
    moved = {name: holder + name.removeprefix(prefix) for name in new if name.startswith(prefix)}
    pairs = [(old, name) for name, old in moved.items() if old in gone]
    gone = [name for name in gone if name not in {old for old, _ in pairs}]
    new = [name for name in new if name not in {name for _, name in pairs}]
    if new and not new[0].startswith(prefix):  # weights and biases of concatenated projections
        return pairs + [(a, b) for b in new for a in gone if a.rpartition(".")[2] == b.rpartition(".")[2]]
    return pairs + list(zip(gone if len(gone) == len(new) else [shared] * len(new), new, strict=True))


def _holders(encoding: Encoding, facts: ModelFacts) -> list[str]:
    """Return the prefixes of the modules with the encoding in a converted model."""
    if encoding.per_layer:
        return [f"{facts.root}blocks.{i}.attn." for i in range(facts.depth) if encoding.active(i)]
    return [facts.root]


def _check(encoding: Encoding, state: Mapping[str, Tensor], new: Sequence[str], prefix: str) -> None:
    """Raise `InputError` if names or shapes of the renamed entries are not those of the encoding."""
    expected = {prefix + name: tuple(value.shape) for name, value in encoding.state_dict().items()}
    if missing := sorted(set(expected) - set(new)):
        raise InputError(f"{missing[0]} has no weights")
    if unexpected := sorted(set(new) - set(expected)):
        raise InputError(f"{unexpected[0]} is not a weight of {encoding.name}")
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            raise InputError(f"{name} has shape {tuple(state[name].shape)}, not {shape}")


def _text(spec: dict[str, Any], keep_abs: bool) -> str:
    """Return a spec as text, for `pos_embed`."""
    return "learn+" * keep_abs + spec_to_text([spec])
