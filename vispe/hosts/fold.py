"""Merging of learned bases of rotary encodings (`basis='head'`) into the projections of queries and keys."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vispe.encodings.attention_layer import Attention
from vispe.encodings.base import Biased, Encoding, Rotary
from vispe.encodings.creation import create_encoding
from vispe.encodings.parts.rotary.head_basis import fold_rows
from vispe.encodings.parts.rotary.rope.rope_base import RopeBase
from vispe.encodings.registry import encoding_class
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost, counted
from vispe.hosts.common.conversion.convert import converted_models
from vispe.hosts.convert import convert
from vispe.hosts.unwrap import unwrap

M = TypeVar("M", bound=nn.Module)

# converted attention layers in which queries and keys are the output of a linear layer, head by head
SUPPORTED = {
    "Attention",
    "VispeAttention",
    "VispeEvaAttention",
    "VispeAttentionRope",
    "VispeMultiheadAttention",
    "VispeClipAttention",
    "ClipAttention",
    "InternAttention",
    "GridAttention",
    "VideoMaeAttention",
    "JepaAttention",
    "PackedAttention",
    "SamAttention",
    "SwinAttention",
    "ShiftedAttention",
    "GlobalAttention",
    "VolumeWindowAttention",
    "HubSamAttention",
    "HubSam3Attention",
    "VitDetAttention",
    "HubSwinAttention",
}
DECOMPOSED = ("use_rel_pos", "use_relative_position_embeddings")  # biases that read queries, where in use
NORMS = ("q_norm", "k_norm", "ln_q", "ln_k")
GATED = {"cable", "distance_bank", "fox", "pape"}  # read the input of attention, not queries and keys


class _Rows(NamedTuple):
    """Rows of a weight or bias that are multiplied by the matrices of queries or keys."""

    tensor: Tensor
    rows: slice
    matrices: Tensor


def fold(model: M) -> M:
    """Merge the learned bases of a model (`basis='head'`) into the projections of queries and keys, in place.

    Outputs are unchanged up to rounding. The encodings then have `basis='none'`, and the cost of the model without a
    basis. All checks run before the first change.

    Example:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2, pos_embed='rope_axial(basis=head)')
        >>> fold(model).vispe.spec
        [{'name': 'rope_axial'}]

    Args:
        model: a converted model, or a module with `vispe.Attention` layers.

    Returns:
        the same model.

    Raises:
        OptionError: no encoding has a learned basis.
        UnsupportedCombination: queries and keys are normalised between the projection and the basis, another
            encoding reads queries or keys, or query heads share key heads.
        UnsupportedHost: the projections of a layer are not plain linear layers.
    """
    wrapper, model = model, unwrap(model, "fold")
    layers = list(_layers(model))
    if not layers:
        raise OptionError(
            f"vispe.fold: no encoding has a learned basis, got a {type(model).__name__}. Convert the model to one with "
            "basis='head', such as 'rope_axial(basis=head)', and train it."
        )
    shared = [e for _, converted in converted_models(model) for e in converted._vispe_shared()]
    plan = [
        rows
        for path, layer, part in layers
        for rows in _rows(path, layer, part, [*layer.pos_enc.parts(), *shared])
    ]
    if len({(id(p.tensor), p.rows.start) for p in plan}) < len(plan):
        raise UnsupportedHost(
            "vispe.fold: attention layers share their projections, but have separate bases."
        )
    with torch.no_grad():
        for tensor, rows, matrices in plan:
            tensor[rows] = fold_rows(tensor[rows], matrices)
    for _, converted in converted_models(model):
        _convert_without_basis(converted)
    for _, layer, _ in layers:
        if isinstance(layer, Attention):
            layer.pos_enc = _without_basis(layer.pos_enc)
    return wrapper


def _layers(model: nn.Module) -> Iterator[tuple[str, Any, RopeBase]]:
    """Yield path, attention layer and encoding of every learned basis."""
    for path, module in model.named_modules():
        encoding = getattr(module, "pos_enc", None)
        for part in encoding.parts() if isinstance(encoding, Encoding) else ():
            if isinstance(part, RopeBase) and part.basis == "head":
                yield path, module, part


def _reads_queries(encoding: Encoding) -> bool:
    inside = isinstance(encoding, Biased | Rotary)
    return inside and "content" in encoding.encodes and encoding.name not in GATED


def _rows(path: str, layer: Any, encoding: RopeBase, parts: Sequence[Encoding]) -> list[_Rows]:
    """Return the rows of the projections of a layer whose attention has the encodings `parts`."""
    classes = {c.__name__ for c in type(layer).__mro__ if c.__module__.startswith("vispe.")}
    if not classes & SUPPORTED:
        raise UnsupportedHost(
            f"vispe.fold: {path} has no separate projections of queries and keys, got {type(layer).__name__}. Use the "
            "model without folding."
        )
    readers = [e.name for e in parts if _reads_queries(e)]
    site = getattr(layer, "vispe_grid", None)
    if site is not None and site.keep and any(getattr(layer, name, False) for name in DECOMPOSED):
        readers.append("the relative bias of the model")
    if readers:
        raise UnsupportedCombination(
            f"vispe.fold: {path} has {', '.join(readers)}, which would read other queries and keys. Use the model "
            "without folding."
        )
    normalised = [n for n in NORMS if not isinstance(getattr(layer, n, None), nn.Identity | None)]
    if normalised or getattr(layer, "logit_scale", None) is not None:
        raise UnsupportedCombination(
            f"vispe.fold: {path} normalises queries and keys between the projection and the basis, got "
            f"{', '.join(normalised) or 'logit_scale'}. Use the model without folding."
        )
    with torch.no_grad():
        of_queries, of_keys = encoding.head_basis.matrices(torch.float64)
    plan: list[_Rows] = []
    inner = of_queries.shape[0] * of_queries.shape[1]
    for index, matrices in enumerate((of_queries, of_keys)):
        for tensor, fused in _tensors(path, layer, index):
            if len(tensor) != (3 * inner if fused else inner):
                raise UnsupportedCombination(
                    f"vispe.fold: {path} needs {counted(inner, 'row')} of the projection per basis, got {len(tensor)}"
                    f"{' for queries, keys and values' if fused else ''}: key heads are shared by query heads. Use the "
                    "model without folding."
                )
            start = index * inner if fused else 0
            plan.append(_Rows(tensor, slice(start, start + inner), matrices))
    return plan


def _tensors(path: str, layer: Any, index: int) -> Iterator[tuple[Tensor, bool]]:
    """Yield weight and bias of queries (index 0) or keys (1), and whether each contains q, k and v together."""
    if getattr(layer, "in_proj_weight", None) is not None:
        linears: list[tuple[Any, bool]] = []
        yield layer.in_proj_weight, True
        if layer.in_proj_bias is not None:
            yield layer.in_proj_bias, True
    elif getattr(layer, "qkv", None) is not None:
        linears = [(layer.qkv, True)]
    else:
        pair = ("q_proj", "k_proj") if hasattr(layer, "q_proj") else ("query", "key")
        linears = [(getattr(layer, pair[index], None), False)]
    for linear, fused in linears:
        if type(linear) is not nn.Linear:
            raise UnsupportedHost(
                f"vispe.fold: {path} needs projections of class torch.nn.Linear, got {type(linear).__name__}. Merge "
                "adapters and remove parametrizations and quantisation first."
            )
        yield linear.weight, fused
        if linear.bias is not None:
            yield linear.bias, fused
    # EVA-02 stores the biases outside of its projection
    bias = getattr(layer, ("q_bias", "k_bias")[index], None)
    if isinstance(bias, Tensor):
        yield bias, False


def _without_basis(encoding: Any) -> Encoding:
    """Return an equal encoding without a basis, with the same weights."""
    first = next(encoding.parameters())
    terms = [_plain(part.config) for part in encoding.parts()]
    folded = create_encoding(terms if len(terms) > 1 else terms[0]).to(first.device, first.dtype)
    for old, new in zip(encoding.parts(), folded.parts(), strict=True):
        _copy(old, new)
    return folded


def _plain(term: dict[str, Any]) -> dict[str, Any]:
    """Return the term of an encoding without its basis."""
    if not issubclass(encoding_class(term["name"]), RopeBase):
        return term
    return {key: value for key, value in term.items() if key not in ("basis", "basis_key")}


def _convert_without_basis(model: Any) -> None:
    """Convert a converted model again, to its encodings without a basis, with the same weights."""
    state, before = model.vispe, _parts(model)
    terms = [_plain(term) for term in state.spec]
    if terms == state.spec:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first conversion has already issued these warnings
        convert(model, terms, keep_abs=state.keep_abs)
    for key, part in _parts(model).items():
        if key in before:
            _copy(before[key], part)


def _parts(model: Any) -> dict[tuple[str, str, int], Encoding]:
    """Return all encodings of a converted model, by path, name and number."""
    encodings: dict[tuple[str, str, int], Encoding] = {}
    for path, encoding in model._vispe_paths():
        for part in encoding.parts():
            number = sum(key[:2] == (path, part.name) for key in encodings)
            encodings[path, part.name, number] = part
    return encodings


def _copy(old: Encoding, new: Encoding) -> None:
    """Copy weights, training mode and progress of an encoding."""
    weights = {k: v for k, v in old.state_dict().items() if not k.startswith("head_basis.")}
    new.load_state_dict(weights)
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(old.get_parameter(name).requires_grad)
    new.train(old.training)
    new.progress = old.progress
