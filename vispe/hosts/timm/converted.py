"""Base class of converted timm models.

The families are in `vispe.hosts.timm.vit`, `eva` and `naflex`; conversion is in `vispe.hosts.common.conversion`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from timm.layers import register_notrace_function
from torch import nn

from vispe.grid import Grid
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.conversion.converted_class import make_converted_class
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.hosts.timm.attention import LAYERS, attentions

for _node in fx_leaves.NODES:
    register_notrace_function(_node)


class ConvertedTimm(LoadsWeights):
    """Mixin of all converted timm models."""

    vispe_attentions = attentions
    vispe_layers = LAYERS
    vispe_make: ClassVar[Callable[[type[nn.Module]], type[nn.Module]]]  # `converted_class` of its family
    vispe_tables: ClassVar[tuple[str, ...]] = ("pos_embed",)  # state dict names of the absolute table

    @property
    def _model_args(self) -> dict[str, Any]:
        """Constructor arguments saved in timm's hub configuration; `pos_embed` is always the current encoding."""
        return self.__dict__.get("_model_args", {})

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        self.__dict__["_model_args"] = {**args, "pos_embed": self.vispe.saved}

    def prune_intermediate_layers(self, *args: Any, **options: Any) -> list[int]:
        """Remove the blocks after the last requested feature, as timm does, and their parameters in encodings."""
        indices = super().prune_intermediate_layers(*args, **options)
        for encoding in self._vispe_shared():
            encoding.truncate(len(self.blocks))
        return indices

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's parameter groups, with the shared encodings in the stem."""
        groups = super().group_matcher(coarse=coarse)
        return {**groups, "stem": rf"{groups['stem']}|^pos_enc"}

    def _vispe_table_names(self) -> tuple[str, ...]:
        return self.vispe_tables

    @property
    def _vispe_spacing(self) -> tuple[float, float] | None:
        """Distance of tokens in patch sizes, where patches overlap."""
        return None

    def _vispe_loop_grid(self, shape: tuple[int, ...], prefix: int | None) -> Grid:
        prefix = self.num_prefix_tokens if prefix is None else prefix
        return Grid(shape, prefix=prefix, reference=self.vispe.reference, spacing=self._vispe_spacing)

    def _vispe_unused(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        unused = super()._vispe_unused(state_dict, prefix)
        if self.vispe.rope is not None or "rotary embedding" in self.vispe.lost:
            unused += [name for name in state_dict if name.startswith(f"{prefix}rope.")]
        return unused

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_converted, (self.vispe_make, self.vispe.stock), self.__getstate__()


def _new_converted(make: Callable[[type[nn.Module]], type[nn.Module]], stock: type[nn.Module]) -> nn.Module:
    cls = make(stock)
    return cls.__new__(cls)


def converted_timm_class(
    mixin: type[ConvertedTimm], stock: type[nn.Module], family: type[nn.Module], overridden: tuple[str, ...]
) -> type[Any]:
    """Return the converted class of a model class: a subclass of `mixin` and `stock`, in this order.

    Raises:
        UnsupportedHost: the class is a subclass of timm's that overrides methods replaced by vispe.
    """
    return make_converted_class(mixin, stock, family, overridden, "timm", f"timm {family.__name__}")
