"""Base classes of encodings: additive, rotary, bias and mixing (samplers: `vispe.encodings.parts.positions.sampler`).

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
from vispe.encodings.saved_spec import check_same_spec, keep, saved_grid
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Grid, Positions
from vispe.utils.options import check_options, option_signature

HOST_FACTS = ("dim", "num_heads", "head_dim", "depth", "grid")
INFORMATION = ("distance", "direction", "position", "content")  # information that an encoding can provide
INVARIANCES = (
    "translation",
    "quarter_turns",
    "reflection",
    "rotation",
)  # of the encoding's contribution to attention
_FIRST = (*HOST_FACTS, "axes")  # options of base classes that come first in signatures


@dataclass_transform(kw_only_default=True)
class Encoding(nn.Module):
    """Base of every positional encoding.

    Class attributes describe the encoding: `name`, `paper` (title and link), `year`, `ndim` (accepted numbers of
    axes), `presets` (name to options), `extrapolates` (new grids need no resampling), `fused` (its bias has a form,
    such as a table of offsets, that needs no n x n mask), `encodes` (subset of `INFORMATION`), `invariant` (subset of
    `INVARIANCES`: of its contribution to attention between patches, with default options), `preset_invariant` (the
    same for presets that differ), `multi_softmax` (it implements `branches`), `reads_tokens` (it reads the tokens
    that it is added to, or that enter attention), `formula` (LaTeX, for the documentation), `tested_options` (option
    strings that the common tests cover).

    Annotated attributes are options, as in a dataclass: the constructor takes them as keywords, checks them by their
    annotations (`vispe.utils.options`), and calls `__post_init__`, which creates the parameters. `axes` and the
    values that the host supplies (`HOST_FACTS`) come first, then the options of the class, then those of its base
    classes. A bare assignment changes the default of an inherited option; a `ClassVar` fixes its value. If a class
    defines its own constructor, the constructor's arguments are its options.

    Raises:
        TypeError: the constructor is called with an unknown option, or without a required one.
        OptionError: the constructor is called with an option of the wrong type, or outside of its bounds.

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
    progress: float = 1.0  # completed fraction of the training, see `set_progress`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # classes with a constructor have its signature, all others that of their options
        if cls.__init__ is Encoding.__init__:
            cls.__signature__ = option_signature(cls, Encoding, _FIRST)
        else:
            signature = inspect.signature(cls.__init__)
            cls.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._eval_cache = Kept()
        # unknown and missing options raise TypeError, as in a function call
        bound = option_signature(type(self), Encoding, _FIRST).bind(**options)
        bound.apply_defaults()
        # past nn.Module.__setattr__, which would register modules among the options
        vars(self).update(bound.arguments)
        check_options(self, tuple(bound.arguments))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check combinations of options and create the parameters; called by the constructor."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the module; buffers (fixed frequencies) are never cast to half precision."""
        # read before the cast rounds them
        buffers = float32_buffers(self)
        parent: Any = super()
        moved = parent._apply(fn, recurse)
        restore_buffers(self, buffers)
        return moved

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

    @property
    def per_layer(self) -> bool:
        """Whether every layer has its own parameters; hosts then build one instance per attention layer."""
        return False

    @property
    def prefix_from(self) -> int:
        """Index of the first block that prefix tokens enter; only timm's plain ViT supports values above 0."""
        return 0

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Return the positions of one forward pass, with every random draw made (into `Positions.attrs`).

        Hosts call it once per forward, outside checkpointed blocks. It must not read parameters, and returns
        positions that are already prepared unchanged.

        Args:
            pos: positions of the input.
            generator: source of the draws; the global one by default.
            draws: values to use instead of drawing, by name.
        """
        del generator, draws
        return pos

    def on_progress(self, progress: float, seed: int | None) -> None:
        """Set the completed fraction of the training and the seed of the next draws; see `set_progress`."""
        del seed
        self.progress = progress

    def reset_parameters(self) -> None:
        """Initialise the parameters."""

    def truncate(self, depth: int) -> None:
        """Drop the parameters of blocks from `depth` on, after the model was truncated."""

    def restrict(self, layer: int) -> None:
        """Drop the parameters of all blocks but `layer`, for hosts with one instance per block."""
        del layer

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters excluded from weight decay: all of them."""
        return {name for name, _ in self.named_parameters()}

    def parts(self) -> tuple[Encoding, ...]:
        """Return the component encodings; for a single encoding, itself."""
        return (self,)

    def active(self, layer: int) -> bool:
        """Whether the encoding has an effect in block `layer`; hosts create no parameters where it has none."""
        del layer
        return True

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename entries of released checkpoints to the parameter names of this module, in place.

        Args:
            state_dict: state dict that is being loaded.
            parent_prefix: prefix of the module that contains this encoding.
            prefix: prefix of this encoding.
        """

    def resample_checkpoint(
        self, state_dict: dict[str, Any], prefix: str, grid: tuple[int, ...] | None
    ) -> None:
        """Resample entries of another grid to the grid of this module, in place; the default has none.

        Args:
            state_dict: state dict that is being loaded.
            prefix: prefix of this encoding.
            grid: shape of the grid of the entries; None if unknown, so that it is inferred from their sizes.

        Raises:
            EncodingMismatch: the entries cannot be resampled.
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
        check_same_spec(local_metadata, self._terms(), f"module {prefix.removesuffix('.') or self.name}")
        # before the shapes are compared
        self.resample_checkpoint(state_dict, prefix, saved_grid(local_metadata))
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


class Additive(Encoding):
    """Encoding that adds a vector to every token, once, after patch embedding.

    The vectors are the `table` of positions; an encoding with `reads_tokens` has no table and overrides `embed`.

    Raises:
        NotImplementedError: a host calls a subclass that does not define `table`.

    Example:
        >>> from vispe import Grid
        >>> import torch
        >>> class Ones(Additive):
        ...     dim: int
        ...     def table(self, pos, image=None):
        ...         return torch.ones(1, pos.tokens, self.dim)
        ...
        >>> Ones(dim=4).embed(torch.zeros(2, 6, 4), Grid((2, 3)).positions())[0, 0]
        tensor([1., 1., 1., 1.])
    """

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the table (1 or b, n, d) in float32; 0 for tokens without a position unless documented otherwise."""
        raise NotImplementedError

    def embed(self, x: Tensor, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the tokens (b, n, d) plus the table, in their dtype; called by hosts."""
        return x + self.table(pos, image).to(x.dtype)


class Rotary(Encoding):
    """Encoding that transforms queries and keys (optionally values and outputs) inside attention.

    Attributes:
        scales_channels: it only scales or shifts channels by their content, so it can precede a rotation.

    Raises:
        NotImplementedError: a host calls a subclass that does not define `transform`.

    Example:
        >>> from vispe import Grid
        >>> from vispe.attention import Affine
        >>> import torch
        >>> class Doubled(Rotary):
        ...     def transform(self, pos, layer, x=None):
        ...         return Affine(q_mul=torch.tensor(2.0))
        ...
        >>> Doubled().transform(Grid((1, 1)).positions(), layer=0).query(torch.ones(1, 1, 1, 2))
        tensor([[[[2., 2.]]]])
    """

    scales_channels: ClassVar[bool] = False

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the transform of block `layer`; the identity for tokens without a position."""
        raise NotImplementedError


class Biased(Encoding):
    """Encoding that adds a bias to the attention logits.

    Raises:
        NotImplementedError: a host calls a subclass that does not define `bias`.

    Example:
        >>> from vispe import Grid
        >>> from vispe.attention import DistanceBias
        >>> class Nearby(Biased):
        ...     slope: float = 0.5
        ...     def bias(self, pos, layer, x=None):
        ...         return DistanceBias((self.slope,), pos)
        ...
        >>> Nearby(slope=0.25).bias(Grid((1, 3)).positions(), layer=0).dense()[0, 0]
        tensor([[-0.0000, -0.2500, -0.5000],
                [-0.2500, -0.0000, -0.2500],
                [-0.5000, -0.2500, -0.0000]])
    """

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias of block `layer`, or None.

        Args:
            pos: positions of the tokens.
            layer: index of the block.
            x: the block's input to attention (b, n, d), for encodings with gates.
        """
        raise NotImplementedError

    def _made_of(self, *extra: Hashable) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        """Return the cache key of a function of offsets (`extra`, options) and the tensors that it reads.

        None under compilation, where nothing is cached.
        """
        if torch.compiler.is_compiling():
            return None
        arguments = tuple(getattr(self, name) for name in _arguments(type(self)))
        # the progress determines the active bands of some encodings
        return (type(self), arguments, self.progress, *extra), (*self.parameters(), *self.buffers())

    def query_factor(self, pos: Positions, layer: int) -> Tensor | None:
        """Return the factor of the queries (b or 1, h or 1, n or 1, 1) in block `layer`, or None.

        It scales the product of queries and keys, not the bias.
        """
        del pos, layer
        return None

    def value_term(self, pos: Positions, layer: int) -> ValueTerm | None:
        """Return the term added to the attention output in block `layer`, or None."""
        del pos, layer
        return None


class Mixing(Encoding):
    """Encoding that mixes neighbouring tokens between blocks.

    Raises:
        NotImplementedError: a host calls a subclass that does not define `mix`.

    Example:
        >>> from vispe import Grid
        >>> import torch
        >>> class Neighbours(Mixing):
        ...     def mix(self, x, pos, layer):
        ...         return x + x.roll(1, dims=1)
        ...
        >>> Neighbours().mix(torch.ones(1, 4, 2), Grid((2, 2)).positions(), layer=0).shape
        torch.Size([1, 4, 2])
    """

    def mix(self, x: Tensor, pos: Positions, layer: int) -> Tensor:
        """Return the mixed tokens (b, n, d); called after block `layer`."""
        raise NotImplementedError


@cache
def _arguments(kind: type[Encoding]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def _frozen(value: Any) -> Hashable:
    """Return the option with lists and dicts replaced by tuples, hashable."""
    if isinstance(value, dict):
        return tuple((name, _frozen(one)) for name, one in cast("dict[str, Any]", value).items())
    if isinstance(value, list | tuple):
        return tuple(_frozen(one) for one in cast("list[Any]", value))
    return value
