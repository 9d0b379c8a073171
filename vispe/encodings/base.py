"""What an encoding is: four small interfaces, and samplers (`vispe.encodings.parts.sampler`), which move tokens.

An encoding is a final class that implements one or more of `Additive`, `Rotary`, `Biased` and `Mixing`.
Options are annotated attributes of the class, JSON-able, checked by their annotations, and keyword-only arguments of
the constructor, so that `Encoding.config` rebuilds an equal module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, ClassVar, cast, dataclass_transform

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.value_term import ValueTerm
from vispe.attention.precision import float32_buffers, restore_buffers
from vispe.attention.transform.abstract_transform import Transform
from vispe.encodings.parts.eval_cache import Kept
from vispe.encodings.saved_spec import keep, refuse_other, saved_grid
from vispe.errors import OptionError, ShapeError
from vispe.grid import Grid, Positions
from vispe.options import check_options, option_signature

HOST_FACTS = ("dim", "num_heads", "head_dim", "depth", "grid")
KNOWLEDGE = ("distance", "direction", "place", "content")  # what an encoding can tell tokens apart by
INVARIANCES = (
    "translation",
    "quarter_turns",
    "reflection",
    "rotation",
)  # what leaves its part of attention the same
_FIRST = (*HOST_FACTS, "axes")  # options that a base declares come first of all


@dataclass_transform(kw_only_default=True)
class Encoding(nn.Module):
    """Base of every positional encoding.

    Class attributes state facts: `name`, `paper` (title and link), `year`, `ndim` (accepted numbers of axes),
    `presets` (name to options), `extrapolates` (new grids need no resampling), `fused` (its bias has
    a form, such as a table of offsets, that needs no n x n mask), `knows` (of `KNOWLEDGE`), `invariant` (of
    `INVARIANCES`, to which its part of attention between patches is, with default options), `preset_invariant` (the
    same of presets that differ), `branched` (it has `branches`), `reads_tokens` (it reads the tokens that it is
    added to, or that enter attention).

    Annotated attributes are options, as in a dataclass: the constructor takes them as keywords, checks them by their
    annotations (`vispe.options`), and calls `__post_init__`, which makes the parameters. `axes` and what the host
    supplies (`HOST_FACTS`) come first, then the options of the class, then the others of its bases. A bare assignment
    changes the default of an option of a base, a `ClassVar` fixes it. A class with a constructor of its own has its
    arguments as options.

    Example:
        >>> class Tilt(Biased):
        ...     num_heads: int
        ...     strength: float = 0.1
        >>> Tilt(num_heads=2).config
        {'name': '', 'num_heads': 2, 'strength': 0.1}
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    year: ClassVar[int] = 0
    ndim: ClassVar[tuple[int, ...]] = (2,)
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    extrapolates: ClassVar[bool] = True
    fused: ClassVar[bool] = False
    knows: ClassVar[tuple[str, ...]] = ()
    invariant: ClassVar[tuple[str, ...]] = ()
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {}
    branched: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    progress: float = 1.0  # share of the training that is done, see `set_progress`; 1 = all of it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__init__ is Encoding.__init__:
            cls.__signature__ = option_signature(cls, Encoding, _FIRST)
        else:
            own = inspect.signature(cls.__init__)
            cls.__signature__ = own.replace(parameters=[*own.parameters.values()][1:])

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._kept = Kept()
        bound = option_signature(type(self), Encoding, _FIRST).bind(**options)
        bound.apply_defaults()
        vars(self).update(bound.arguments)
        check_options(self, tuple(bound.arguments))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check what options say together, and make the parameters; called by the constructor."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the module; its buffers, such as fixed frequencies, are not cast to half precision."""
        before = float32_buffers(self)
        parent: Any = super()
        moved = parent._apply(fn, recurse)
        restore_buffers(self, before)
        return moved

    def _accept(self, *axes: int) -> None:
        """Keep which numbers of axes this instance accepts, among those of its class."""
        vars(self)["ndim"] = axes

    def _head_width(self) -> int:
        """Return the channels of a head of queries and keys, checked: `head_dim`, else dim / num_heads."""
        return getattr(self, "head_dim", None) or self._token_part()

    def _token_part(self) -> int:
        """Return dim / num_heads, checked: the channels of tokens that are read for each head."""
        dim, heads = getattr(self, "dim", 0), getattr(self, "num_heads", 0)
        if dim % heads:
            raise OptionError(
                f"{self.name} needs dim to be a multiple of num_heads, got dim={dim}, num_heads={heads}."
            )
        return dim // heads

    def _need_axes(self, pos: Positions) -> None:
        """Raise `ShapeError` unless positions have a number of axes that is accepted."""
        if pos.axes not in self.ndim:
            wanted = " or ".join(map(str, self.ndim))
            hint = f"; say {self.name}(axes={pos.axes})" if "axes" in self.config else ""
            raise ShapeError(f"{self.name} needs {wanted}-axis positions, got {pos.axes} axes ({pos}){hint}.")

    def _need_grid(self, pos: Positions, hint: str = "") -> Grid:
        """Return the grid that the tokens come from, or raise `ShapeError`, with a hint at its end."""
        if pos.grid is None or pos.axes not in self.ndim:
            wanted = " or ".join(map(str, self.ndim))
            raise ShapeError(
                f"{self.name} needs the tokens of a {wanted}-axis grid, got {pos.axes} axes ({pos})"
                f"{'; ' * bool(hint)}{hint}."
            )
        self._need_start(pos)
        return pos.grid

    def _need_start(self, pos: Positions, what: str = "looks up cells of the grid") -> None:
        """Raise `ShapeError` for a grid that is not counted from the start, which would change nothing here."""
        if pos.grid is not None and pos.grid.origin != "start":
            raise ShapeError(
                f"{self.name} {what}, which origin={pos.grid.origin!r} does not change, got {pos}; take origin='start' "
                "or an encoding of coordinates as they are, such as sincos2d or rope_axial."
            )

    @property
    def per_layer(self) -> bool:
        """Whether every layer has parameters of its own: hosts then build one instance per attention."""
        return False

    @property
    def prefix_from(self) -> int:
        """The block that prefix tokens enter first, unchanged until there; only timm's plain ViT can hold them back."""
        return 0

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Return the positions of one forward pass, with every random draw made (into `Positions.attrs`).

        Hosts call it once per forward, outside checkpointed blocks. It may not read parameters, and it leaves
        positions that have been prepared already as they are.

        Args:
            pos: positions of the input.
            generator: source of the draws; the global one by default.
            draws: values to use instead of drawing, by name.
        """
        del generator, draws
        return pos

    def advance(self, progress: float, seed: int | None) -> None:
        """Take the share of training that is done and the seed of the next draws; see `set_progress`."""
        del seed
        self.progress = progress

    def reset_parameters(self) -> None:
        """Initialise the parameters; nothing to do without any."""

    def truncate(self, depth: int) -> None:
        """Drop what belongs to blocks from `depth` on, which the model has lost; here nothing does."""

    def restrict(self, layer: int) -> None:
        """Drop parameters of all blocks but `layer`, for hosts where every block has an instance of its own."""
        del layer

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that must not decay: all."""
        return {name for name, _ in self.named_parameters()}

    def parts(self) -> tuple[Encoding, ...]:
        """Return the encodings that this one consists of."""
        return (self,)

    def active(self, layer: int) -> bool:
        """Whether the encoding does anything in block `layer`; hosts make no parameters where it does not."""
        del layer
        return True

    def adopt(self, state_dict: dict[str, Any], beside: str, own: str) -> None:
        """Rename entries of released checkpoints to the names of this module, in place.

        Args:
            state_dict: what is being loaded.
            beside: prefix of the module that holds this encoding.
            own: prefix of this encoding.
        """

    def regrid(self, state_dict: dict[str, Any], own: str, grid: tuple[int, ...] | None) -> None:
        """Resample entries that are for another grid to that of this module, in place; here there are none.

        Args:
            state_dict: what is being loaded.
            own: prefix of this encoding.
            grid: shape of the grid that they are for; None where it is not known, so that their sizes must tell.

        Raises:
            EncodingMismatch: they cannot be resampled.
        """

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        cast(Any, super())._save_to_state_dict(destination, prefix, keep_vars)
        keep(destination, prefix, self._terms(), getattr(self, "grid", None))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        refuse_other(local_metadata, self._terms(), f"module {prefix.removesuffix('.') or self.name}")
        self.regrid(state_dict, prefix, saved_grid(local_metadata))
        reports = (missing_keys, unexpected_keys, error_msgs)
        cast(Any, super())._load_from_state_dict(state_dict, prefix, local_metadata, strict, *reports)

    def _terms(self) -> list[dict[str, Any]]:
        return [self.spec]

    @property
    def config(self) -> dict[str, Any]:
        """Name and arguments, JSON-able: `create_encoding(enc.config)` builds an equal module."""
        return {"name": self.name, **{p: getattr(self, p) for p in inspect.signature(type(self)).parameters}}

    @property
    def config_key(self) -> Hashable:
        """The config as a key of caches; not a text, as Dynamo cannot trace the text of a symbolic number."""
        return tuple((name, _frozen(value)) for name, value in self.config.items())

    @property
    def spec(self) -> Any:
        """The config without what the host supplies: what to keep on a model."""
        defaults = {p.name: p.default for p in inspect.signature(type(self)).parameters.values()}
        return {
            k: v for k, v in self.config.items() if k not in HOST_FACTS and (k == "name" or v != defaults[k])
        }

    def extra_repr(self) -> str:
        """Show the arguments."""
        return ", ".join(f"{k}={v}" for k, v in self.config.items() if k != "name")


class Additive(Encoding):
    """Adds a vector to every token, once, after patch embedding.

    What is added is a table of positions, `table`; an encoding that `reads_tokens` has none, and defines `embed`.
    """

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return what is added, (1 or b, n, d) float32, 0 for tokens without a place unless defined otherwise."""
        raise NotImplementedError

    def embed(self, x: Tensor, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the tokens (b, n, d) with what is added to them, in their dtype; hosts call it."""
        return x + self.table(pos, image).to(x.dtype)


class Rotary(Encoding):
    """Transforms queries and keys (and values, outputs) inside attention.

    Attributes:
        calibrates: it only weighs or shifts channels by what they hold, so that a rotation may follow.
    """

    calibrates: ClassVar[bool] = False

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the transform of block `layer`; the identity for tokens without a place."""
        raise NotImplementedError


class Biased(Encoding):
    """Adds to the attention logits."""

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias of block `layer`, or None where it has none.

        Args:
            pos: positions of the tokens.
            layer: index of the block.
            x: the block's input to attention (b, n, d), for encodings with gates.
        """
        raise NotImplementedError

    def _made_of(self, *words: Hashable) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        """Return what decides the values of a function of offsets: `words`, the arguments, all tensors.

        None in compiled programs, which keep nothing.
        """
        if torch.compiler.is_compiling():
            return None
        arguments = tuple(getattr(self, name) for name in _arguments(type(self)))
        return (type(self), arguments, self.progress, *words), (*self.parameters(), *self.buffers())

    def value_term(self, pos: Positions, layer: int) -> ValueTerm | None:
        """Return what is added to the output of attention in block `layer`, or None."""
        del pos, layer
        return None


class Mixing(Encoding):
    """Mixes neighbouring tokens between blocks."""

    def mix(self, x: Tensor, pos: Positions, layer: int) -> Tensor:
        """Return the tokens (b, n, d) after block `layer` has been left."""
        raise NotImplementedError


@cache
def _arguments(kind: type[Encoding]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def _frozen(value: Any) -> Hashable:
    """Return an option with tuples in place of lists and dicts."""
    if isinstance(value, dict):
        return tuple((name, _frozen(one)) for name, one in cast("dict[str, Any]", value).items())
    if isinstance(value, list | tuple):
        return tuple(_frozen(one) for one in cast("list[Any]", value))
    return value
