"""Description of an encoding by class attributes and options, and checks of positions against it."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any, ClassVar, cast

from torch import nn

from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Grid, Positions

HOST_FACTS = ("dim", "num_heads", "head_dim", "depth", "grid")
INFORMATION = ("distance", "direction", "position", "content")  # information that an encoding can provide
# of the encoding's contribution to attention
INVARIANCES = (
    "translation",
    "quarter_turns",
    "reflection",
    "rotation",
)


class Described(nn.Module):
    """Class attributes and options of an encoding, see `Encoding`."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    year: ClassVar[int] = 0
    formula: ClassVar[str] = ""
    tested_options: ClassVar[tuple[str, ...]] = ()
    ndim: ClassVar[tuple[int, ...]] = (2,)
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    extrapolates: ClassVar[bool] = True
    fused: ClassVar[bool] = False
    encodes: ClassVar[tuple[str, ...]] = ()
    invariant: ClassVar[tuple[str, ...]] = ()
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {}
    multi_softmax: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    counts_keys: ClassVar[bool] = False

    @property
    def config(self) -> dict[str, Any]:
        """Name and arguments, JSON-able: `create_encoding(enc.config)` builds an equal module."""
        return {"name": self.name, **{p: getattr(self, p) for p in inspect.signature(type(self)).parameters}}

    @property
    def config_key(self) -> Hashable:
        """Hashable config for caches; a tuple, since Dynamo cannot trace the string of a symbolic number."""
        return tuple((name, _frozen(value)) for name, value in self.config.items())

    @property
    def spec(self) -> Any:
        """The config without defaults and without `HOST_FACTS`, as stored with a model."""
        defaults = {p.name: p.default for p in inspect.signature(type(self)).parameters.values()}
        return {
            k: v for k, v in self.config.items() if k not in HOST_FACTS and (k == "name" or v != defaults[k])
        }

    def extra_repr(self) -> str:
        """Return the options for `repr`."""
        return ", ".join(f"{k}={v}" for k, v in self.config.items() if k != "name")

    def _accept(self, *axes: int) -> None:
        """Restrict the numbers of axes that this instance accepts."""
        # replaces the class attribute for this instance only
        vars(self)["ndim"] = axes

    def _resolve_head_dim(self) -> int:
        """Return the checked head dimension of queries and keys: `head_dim`, else dim / num_heads."""
        return getattr(self, "head_dim", None) or self._token_part()

    def _token_part(self) -> int:
        """Return the checked dim / num_heads: the token channels that each head reads."""
        dim, heads = getattr(self, "dim", 0), getattr(self, "num_heads", 0)
        if dim % heads:
            raise OptionError(
                f"{self.name} needs dim to be a multiple of num_heads, got dim={dim}, num_heads={heads}."
            )
        return dim // heads

    def _need_axes(self, pos: Positions) -> None:
        """Raise `ShapeError` unless the number of axes is accepted."""
        if pos.axes not in self.ndim:
            expected_axes = " or ".join(map(str, self.ndim))
            hint = f" Use {self.name}(axes={pos.axes})." if "axes" in self.config else ""
            raise ShapeError(
                f"{self.name} needs {expected_axes}-axis positions, got {counted(pos.axes, 'axis')} ({pos}).{hint}"
            )

    def _need_grid(self, pos: Positions, hint: str = "") -> Grid:
        """Return the grid of the tokens, or raise `ShapeError` with an optional hint (a sentence)."""
        if pos.grid is None or pos.axes not in self.ndim:
            expected_axes = " or ".join(map(str, self.ndim))
            raise ShapeError(
                f"{self.name} needs the tokens of a {expected_axes}-axis grid, got {counted(pos.axes, 'axis')} ({pos})."
                f"{' ' * bool(hint)}{hint}"
            )
        self._need_start(pos)
        return pos.grid

    def _need_start(self, pos: Positions, what: str = "looks up cells of the grid") -> None:
        """Raise `ShapeError` for a grid with another origin, which this encoding would ignore."""
        # free coordinates have no origin that could be ignored
        if pos.grid is None or (pos.grid.origin == "start" and pos.grid.offset is None):
            return
        option = "origin" if pos.grid.origin != "start" else "offset"
        fix = "Use origin='start'" if option == "origin" else "Omit offset"
        raise ShapeError(
            f"{self.name} {what}, which {option}={getattr(pos.grid, option)!r} does not change, got {pos}. {fix} "
            "or use an encoding of raw coordinates, such as sincos2d or rope_axial."
        )


def _frozen(value: Any) -> Hashable:
    """Return the option with lists and dicts replaced by tuples, hashable."""
    if isinstance(value, dict):
        return tuple((name, _frozen(one)) for name, one in cast("dict[str, Any]", value).items())
    if isinstance(value, list | tuple):
        return tuple(_frozen(one) for one in cast("list[Any]", value))
    return value
