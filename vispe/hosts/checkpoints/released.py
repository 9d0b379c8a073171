"""Conversion of released checkpoints to the parameter names of vispe's encodings.

Entries are renamed by `Encoding.rename_checkpoint_keys`, which also lets converted models load such files directly.
This module infers what is not stored in a file: the encoding, from the names of its entries, and its options, from
their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vispe.encodings.base import Encoding
from vispe.encodings.creation import create_encoding
from vispe.encodings.registry import Spec, encoding_class, parse_spec
from vispe.encodings.spec import spec_to_text
from vispe.errors import InputError, OptionError, VispeError, counted, did_you_mean

_QKV = r"blocks\.(\d+)\.attn\.qkv\.weight"
_QK = r"blocks\.(\d+)\.attn\.qk\.weight"  # ConViT, with a separate v


@dataclass(frozen=True)
class _Facts:
    """Properties of a model, inferred from its weights."""

    root: str  # prefix of all names
    dim: int
    depth: int
    heads: int | None  # None if they cannot be inferred
    entries: dict[str, Tensor]  # the entries of the encoding, without the prefix


@dataclass(frozen=True)
class _Kind:
    """One kind of released checkpoints.

    Attributes:
        sign: pattern of the entry names of the positional encoding, after the prefix of the model.
        example: an entry name that matches the pattern.
        heads: function that infers the number of heads from entries and width; None if that is impossible.
        specs: function that returns the possible encodings, the most likely first.
    """

    sign: re.Pattern[str]
    example: str
    heads: Callable[[dict[str, Tensor], int], int | None]
    specs: Callable[[_Facts], Iterable[dict[str, Any]]]


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
    kind = kind or _recognised(weights)
    facts, notes = _facts(weights, kind, num_heads)
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


def _recognised(weights: Mapping[str, Tensor]) -> str:
    kinds = [kind for kind in KINDS if _signs(weights, kind)]
    if "twins" in kinds:  # CPVT has the same names, but in Twins the convolution is in a list
        nested = any(".proj.0." in name for name in weights)
        kinds.remove("cpvt" if nested else "twins")
    if len(kinds) > 1:
        raise InputError(
            f"The kind of checkpoint is ambiguous, got names of {' and '.join(kinds)}. Pass `kind`."
        )
    if not kinds:
        examples = "; ".join(f"{kind}: {k.example}" for kind, k in KINDS.items())
        names = ", ".join(list(weights)[:3])
        raise InputError(
            f"The weights are not those of a supported released checkpoint ({examples}), got the names {names}, ... "
            "Encodings without weights, such as constant slopes or axial RoPE, need no conversion."
        )
    return kinds[0]


def _signs(weights: Mapping[str, Tensor], kind: str) -> dict[str, tuple[str, Tensor]]:
    """Return the entries of the encoding by full name, each with its name after the prefix of the model."""
    pattern = re.compile(rf"(.*?)({KINDS[kind].sign.pattern})")
    roots = {"", *(match[1] for name in weights if (match := re.fullmatch(rf"(.*?)(?:{_QKV}|{_QK})", name)))}
    matches = {name: match for name in weights if (match := pattern.fullmatch(name))}
    return {name: (match[2], weights[name]) for name, match in matches.items() if match[1] in roots}


def _facts(weights: Mapping[str, Tensor], kind: str, num_heads: int | None) -> tuple[_Facts, list[str]]:
    """Return the properties of the model that can be inferred from its weights, and the assumptions made."""
    signs = _signs(weights, kind)
    if not signs:
        raise InputError(
            f"There are no weights of a {kind} encoding, which have names such as {KINDS[kind].example}. Load the file "
            "without conversion."
        )
    roots = {name.removesuffix(short) for name, (short, _) in signs.items()}
    blocks = [n for n in weights if re.fullmatch(r".*?blocks\.\d+\.\d+\..*", n)]
    if kind in ("twins", "cpvt") and blocks:
        raise InputError(
            f"The weights must be those of a ViT with one width, got a model with stages ({blocks[0]}). Load them into "
            "timm's twins models, which have the same names."
        )
    if len(roots) != 1 or not (qkv := _attention(weights, min(roots))):
        raise InputError(
            f"{next(iter(signs))} has no blocks of a ViT under the same prefix: names such as "
            "blocks.0.attn.qkv.weight are missing or have another prefix."
        )
    root = min(roots)
    entries = dict(signs.values())
    dim = min(qkv.values(), key=lambda t: t.shape[1]).shape[1]
    if sorted(qkv) != list(range(len(qkv))) or any(tuple(t.shape) != (3 * dim, dim) for t in qkv.values()):
        raise InputError(
            f"The blocks must form one ViT of width {dim}, got the blocks {sorted(qkv)}. The file may be a part of a "
            "checkpoint."
        )
    inferred = KINDS[kind].heads(entries, dim)
    notes = []
    if inferred is not None and num_heads not in (None, inferred):
        raise InputError(
            f"num_heads must be {inferred}, that of {next(iter(signs))}, got {num_heads}. Omit num_heads."
        )
    heads = inferred or num_heads
    if heads is None and kind not in ("twins", "cpvt"):
        if dim % 64:
            raise InputError(
                f"The number of heads cannot be inferred from the weights, got the width {dim}. Pass `num_heads`."
            )
        heads = dim // 64
        notes.append(f"{counted(heads, 'head')}, of 64 channels each, as in the published models")
    if kind == "convit":
        has_bias = any(name.endswith(".attn.qk.bias") for name in weights)
        notes.append(
            f"load it into a ViT with embed_dim={dim}, num_heads={heads}, qkv_bias={has_bias}, no_embed_class=True"
        )
    return _Facts(root, dim, len(qkv), heads, entries), notes


def _attention(weights: Mapping[str, Tensor], root: str) -> dict[int, Tensor]:
    """Return the projection (3 d, d) of queries, keys and values of each block."""
    projections = {}
    for name, t in weights.items():
        if t.ndim == 2 and (m := re.fullmatch(re.escape(root) + _QKV, name)):
            projections[int(m[1])] = t
        elif t.ndim == 2 and (m := re.fullmatch(re.escape(root) + _QK, name)):
            v = weights.get(name.replace(".attn.qk.", ".attn.v."))
            projections[int(m[1])] = t if v is None else torch.cat([t, v])
    return projections


def _renamed(weights: Mapping[str, Tensor], facts: _Facts, spec: dict[str, Any], kind: str) -> Converted:
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


def _holders(encoding: Encoding, facts: _Facts) -> list[str]:
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


def _slopes(entries: dict[str, Tensor], dim: int) -> int:
    del dim
    return next(iter(entries.values())).numel()


def _rpe_heads(entries: dict[str, Tensor], dim: int) -> int | None:
    """Return the number of heads of an iRPE model: from its tables, or the width divided by that of a vector."""
    name, table = next(iter(entries.items()))
    if table.shape[0] > 1:
        return table.shape[0]
    if table.ndim < 3:
        return None
    width = table.shape[2] if ".rpe_v." in name else table.shape[1]
    return dim // width if width and dim % width == 0 else None


def _rpe_specs(facts: _Facts) -> Iterable[dict[str, Any]]:
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


def _peg_specs(facts: _Facts) -> Iterable[dict[str, Any]]:
    kernels = [t for t in facts.entries.values() if t.ndim == 4]
    if kernels:
        yield {"name": "peg", "first": len(kernels), "kernel_size": kernels[0].shape[-1]}


def _gpsa_specs(facts: _Facts) -> Iterable[dict[str, Any]]:
    layers = sorted(
        {int(match[1]) for name in facts.entries if (match := re.match(r"blocks\.(\d+)\.", name))}
    )
    yield {"name": "gpsa", "layers": layers, "late_prefix": True}


def _unknown_heads(entries: dict[str, Tensor], dim: int) -> None:
    del entries, dim


_PEG = r"pos_block\.(\d+)\.proj\.(?:0\.)?(?:weight|bias)"
KINDS: dict[str, _Kind] = {
    "dino-saw": _Kind(
        re.compile(r"blocks\.\d+\.attn\.m"),
        "blocks.0.attn.m",
        _slopes,
        lambda facts: [{"name": "alibi2d", "slopes": "learned"}],
    ),
    "rope-vit": _Kind(
        re.compile(r"(?:rope\.)?freqs"), "freqs", _unknown_heads, lambda facts: [{"name": "rope_mixed"}]
    ),
    "deit-irpe": _Kind(
        re.compile(r"blocks\.\d+\.attn\.rpe_[qkv]\..*"),
        "blocks.0.attn.rpe_k.lookup_table_weight",
        _rpe_heads,
        _rpe_specs,
    ),
    "convit": _Kind(
        re.compile(r"blocks\.\d+\.attn\.(?:gating_param|pos_proj\.(?:weight|bias))"),
        "blocks.0.attn.gating_param",
        lambda entries, dim: next(t.numel() for name, t in entries.items() if name.endswith("gating_param")),
        _gpsa_specs,
    ),
    "cpvt": _Kind(re.compile(_PEG), "pos_block.0.proj.weight", _unknown_heads, _peg_specs),
    "twins": _Kind(re.compile(_PEG), "pos_block.0.proj.0.weight", _unknown_heads, _peg_specs),
}
