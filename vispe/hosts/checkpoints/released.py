"""Checkpoints that authors have released, with the names that vispe gives their positional encodings.

What is renamed is decided by `Encoding.adopt`, which also lets converted models load such files directly. Here is
only what a file lacks: which encoding it holds, recognised by its names, and with which options, found by its sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vispe.encodings.base import Encoding
from vispe.encodings.registry import Spec, create_encoding, encoding_class, parse_spec
from vispe.encodings.spec import as_text
from vispe.errors import InputError, OptionError, VispeError, did_you_mean

_QKV = r"blocks\.(\d+)\.attn\.qkv\.weight"
_QK = r"blocks\.(\d+)\.attn\.qk\.weight"  # ConViT: beside v


@dataclass(frozen=True)
class _Facts:
    """What the weights say about their model."""

    root: str  # prefix of all names
    dim: int
    depth: int
    heads: int | None  # None when nothing but a guess says it
    found: dict[str, Tensor]  # the entries by which the kind was recognised, without the prefix


@dataclass(frozen=True)
class _Kind:
    """One kind of released checkpoints.

    Attributes:
        sign: what names of its positional encoding look like, after the prefix of the model.
        example: such a name.
        heads: the number of heads, as far as the entries tell.
        specs: the encodings that the entries may belong to, the likeliest first.
    """

    sign: re.Pattern[str]
    example: str
    heads: Callable[[dict[str, Tensor], int], int | None]
    specs: Callable[[_Facts], Iterable[dict[str, Any]]]


@dataclass(frozen=True)
class Converted:
    """Weights with vispe's names, and what was done.

    Attributes:
        weights: all tensors, those that were not renamed included.
        kind: which kind of checkpoint it was.
        specs: encodings that hold these weights, ready for `pos_embed`; more than one where sizes agree.
        renamed: (old, new) name of every entry that was renamed; one may have become several, or several one.
        dropped: names of entries that are computed and not kept.
        notes: what was assumed.
    """

    weights: dict[str, Tensor]
    kind: str
    specs: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def kept(self) -> int:
        """How many entries have the name that they had."""
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
        weights: a state dict; it is left as it is.
        kind: one of `KINDS`; recognised by the names by default.
        num_heads: heads of the model, where the weights do not tell; one per 64 channels by default.
        spec: the encoding, where it is none that was published.

    Raises:
        InputError: no kind, or more than one, is recognised, or the entries do not fit together.
        OptionError: `kind` is none of `KINDS`.
    """
    if kind is not None and kind not in KINDS:
        raise OptionError(
            f"There is no kind {kind!r}.{did_you_mean(kind, KINDS)} Kinds are {', '.join(KINDS)}."
        )
    if any(re.search(r"(?:^|\.)pos_enc\.", name) for name in weights):
        raise InputError("These weights have names of vispe (pos_enc) already; they load as they are.")
    kind = kind or _recognised(weights)
    facts, notes = _facts(weights, kind, num_heads)
    candidates = list(KINDS[kind].specs(facts)) if spec is None else parse_spec(spec)
    if spec is not None and len(candidates) != 1:
        raise OptionError(f"One encoding has such weights, but spec={spec!r} is a sum; give that one alone.")
    done: Converted | None = None
    fits: list[str] = []
    problem: VispeError | None = None
    for candidate in candidates:
        try:
            renamed = _renamed(weights, facts, candidate, kind)
        except VispeError as error:
            problem = problem or error
            continue
        fits.append(_text(candidate, keep_abs=f"{facts.root}pos_embed" in weights))
        done = done or renamed
    if done is None:
        name, tensor = next(iter(facts.found.items()))
        raise InputError(
            f"{facts.root}{name} of shape {tuple(tensor.shape)} fits no published {kind} encoding of a model with "
            f"width {facts.dim}, {facts.depth} blocks and {facts.heads} heads ({problem}); say which by `spec`."
        )
    return Converted(done.weights, kind, tuple(fits), done.renamed, done.dropped, tuple(notes))


def _recognised(weights: Mapping[str, Tensor]) -> str:
    kinds = [kind for kind in KINDS if _signs(weights, kind)]
    if "twins" in kinds:  # CPVT has the same names; Twins keeps its convolution in a list
        nested = any(".proj.0." in name for name in weights)
        kinds.remove("cpvt" if nested else "twins")
    if len(kinds) > 1:
        raise InputError(f"The weights have names of {' and '.join(kinds)}; say which by `kind` (--from).")
    if not kinds:
        known = "; ".join(f"{kind}: {k.example}" for kind, k in KINDS.items())
        shown = ", ".join(list(weights)[:3])
        raise InputError(
            f"No released checkpoint that is known has names as {shown}, ... ({known}). Encodings without weights, "
            "constant slopes and axial rotation for two, need no converting."
        )
    return kinds[0]


def _signs(weights: Mapping[str, Tensor], kind: str) -> dict[str, tuple[str, Tensor]]:
    """Return the entries that belong to the encoding, by full name, each with its name after the prefix."""
    pattern = re.compile(rf"(.*?)({KINDS[kind].sign.pattern})")
    roots = {"", *(match[1] for name in weights if (match := re.fullmatch(rf"(.*?)(?:{_QKV}|{_QK})", name)))}
    matches = {name: match for name in weights if (match := pattern.fullmatch(name))}
    return {name: (match[2], weights[name]) for name, match in matches.items() if match[1] in roots}


def _facts(weights: Mapping[str, Tensor], kind: str, num_heads: int | None) -> tuple[_Facts, list[str]]:
    """Return what the weights say, and what had to be assumed."""
    signs = _signs(weights, kind)
    if not signs:
        raise InputError(
            f"There are no weights of a {kind} encoding, which are named as {KINDS[kind].example}; without them there "
            "is nothing to rename, and the file loads as it is."
        )
    roots = {name.removesuffix(short) for name, (short, _) in signs.items()}
    blocks = [n for n in weights if re.fullmatch(r".*?blocks\.\d+\.\d+\..*", n)]
    if kind in ("twins", "cpvt") and blocks:
        raise InputError(
            f"This is a model in stages ({blocks[0]}), as timm's twins models, which have these names and load them; "
            "vispe puts encodings into models of one width."
        )
    if len(roots) != 1 or not (qkv := _attention(weights, min(roots))):
        raise InputError(
            f"{next(iter(signs))} is not beside the blocks of one ViT: names as blocks.0.attn.qkv.weight are missing "
            "or differ in what is before them."
        )
    root = min(roots)
    found = dict(signs.values())
    dim = min(qkv.values(), key=lambda t: t.shape[1]).shape[1]
    if sorted(qkv) != list(range(len(qkv))) or any(tuple(t.shape) != (3 * dim, dim) for t in qkv.values()):
        raise InputError(
            f"The blocks {sorted(qkv)} do not form one ViT of width {dim}; the file may be a part of a checkpoint."
        )
    known = KINDS[kind].heads(found, dim)
    notes = []
    if known is not None and num_heads not in (None, known):
        raise InputError(
            f"num_heads={num_heads} was given, but {next(iter(signs))} is of a model with {known} heads."
        )
    heads = known or num_heads
    if heads is None and kind not in ("twins", "cpvt"):
        if dim % 64:
            raise InputError(f"The weights do not tell the number of heads of width {dim}; give `num_heads`.")
        heads = dim // 64
        notes.append(f"{heads} heads, of 64 channels each, as in the published models")
    if kind == "convit":
        has_bias = any(name.endswith(".attn.qk.bias") for name in weights)
        notes.append(
            f"a ViT that it loads into has embed_dim={dim}, num_heads={heads}, qkv_bias={has_bias}, no_embed_class=True"
        )
    return _Facts(root, dim, len(qkv), heads, found), notes


def _attention(weights: Mapping[str, Tensor], root: str) -> dict[int, Tensor]:
    """Return the projections of the attention layers by block."""
    found = {}
    for name, t in weights.items():
        if t.ndim == 2 and (m := re.fullmatch(re.escape(root) + _QKV, name)):
            found[int(m[1])] = t
        elif t.ndim == 2 and (m := re.fullmatch(re.escape(root) + _QK, name)):
            v = weights.get(name.replace(".attn.qk.", ".attn.v."))
            found[int(m[1])] = t if v is None else torch.cat([t, v])
    return found


def _renamed(weights: Mapping[str, Tensor], facts: _Facts, spec: dict[str, Any], kind: str) -> Converted:
    """Return the weights as the encoding `spec` adopts them.

    Raises:
        VispeError: they are not its weights.
    """
    state = dict(weights)
    supplied = {"dim": facts.dim, "num_heads": facts.heads, "depth": facts.depth}
    with torch.device("meta"):
        encoding = create_encoding(spec, **{k: v for k, v in supplied.items() if v is not None})
    pairs: list[tuple[str, str]] = []
    removed: list[str] = []
    for beside in _places(encoding, facts):
        before = dict(state)
        own = f"{beside}pos_enc."
        encoding.adopt(state, beside, own)
        gone = sorted(name for name in before if name not in state)
        new = sorted(name for name in state if name not in before)
        _check(encoding, state, [name for name in new if name.startswith(own)], own)
        pairs += _paired(gone, new, beside, own, facts.root + next(iter(facts.found)))
        removed += gone
    left = [name for name in (facts.root + short for short in facts.found) if name in state]
    if left:
        raise InputError(f"{left[0]} belongs to no block of the encoding {_text(spec, False)}")
    old = {o for o, _ in pairs}
    return Converted(state, kind, (), tuple(pairs), tuple(name for name in removed if name not in old))


def _paired(
    gone: Sequence[str], new: Sequence[str], beside: str, own: str, shared: str
) -> list[tuple[str, str]]:
    """Return which entry became which; where counts differ one became all of them, or all became one."""
    kept = {name: beside + name.removeprefix(own) for name in new if name.startswith(own)}
    pairs = [(old, name) for name, old in kept.items() if old in gone]
    gone = [name for name in gone if name not in {old for old, _ in pairs}]
    new = [name for name in new if name not in {name for _, name in pairs}]
    if new and not new[0].startswith(own):  # weights and biases of projections that were joined
        return pairs + [(a, b) for b in new for a in gone if a.rpartition(".")[2] == b.rpartition(".")[2]]
    return pairs + list(zip(gone if len(gone) == len(new) else [shared] * len(new), new, strict=True))


def _places(encoding: Encoding, facts: _Facts) -> list[str]:
    """Return the prefixes of the modules that hold the encoding in a converted model."""
    if encoding.per_layer:
        return [f"{facts.root}blocks.{i}.attn." for i in range(facts.depth) if encoding.active(i)]
    return [facts.root]


def _check(encoding: Encoding, state: Mapping[str, Tensor], new: Sequence[str], own: str) -> None:
    """Raise when what was adopted is not what the encoding holds."""
    wanted = {own + name: tuple(value.shape) for name, value in encoding.state_dict().items()}
    if missing := sorted(set(wanted) - set(new)):
        raise InputError(f"{missing[0]} has no weights")
    if more := sorted(set(new) - set(wanted)):
        raise InputError(f"{more[0]} is no weight of {encoding.name}")
    for name, shape in wanted.items():
        if tuple(state[name].shape) != shape:
            raise InputError(f"{name} has shape {tuple(state[name].shape)}, not {shape}")


def _text(spec: dict[str, Any], keep_abs: bool) -> str:
    """Return a spec as it is written for `pos_embed`."""
    return "learn+" * keep_abs + as_text([spec])


def _slopes(found: dict[str, Tensor], dim: int) -> int:
    del dim
    return next(iter(found.values())).numel()


def _rpe_heads(found: dict[str, Tensor], dim: int) -> int | None:
    """Return the heads of an iRPE model: those of a table per head, or as many as widths of a vector fit."""
    name, table = next(iter(found.items()))
    if table.shape[0] > 1:
        return table.shape[0]
    if table.ndim < 3:
        return None
    width = table.shape[2] if ".rpe_v." in name else table.shape[1]
    return dim // width if width and dim % width == 0 else None


def _rpe_specs(facts: _Facts) -> Iterable[dict[str, Any]]:
    """Yield what the tables of an iRPE model may be: the published rules, on the projections that have tables."""
    letters = "".join(c for c in "qkv" if any(f".rpe_{c}." in name for name in facts.found))
    name, table = next(iter(facts.found.items()))
    mode = "bias" if name.endswith("_bias") else "contextual"
    seen: list[dict[str, Any]] = []
    for preset in encoding_class("irpe").presets.values():
        spec = {"name": "irpe", **preset, "on": letters, "mode": mode, "shared": table.shape[0] == 1}
        if spec not in seen:
            seen.append(spec)
            yield spec


def _peg_specs(facts: _Facts) -> Iterable[dict[str, Any]]:
    kernels = [t for t in facts.found.values() if t.ndim == 4]
    if kernels:
        yield {"name": "peg", "first": len(kernels), "kernel_size": kernels[0].shape[-1]}


def _gpsa_specs(facts: _Facts) -> Iterable[dict[str, Any]]:
    layers = sorted({int(match[1]) for name in facts.found if (match := re.match(r"blocks\.(\d+)\.", name))})
    yield {"name": "gpsa", "layers": layers, "late_prefix": True}


def _untold(found: dict[str, Tensor], dim: int) -> None:
    del found, dim


_PEG = r"pos_block\.(\d+)\.proj\.(?:0\.)?(?:weight|bias)"
KINDS: dict[str, _Kind] = {
    "dino-saw": _Kind(
        re.compile(r"blocks\.\d+\.attn\.m"),
        "blocks.0.attn.m",
        _slopes,
        lambda facts: [{"name": "alibi2d", "slopes": "learned"}],
    ),
    "rope-vit": _Kind(
        re.compile(r"(?:rope\.)?freqs"), "freqs", _untold, lambda facts: [{"name": "rope_mixed"}]
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
        lambda found, dim: next(t.numel() for name, t in found.items() if name.endswith("gating_param")),
        _gpsa_specs,
    ),
    "cpvt": _Kind(re.compile(_PEG), "pos_block.0.proj.weight", _untold, _peg_specs),
    "twins": _Kind(re.compile(_PEG), "pos_block.0.proj.0.weight", _untold, _peg_specs),
}
