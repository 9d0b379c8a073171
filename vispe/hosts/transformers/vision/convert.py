"""Putting an encoding into the vision tower of a Hugging Face model, and taking it out again.

The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose patches lie in the order in which they are merged, one image
after another; those of CLIP, SigLIP and InternVL, of which LLaVA, LLaVA-OneVision and InternVL are made; models that
see images alone, such as ViT, DINOv2 and DINOv3; and towers that timm made, which are converted as any timm model. The
steps are in `vispe.hosts.common.convert`.
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
from vispe.hosts.common.host_spec import Wanted, read
from vispe.hosts.timm.convert import convert_timm, describe_timm, restore_timm
from vispe.hosts.transformers.subclasses import positioned
from vispe.hosts.transformers.vision.families import (
    FAMILIES,
    FILMS,
    attentions,
    family_of,
    family_of_class,
    heads_of,
    prefix_of,
    reference_of,
    stock_type,
    width_of,
)
from vispe.hosts.transformers.vision.position_embeddings import (
    has_tables,
    never_loaded,
    put_tables,
    take_tables,
)
from vispe.hosts.transformers.vision.tower import SWAPS, swapped
from vispe.hosts.windows import families

# where towers are kept
_INSIDE = (
    "model",
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "timm_model",
    "_backbone",
    "backbone",
)


class _Tower(convert.Family):
    """The towers of transformers; where things are in them says `family_of`."""

    title = "transformers "
    noun = "tower"
    builder = "from_pretrained"
    unfused = "the attention implementation is eager"
    always_inside = True

    def hosted(self, stock: type[Any]) -> type[Any]:
        family = family_of_class(stock)
        _check_class("The tower", stock, family.path, family.tower)
        return positioned(stock, SWAPS[family.kind][0])

    stock_type = staticmethod(stock_type)
    attentions = staticmethod(attentions)

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any]]]:
        for path, module, mixin in swapped(model):
            yield path, module, positioned(stock_type(module), mixin)

    def facts(self, model: Any, layers: convert.Layers) -> dict[str, Any]:
        heads, width = heads_of(layers[0][2])
        return {
            "dim": width_of(layers[0][2]),
            "num_heads": heads,
            "head_dim": width,
            "depth": len(layers),
            "grid": reference_of(model),
        }

    def where(self, model: Any) -> str:
        trained = model.vispe.reference or "any"
        return f"of each image, trained at {trained}, {prefix_of(model)} prefix tokens"

    has_table = staticmethod(has_tables)
    take_table = staticmethod(take_tables)
    put_table = staticmethod(put_tables)

    def has_rope(self, model: Any) -> bool:
        return family_of(model).rope

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        family = family_of(model)
        for _, path, module in attentions(model):
            _check_class(path, stock_type(module), family.path, family.attention)
            refuse_patched(module, path, self.patchable)
        for term in terms:
            _check_kind(term, reference_of(model), stock)

    def check_parts(self, model: Any, parts: Sequence[Encoding], layers: convert.Layers) -> None:
        """Raise what the encodings raise when there is something that the tower does not supply, such as poses."""
        heads, width = heads_of(layers[0][2])
        like = next(model.parameters())
        few = (2, 2, 4) if family_of(model).kind in FILMS else (2, 4)
        pos = Grid(few, prefix=prefix_of(model)).positions(like.device)
        x = like.new_zeros(1, pos.tokens, width_of(layers[0][2]))
        q = like.new_zeros(1, heads, pos.tokens, width)
        devices = [like.device] if like.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            pos = prepare(parts, pos)
            attend(q, q, q, parts, pos, 0, x, backend="reference")

    def check_aside(self, model: Any, table: Any) -> None:
        """Raise when the table never got values, as the weights were saved without it."""
        if never_loaded(model, table):
            raise UnsupportedCombination(
                f"This {stock_type(model).__name__} was saved without its absolute table, so there is none to bring "
                "back; load the stock model that it was made from."
            )


TOWER = _Tower()


def vision_tower_of(model: nn.Module) -> nn.Module:
    """Return what is converted in a model of transformers: its vision tower, or the model that timm made.

    Args:
        model: a vision-language model, with or without its head, or a tower.

    Raises:
        UnsupportedHost: there is no vision tower in it, or one of a class that vispe does not know.
    """
    tower: Any = model
    while family_of(tower) is None and families.family_of(tower) is None:
        # heads of transformers name the model below them
        names = (*_INSIDE, getattr(tower, "base_model_prefix", "") or "model")
        parts = (getattr(tower, name, None) for name in names)
        inner = next((part for part in parts if isinstance(part, nn.Module)), None)
        if inner is None:
            break
        tower = inner
    if families.family_of(tower):
        return tower
    if family_of(tower) is None and not any(c.__module__.startswith("timm.") for c in type(tower).__mro__):
        known = ", ".join(dict.fromkeys(f.tower for f in FAMILIES))
        where = "" if tower is model else f" with a {type(tower).__name__} inside"
        raise UnsupportedHost(
            f"A vision tower was looked for in a {type(model).__name__}{where}, and none that vispe knows was found; "
            f"it knows {known}, and those of timm. {advice(tower) or advice(model) or ''}".rstrip()
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
    """Put an encoding into the vision tower of a model of transformers, in place, or exchange it for another.

    The encoding works inside attention, image by image: each patch is at its row and column, whatever the order and
    the windows in which the tower sees the patches, and each frame of a video has positions of its own.

    Args:
        model: a vision-language model, or its tower.
        spec: an encoding, or a sum of encodings and of what stays of the tower's own.
        keep_abs: whether the tower's own absolute table stays in use beside the encoding. None keeps what there is,
            except in towers of timm, where it means the same as in `vispe.convert`.
        keep_rope: likewise, of its own rotary embedding.
        **options: options of the encoding.

    Raises:
        UnsupportedHost: there is no tower that vispe knows.
        UnsupportedCombination: the encoding has no place in it, or there is nothing to keep.
        UnknownEncoding, OptionError: the spec is not right.
    """
    tower = vision_tower_of(model)
    if family_of(tower) is None:
        wanted = read(spec, options, bool(keep_abs), bool(keep_rope))
        windowed = families.family_of(tower)
        convert.put_in(tower, windowed, wanted) if windowed else convert_timm(tower, wanted)
    else:
        convert.put_in(tower, TOWER, read(spec, options, keep_abs, keep_rope))


def convert_as_named(part: nn.Module, entry: dict[str, Any]) -> int:
    """Convert a tower as `vispe.hosts.transformers.saving.config_record` has it, and return how many weights its encoding has.

    Args:
        part: the tower, or what holds a tower of timm.
        entry: of its configuration.
    """
    tower = vision_tower_of(part)
    wanted = Wanted(parse_spec(entry["encoding"]), entry["keep_abs"], entry["keep_rope"])
    if windowed := families.family_of(tower):
        convert.put_in(tower, windowed, wanted)
    elif family_of(tower) is None:
        convert_timm(tower, wanted)
    else:
        convert.put_in(tower, TOWER, wanted)
    return sum(p.numel() for name, p in tower.named_parameters() if "pos_enc." in name)


def restore_vision(model: nn.Module) -> None:
    """Give the tower of a model its own classes, absolute table and rotary embedding back, in place.

    Raises:
        UnsupportedHost: there is no tower that vispe knows, or it is not converted.
    """
    tower = vision_tower_of(model)
    if windowed := families.family_of(tower):
        convert.take_out(tower, windowed)
    elif family_of(tower) is None:
        restore_timm(tower)
    else:
        convert.take_out(tower, TOWER)


def describe_vision(model: nn.Module) -> str:
    """Return what is attached where in the tower of a model, in a few lines."""
    tower = vision_tower_of(model)
    converted = [part for _, part in convert.converted_parts(tower)]
    if not converted:
        return (
            f"{type(tower).__name__} without an encoding of vispe; vispe.convert(tower, 'alibi2d') adds one."
        )
    if windowed := families.family_of(tower):
        return convert.in_words(tower, windowed)
    return describe_timm(converted[0]) if family_of(tower) is None else convert.in_words(tower, TOWER)


def _check_class(path: str, cls: type[Any], module: str, name: str) -> None:
    """Raise when a part is not of transformers' own class, whose forward pass is replaced."""
    if (cls.__module__, cls.__name__) != (module, name):
        raise UnsupportedHost(
            f"{path} is a {cls.__name__} of {cls.__module__}; vispe replaces the forward pass of transformers' own "
            f"{name}, so convert a plain tower."
        )


def _check_kind(term: dict[str, Any], grid: tuple[int, ...] | None, stock: type[nn.Module]) -> None:
    """Raise when an encoding has no place inside attention, or needs a grid that the tower does not have."""
    cls = encoding_class(term["name"])
    check_outside(cls, 2 if grid is None else len(grid), stock)
    wanted = inspect.signature(cls).parameters.get("grid")
    if grid is None and wanted is not None and wanted.default is wanted.empty and "grid" not in term:
        raise OptionError(
            f"{cls.name} makes its table for one grid, and {stock.__name__} was trained at none in particular; say "
            "grid=[h, w], the rows and columns of an image that the table is for."
        )
