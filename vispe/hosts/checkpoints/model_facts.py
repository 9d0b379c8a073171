"""Properties of a model inferred from its released weights: kind, width, depth and number of heads."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vispe.errors import InputError, counted
from vispe.hosts.checkpoints.kinds import KINDS, ModelFacts

_QKV = r"blocks\.(\d+)\.attn\.qkv\.weight"
_QK = r"blocks\.(\d+)\.attn\.qk\.weight"  # ConViT, with a separate v


def kind_of(weights: Mapping[str, Tensor]) -> str:
    """Return the kind of a released checkpoint.

    Raises:
        InputError: the weights match no kind or several kinds.
    """
    kinds = [kind for kind in KINDS if _encoding_entries(weights, kind)]
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


def facts_of(weights: Mapping[str, Tensor], kind: str, num_heads: int | None) -> tuple[ModelFacts, list[str]]:
    """Return the properties of the model that can be inferred from its weights, and the assumptions made.

    Raises:
        InputError: the entries do not belong to one ViT of this kind.
    """
    named = _encoding_entries(weights, kind)
    if not named:
        raise InputError(
            f"There are no weights of a {kind} encoding, which have names such as {KINDS[kind].example}. Load the file "
            "without conversion."
        )
    roots = {name.removesuffix(short) for name, (short, _) in named.items()}
    blocks = [n for n in weights if re.fullmatch(r".*?blocks\.\d+\.\d+\..*", n)]
    if kind in ("twins", "cpvt") and blocks:
        raise InputError(
            f"The weights must be those of a ViT with one width, got a model with stages ({blocks[0]}). Load them into "
            "timm's twins models, which have the same names."
        )
    if len(roots) != 1 or not (qkv := _attention(weights, min(roots))):
        raise InputError(
            f"{next(iter(named))} has no blocks of a ViT under the same prefix: names such as "
            "blocks.0.attn.qkv.weight are missing or have another prefix."
        )
    root = min(roots)
    entries = dict(named.values())
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
            f"num_heads must be {inferred}, that of {next(iter(named))}, got {num_heads}. Omit num_heads."
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
    return ModelFacts(root, dim, len(qkv), heads, entries), notes


def _encoding_entries(weights: Mapping[str, Tensor], kind: str) -> dict[str, tuple[str, Tensor]]:
    """Return the entries of the encoding by full name, each with its name after the prefix of the model."""
    pattern = re.compile(rf"(.*?)({KINDS[kind].pattern.pattern})")
    roots = {"", *(match[1] for name in weights if (match := re.fullmatch(rf"(.*?)(?:{_QKV}|{_QK})", name)))}
    matches = {name: match for name in weights if (match := pattern.fullmatch(name))}
    return {name: (match[2], weights[name]) for name, match in matches.items() if match[1] in roots}


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
