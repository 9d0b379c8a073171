"""Description of a family of models: how its parts are found and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from vispe.encodings.base import Encoding
from vispe.hosts.common.context import HostState

Layers = Sequence[tuple[int, str, nn.Module]]  # block, path and module of every attention layer


class HostFamily:
    """Access to the parts of a model that a conversion changes; each library derives its own families.

    Attributes:
        title: prefix of class names in descriptions and messages.
        noun: noun for such a model in messages.
        builder: the call that builds the stock model, for messages.
        unfused: reason why attention layers are not fused, for descriptions.
        known: classes of attention layers and blocks that can be converted.
        overridden: methods that the converted class of a model replaces.
        patchable: methods that the converted classes of its layers and blocks replace.
        always_inside: whether attention layers are converted for every encoding.
        per_layer: whether every attention layer has its own encodings, for models in which heads and grids
            differ between layers.
        has_block_hook: whether the forward pass calls encodings between blocks.
        has_late_prefix: whether prefix tokens can be excluded from the first blocks.
        table_keyword: value of the library's own constructor argument for an absolute table, with which a
            model is built if the table stays in use. None if there is no such argument.
    """

    title = ""
    noun = "model"
    builder = ""
    unfused = "fused attention is off"
    known: Iterable[type[nn.Module]] = ()
    overridden: tuple[str, ...] = ("forward",)
    patchable: tuple[str, ...] = ("forward",)
    always_inside = False
    per_layer = False
    has_block_hook = True
    has_late_prefix = False
    table_keyword: str | None = None

    def converted_class(self, stock: type[Any]) -> type[Any]:
        """Return the converted class of a model class; raise `UnsupportedHost` if there is none."""
        raise NotImplementedError

    def stock_type(self, module: nn.Module) -> type[Any]:
        """Return the library's class of a layer or block, converted or not."""
        raise NotImplementedError

    def attentions(self, model: Any) -> Iterator[tuple[int, str, nn.Module]]:
        """Yield (block, path, module) of every attention layer."""
        raise NotImplementedError

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any] | None]]:
        """Yield (path, module, converted class) of every module that an encoding inside attention converts."""
        raise NotImplementedError

    def reference(self, model: Any) -> tuple[int, ...] | None:
        """Return the grid of pretraining if the model stores one; None means the grid of the model."""
        del model
        return None

    def facts(self, model: Any, layers: Layers) -> dict[str, Any]:
        """Return the arguments of encodings: dim, num_heads, head_dim, depth and the training grid."""
        raise NotImplementedError

    def layer_facts(self, model: Any, attention: nn.Module, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the encodings of one attention layer, from `facts` of the model."""
        del model, attention
        return facts

    def grid_text(self, model: Any) -> str:
        """Return grid and prefix tokens of a converted model, human-readable."""
        raise NotImplementedError

    def has_absolute_table(self, model: Any) -> bool:
        """Return whether an absolute table is currently in use."""
        raise NotImplementedError

    def detach_table(self, model: Any) -> Any:
        """Remove the absolute table and return the argument of `attach_table`."""
        raise NotImplementedError

    def attach_table(self, model: Any, detached: Any) -> None:
        """Restore the absolute table, for the current grid, device and dtype of the model."""
        raise NotImplementedError

    def has_rope(self, model: Any) -> bool:
        """Return whether a rotary embedding of the model's own is currently in use."""
        del model
        return False

    def detach_rope(self, model: Any) -> Any:
        """Remove the rotary embedding and return the argument of `attach_rope`."""

    def attach_rope(self, model: Any, detached: Any) -> None:
        """Restore the rotary embedding."""

    def check_widths(self, terms: Sequence[dict[str, Any]], layers: Layers) -> None:
        """Raise an error if `head_dim` differs between layers, and a term is built for one `head_dim`."""

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        """Raise an error if the model does not support conversion or a term, before anything is built."""

    def check_parts(self, model: Any, parts: Sequence[Encoding], layers: Layers) -> None:
        """Raise an error if the model does not support an encoding."""

    def check_inside(self, model: Any) -> None:
        """Raise an error if a `Context` would not reach the attention layers."""

    def check_detached(self, model: Any, table: Any) -> None:
        """Raise an error if a detached table cannot be restored."""

    def resolved(
        self, terms: list[dict[str, Any]], parts: Sequence[Encoding], grid: Any
    ) -> list[dict[str, Any]]:
        """Return the spec from which an equal model is built; empty if it equals `terms`."""
        del terms, parts, grid
        return []

    def after_convert(self, model: Any, old: HostState | None) -> None:
        """Run library-specific steps after a conversion; `old` is the state of a previous conversion."""

    def before_strip(self, model: Any) -> None:
        """Undo `after_convert` before the encodings are removed."""

    def after_restore(self, model: Any, state: HostState) -> None:
        """Run library-specific steps after the original classes, table and rotary embedding are restored."""


def table_like(
    table: nn.Parameter, like: Tensor, resample: Callable[[Tensor], Tensor] | None = None
) -> nn.Parameter:
    """Return a table in the device and dtype of `like`, optionally resampled; `table` itself if nothing changes."""
    if resample is None and (table.device, table.dtype) == (like.device, like.dtype):
        return table
    values = table.detach() if resample is None else resample(table.detach())
    return nn.Parameter(values.to(like), requires_grad=table.requires_grad)
