"""Putting an encoding into the image tower of an open_clip model, and taking it out again.

Two kinds of towers: those that timm builds, where the trunk is converted as any timm model, and open_clip's own
`VisionTransformer`, whose conversion is that of `vispe.hosts.common.convert`. The text tower is never touched.

The words are `vispe.convert`, `vispe.restore` and `vispe.describe`; they call what is here, so that `import vispe`
need not import open_clip. For models that are built by name see `vispe.hosts.open_clip.patch_constructors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from open_clip.transformer import Attention, VisionTransformer
from torch import nn

from vispe.encodings.registry import Spec
from vispe.errors import UnsupportedHost
from vispe.hosts.common import convert
from vispe.hosts.common.checks import moved
from vispe.hosts.common.context import HostState
from vispe.hosts.common.host_spec import Wanted, read
from vispe.hosts.common.layer_access import block_in
from vispe.hosts.common.state_dict_loading import encodings_of
from vispe.hosts.open_clip.attention import SWAPS, attentions, stock_type
from vispe.hosts.open_clip.tower import OVERRIDDEN, hosted, resampled
from vispe.hosts.timm.convert import convert_timm, restore_timm


class _Tower(convert.Family):
    """open_clip's own image tower."""

    title = "open_clip "
    noun = "tower"
    builder = "open_clip.create_model(...)"
    known = tuple(SWAPS)
    overridden = OVERRIDDEN
    patchable = ("forward", "attention")

    hosted = staticmethod(hosted)
    stock_type = staticmethod(stock_type)
    attentions = staticmethod(attentions)

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any] | None]]:
        for (i, path, attention), outer in zip(attentions(model), model.transformer.resblocks, strict=True):
            at, block = block_in(f"transformer.resblocks.{i}", outer, tuple(SWAPS))
            yield at, block, SWAPS.get(stock_type(block))
            yield path, attention, SWAPS.get(stock_type(attention))

    def facts(self, model: Any, layers: convert.Layers) -> dict[str, Any]:
        return {
            "dim": model.conv1.out_channels,
            "num_heads": getattr(layers[0][2], "num_heads", None) if layers else None,
            "depth": len(layers),
            "grid": tuple(model.grid_size),
        }

    def where(self, model: Any) -> str:
        return f"{tuple(model.grid_size)}, trained at {model.vispe.reference}, 1 prefix token"

    def has_table(self, model: Any) -> bool:
        return model.positional_embedding is not None

    def take_table(self, model: Any) -> tuple[nn.Parameter, tuple[int, ...]]:
        kept = (model.positional_embedding, tuple(model.grid_size))
        model.register_parameter("positional_embedding", None)
        return kept

    def put_table(self, model: Any, kept: tuple[nn.Parameter, tuple[int, ...]]) -> None:
        table, old = kept
        grid = tuple(model.grid_size)
        resample = None if grid == tuple(old) else lambda values: resampled(values, tuple(old), grid)
        model.positional_embedding = moved(table, model.class_embedding, resample)

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        if not getattr(model.patch_dropout, "exclude_first_token", True):
            raise UnsupportedHost(
                "The patch dropout of this tower may drop the class token (exclude_first_token=False), so the place of "
                "the tokens that remain is not known; use exclude_first_token=True."
            )

    def check_inside(self, model: Any) -> None:
        if not getattr(model.transformer, "batch_first", True):
            raise UnsupportedHost(
                "This tower runs its blocks with the sequence first (batch_first=False); build it with "
                "batch_first=True, or use an additive encoding."
            )
        for _, path, module in attentions(model):
            if isinstance(module, Attention) and module.logit_scale is not None:
                raise UnsupportedHost(
                    f"{path} is scaled cosine attention, which open_clip itself cannot run; build the tower without "
                    "scaled_cosine_attn."
                )
            if isinstance(module, nn.MultiheadAttention) and (
                module.in_proj_weight is None or module.bias_k is not None
            ):
                raise UnsupportedHost(
                    f"{path} has separate projections or a bias token (bias_k), which open_clip's towers do not; use "
                    "an additive encoding, or vispe.Attention in your own blocks."
                )

    def finish(self, model: Any, old: HostState | None) -> None:
        """Note what `lock`, which lets the stem train, must leave alone."""
        model.vispe.fixed = tuple(
            f"{path}.{name}"
            for path, e in encodings_of(model)
            for name, p in e.named_parameters()
            if not p.requires_grad
        )

    def leave(self, model: Any) -> None:
        for _, _, module in attentions(model):
            vars(module).pop("fused_attn", None)


TOWER = _Tower()


def image_tower(model: nn.Module) -> nn.Module:
    """Return what is converted in an object of open_clip: its own tower, or the trunk that timm made.

    Raises:
        UnsupportedHost: there is no vision transformer in it.
    """
    if isinstance(model, VisionTransformer):
        return model
    if isinstance(model, TimmModel):
        return model.trunk
    if isinstance(model, ModifiedResNet):
        raise UnsupportedHost(
            "The image tower is open_clip's ModifiedResNet, which has no positional encoding between its convolutions; "
            "choose a ViT tower, 'ViT-B-32' for one."
        )
    visual = getattr(model, "visual", None)
    if isinstance(visual, nn.Module):
        return image_tower(visual)
    raise UnsupportedHost(
        f"open_clip's {type(model).__name__} is no image tower, and text stays as it is; give vispe.convert the whole "
        "model or its `visual`."
    )


def convert_image_tower(
    model: nn.Module, spec: Spec, *, keep_abs: bool = False, keep_rope: bool = False, **options: Any
) -> None:
    """Convert the image tower in an object of open_clip; arguments and errors as of `vispe.convert`."""
    tower, wanted = image_tower(model), read(spec, options, keep_abs, keep_rope)
    if isinstance(tower, VisionTransformer):
        convert_tower(tower, wanted)
    else:
        convert_timm(tower, wanted)


def restore_image_tower(model: nn.Module) -> None:
    """Take the encoding out of the image tower in an object of open_clip; errors as of `vispe.restore`."""
    tower = image_tower(model)
    if isinstance(tower, VisionTransformer):
        restore_tower(tower)
    else:
        restore_timm(tower)


def convert_tower(tower: VisionTransformer, wanted: Wanted, built: bool = False) -> None:
    """Convert open_clip's own image tower in place, or exchange the encoding of a converted one.

    Args:
        tower: an image tower.
        wanted: what the spec asks.
        built: whether the tower is being built with the encoding, so that its table never counted.
    """
    convert.put_in(tower, TOWER, wanted, built)


def restore_tower(tower: VisionTransformer) -> None:
    """Give a converted tower its own classes and absolute table back; errors as of `vispe.restore`."""
    convert.take_out(tower, TOWER)


def describe_tower(tower: nn.Module) -> str:
    """Return what is attached where in a converted tower, in a few lines."""
    return convert.in_words(tower, TOWER)
