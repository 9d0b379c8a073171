"""Conversion of the vision towers of Hugging Face models.

The supported towers are those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which pack images into one sequence;
those of CLIP, SigLIP and InternVL, used in LLaVA, LLaVA-OneVision and InternVL; vision models such as ViT,
DINOv2 and DINOv3; and towers built by timm, which are converted as any timm model. The steps are in
`vispe.hosts.common.convert`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vispe.encodings.attention_layer import attend
from vispe.encodings.base import Encoding
from vispe.encodings.parts.preparation import prepare
from vispe.encodings.registry import Spec, encoding_class, parse_spec
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost
from vispe.grid import Grid
from vispe.hosts.common import convert
from vispe.hosts.common.checks import check_outside, refuse_patched
from vispe.hosts.common.equivalent_models import advice
from vispe.hosts.common.host_family import HostFamily, Layers
from vispe.hosts.common.host_spec import HostSpec, parse_host_spec
from vispe.hosts.timm.convert import convert_timm, describe_timm, restore_timm
from vispe.hosts.transformers.subclasses import converted_subclass
from vispe.hosts.transformers.vision.families import (
    FAMILIES,
    VIDEO_KINDS,
    attentions,
    family_of,
    family_of_class,
    heads_of,
    prefix_of,
    reference_of,
    rope_spec,
    stock_type,
    width_of,
)
from vispe.hosts.transformers.vision.position_embeddings import (
    attach_tables,
    detach_tables,
    has_tables,
    never_loaded,
)
from vispe.hosts.transformers.vision.tower import SWAPS, swapped
from vispe.hosts.windows import families

# attribute names of towers
_ATTRIBUTES = (
    "model",
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "timm_model",
    "_backbone",
    "backbone",
)


class _Tower(HostFamily):
    """The towers of transformers; `family_of` returns the paths of their modules."""

    title = "transformers "
    noun = "tower"
    builder = "from_pretrained"
    unfused = "the attention implementation is eager"
    always_inside = True

    def converted_class(self, stock: type[Any]) -> type[Any]:
        family = family_of_class(stock)
        _check_class("The tower", stock, family.path, family.tower)
        return converted_subclass(stock, SWAPS[family.kind][0])

    stock_type = staticmethod(stock_type)
    attentions = staticmethod(attentions)

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any]]]:
        for path, module, mixin in swapped(model):
            yield path, module, converted_subclass(stock_type(module), mixin)

    def facts(self, model: Any, layers: Layers) -> dict[str, Any]:
        heads, width = heads_of(layers[0][2])
        return {
            "dim": width_of(layers[0][2]),
            "num_heads": heads,
            "head_dim": width,
            "depth": len(layers),
            "grid": reference_of(model),
        }

    def grid_text(self, model: Any) -> str:
        trained = model.vispe.reference or "any"
        return f"of each image, trained at {trained}, {prefix_of(model)} prefix tokens"

    has_absolute_table = staticmethod(has_tables)
    detach_table = staticmethod(detach_tables)
    attach_table = staticmethod(attach_tables)

    def has_rope(self, model: Any) -> bool:
        return family_of(model).rope

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        family = family_of(model)
        for _, path, module in attentions(model):
            _check_class(path, stock_type(module), family.path, family.attention)
            refuse_patched(module, path, self.patchable)
        for term in terms:
            _check_kind(term, reference_of(model), stock)

    def check_parts(self, model: Any, parts: Sequence[Encoding], layers: Layers) -> None:
        """Run the encodings once, so that those that need inputs the tower does not supply raise their errors."""
        heads, width = heads_of(layers[0][2])
        like = next(model.parameters())
        shape = (2, 2, 4) if family_of(model).kind in VIDEO_KINDS else (2, 4)
        pos = Grid(shape, prefix=prefix_of(model)).positions(like.device)
        x = like.new_zeros(1, pos.tokens, width_of(layers[0][2]))
        q = like.new_zeros(1, heads, pos.tokens, width)
        devices = [like.device] if like.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            pos = prepare(parts, pos)
            attend(q, q, q, parts, pos, 0, x, backend="reference")

    def check_detached(self, model: Any, table: Any) -> None:
        """Raise an error if the table has no values, as the weights were saved without it."""
        if never_loaded(model, table):
            raise UnsupportedCombination(
                f"This {stock_type(model).__name__} was saved without its absolute table, which cannot be restored. "
                "Load the stock model that was converted."
            )


TOWER = _Tower()


def vision_tower_of(model: nn.Module) -> nn.Module:
    """Return the module of a transformers model that is converted: its vision tower, or a timm model.

    Args:
        model: a vision-language model, with or without its head, or a tower.

    Raises:
        UnsupportedHost: there is no vision tower in it, or its class is not supported.
    """
    tower: Any = model
    while family_of(tower) is None and families.family_of(tower) is None:
        # models with heads store the attribute name of the model inside
        names = (*_ATTRIBUTES, getattr(tower, "base_model_prefix", "") or "model")
        parts = (getattr(tower, name, None) for name in names)
        inner = next((part for part in parts if isinstance(part, nn.Module)), None)
        if inner is None:
            break
        tower = inner
    if families.family_of(tower):
        return tower
    if family_of(tower) is None and not any(c.__module__.startswith("timm.") for c in type(tower).__mro__):
        supported = ", ".join(dict.fromkeys(f.tower for f in FAMILIES))
        inside = "" if tower is model else f" with a {type(tower).__name__} inside"
        raise UnsupportedHost(
            f"vispe.convert: no supported vision tower in the model, got a {type(model).__name__}{inside}. Supported "
            f"are {supported}, and those of timm. {advice(tower) or advice(model) or ''}".rstrip()
        )
    return tower


def convert_vision(
    model: nn.Module,
    spec: Spec,
    *,
    keep_abs: bool | None = None,
    keep_rope: bool | None = None,
    **options: Any,
) -> None:
    """Convert the vision tower of a transformers model in place, or replace the encoding of a converted one.

    The encoding acts inside attention, separately for each image: each patch has its row and column, independent of the
    order and the windows of the tower, and each frame of a video has separate positions.

    Args:
        model: a vision-language model, or its tower.
        spec: an encoding, or a sum of encodings and of the keywords for the tower's own position information.
        keep_abs: whether the tower's own absolute table stays in use. None means True if the tower has a
            table, and False in towers of timm.
        keep_rope: whether the tower's own rotary embedding stays in use, as `keep_abs`.
        **options: options of the encoding.

    Raises:
        UnsupportedHost: there is no supported tower.
        UnsupportedCombination: the tower does not support the encoding, or has no table or RoPE that could
            stay in use.
        UnknownEncoding, OptionError: the spec is not valid.
    """
    tower = vision_tower_of(model)
    if family_of(tower) is None:
        host_spec = parse_host_spec(spec, options, bool(keep_abs), bool(keep_rope))
        windowed = families.family_of(tower)
        convert.convert_model(tower, windowed, host_spec) if windowed else convert_timm(tower, host_spec)
    else:
        convert.convert_model(tower, TOWER, parse_host_spec(spec, options, keep_abs, keep_rope))


def convert_as_named(part: nn.Module, entry: dict[str, Any]) -> int:
    """Convert a tower to an entry of `vispe.hosts.transformers.saving.config_record`; return the number of weights.

    Args:
        part: the tower, or the module around a tower of timm.
        entry: the entry of its configuration.
    """
    tower = vision_tower_of(part)
    spec = HostSpec(parse_spec(entry["encoding"]), entry["keep_abs"], entry["keep_rope"])
    if windowed := families.family_of(tower):
        convert.convert_model(tower, windowed, spec)
    elif family_of(tower) is None:
        convert_timm(tower, spec)
    else:
        convert.convert_model(tower, TOWER, spec)
    return sum(p.numel() for name, p in tower.named_parameters() if "pos_enc." in name)


def restore_vision(model: nn.Module) -> None:
    """Restore the classes, absolute table and rotary embedding of the vision tower of a model, in place.

    Raises:
        UnsupportedHost: there is no supported tower, or the tower is not converted.
    """
    tower = vision_tower_of(model)
    if windowed := families.family_of(tower):
        convert.restore_model(tower, windowed)
    elif family_of(tower) is None:
        restore_timm(tower)
    else:
        convert.restore_model(tower, TOWER)


def describe_vision(model: nn.Module) -> str:
    """Return a summary of the conversion of the vision tower of a model."""
    tower = vision_tower_of(model)
    converted = [part for _, part in convert.converted_models(tower)]
    if not converted:
        family = family_of(tower)
        example = "alibi3d" if family is not None and family.kind in VIDEO_KINDS else "alibi2d"
        text = f"{type(tower).__name__} without an encoding of vispe; vispe.convert(tower, {example!r}) adds one."
        own = None if family is None else rope_spec(tower)
        return text if own is None else f"{text} Its own rotary embedding equals {own!r}."
    if windowed := families.family_of(tower):
        return convert.describe_model(tower, windowed)
    return describe_timm(converted[0]) if family_of(tower) is None else convert.describe_model(tower, TOWER)


def _check_class(path: str, cls: type[Any], module: str, name: str) -> None:
    """Raise `UnsupportedHost` for subclasses of transformers' own class, whose forward pass is replaced."""
    if (cls.__module__, cls.__name__) != (module, name):
        raise UnsupportedHost(
            f"{path} must be of transformers' own class {name}, whose forward pass is replaced, got {cls.__name__} of "
            f"{cls.__module__}. Convert a stock tower."
        )


def _check_kind(term: dict[str, Any], grid: tuple[int, ...] | None, stock: type[nn.Module]) -> None:
    """Raise when an encoding does not act inside attention, or needs a training grid that the tower does not have."""
    cls = encoding_class(term["name"])
    check_outside(cls, 2 if grid is None else len(grid), stock)
    option = inspect.signature(cls).parameters.get("grid")
    if grid is None and option is not None and option.default is option.empty and "grid" not in term:
        raise OptionError(
            f"{cls.name} has a table for one grid, but {stock.__name__} was trained without a fixed grid. Pass "
            "grid=[h, w], rows and columns of an image for which the table is built."
        )
