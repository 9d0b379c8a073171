"""Image towers of open_clip models, as a family that can be converted.

There are two kinds of towers: those built by timm, where the trunk is converted as any timm model, and open_clip's own
`VisionTransformer`, converted by `vispe.hosts.common.conversion.convert`. The text tower is never changed.

Users call `vispe.convert`, `vispe.restore` and `vispe.describe`, which import this module on demand, so that ``import
vispe`` does not import open_clip. For models that are built by name see `vispe.hosts.open_clip.patch_constructors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from open_clip.transformer import Attention, VisionTransformer
from torch import nn

from vispe.errors import UnsupportedHost
from vispe.hosts.common.context import HostState
from vispe.hosts.common.host_family import HostFamily, Layers, table_like
from vispe.hosts.common.layer_access import block_in
from vispe.hosts.open_clip.attention import SWAPS, attentions, stock_type
from vispe.hosts.open_clip.tower import OVERRIDDEN, converted_class, resampled


class _Tower(HostFamily):
    """open_clip's own image tower."""

    title = "open_clip "
    noun = "tower"
    builder = "open_clip.create_model(...)"
    known = tuple(SWAPS)
    overridden = OVERRIDDEN
    patchable = ("forward", "attention")

    converted_class = staticmethod(converted_class)
    stock_type = staticmethod(stock_type)
    attentions = staticmethod(attentions)

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any] | None]]:
        for (i, path, attention), outer in zip(attentions(model), model.transformer.resblocks, strict=True):
            at, block = block_in(f"transformer.resblocks.{i}", outer, tuple(SWAPS))
            yield at, block, SWAPS.get(stock_type(block))
            yield path, attention, SWAPS.get(stock_type(attention))

    def facts(self, model: Any, layers: Layers) -> dict[str, Any]:
        return {
            "dim": model.conv1.out_channels,
            "num_heads": getattr(layers[0][2], "num_heads", None) if layers else None,
            "depth": len(layers),
            "grid": tuple(model.grid_size),
        }

    def grid_text(self, model: Any) -> str:
        return f"{tuple(model.grid_size)}, trained at {model.vispe.reference}, 1 prefix token"

    def has_absolute_table(self, model: Any) -> bool:
        return model.positional_embedding is not None

    def detach_table(self, model: Any) -> tuple[nn.Parameter, tuple[int, ...]]:
        detached = (model.positional_embedding, tuple(model.grid_size))
        model.register_parameter("positional_embedding", None)
        return detached

    def attach_table(self, model: Any, detached: tuple[nn.Parameter, tuple[int, ...]]) -> None:
        table, old = detached
        grid = tuple(model.grid_size)
        resample = None if grid == tuple(old) else lambda values: resampled(values, tuple(old), grid)
        model.positional_embedding = table_like(table, model.class_embedding, resample)

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        if not getattr(model.patch_dropout, "exclude_first_token", True):
            raise UnsupportedHost(
                "The patch dropout of this tower must not drop the class token, as the positions of the remaining "
                "tokens would be unknown, got exclude_first_token=False. Use exclude_first_token=True."
            )

    def check_inside(self, model: Any) -> None:
        if not getattr(model.transformer, "batch_first", True):
            raise UnsupportedHost(
                "The blocks of this tower must be batch-first, got batch_first=False. Build it with batch_first=True, "
                "or use an additive encoding."
            )
        for _, path, module in attentions(model):
            if isinstance(module, Attention) and module.logit_scale is not None:
                raise UnsupportedHost(
                    f"{path}: scaled cosine attention is not supported (open_clip itself cannot run it). Build the "
                    "tower without scaled_cosine_attn."
                )
            if isinstance(module, nn.MultiheadAttention) and (
                module.in_proj_weight is None or module.bias_k is not None
            ):
                raise UnsupportedHost(
                    f"{path}: separate projections and bias tokens (bias_k) are not supported. Use an additive "
                    "encoding, or vispe.Attention in your own blocks."
                )

    def after_convert(self, model: Any, old: HostState | None) -> None:
        """Record the frozen parameters, so that `lock` does not unfreeze them with the stem."""
        model.vispe.fixed = tuple(
            f"{path}.{name}"
            for path, e in model._vispe_paths()
            for name, p in e.named_parameters()
            if not p.requires_grad
        )

    def before_strip(self, model: Any) -> None:
        for _, _, module in attentions(model):
            vars(module).pop("fused_attn", None)


TOWER = _Tower()


def family_of(model: nn.Module) -> HostFamily | None:
    """Return the family of open_clip's own image tower; None for other models."""
    return TOWER if isinstance(model, VisionTransformer) else None


def image_tower(model: nn.Module) -> nn.Module:
    """Return the module of an open_clip model that is converted: open_clip's own tower, or a timm trunk.

    Raises:
        UnsupportedHost: there is no vision transformer in it.
    """
    if isinstance(model, VisionTransformer):
        return model
    if isinstance(model, TimmModel):
        return model.trunk
    if isinstance(model, ModifiedResNet):
        raise UnsupportedHost(
            "The image tower must be a vision transformer, got open_clip's ModifiedResNet, a convolutional network. "
            "Use a ViT tower such as 'ViT-B-32'."
        )
    visual = getattr(model, "visual", None)
    if isinstance(visual, nn.Module):
        return image_tower(visual)
    raise UnsupportedHost(
        f"vispe.convert: only image towers of open_clip are converted, got {type(model).__name__}. Pass the complete "
        "model or its `visual`."
    )
