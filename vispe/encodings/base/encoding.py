"""Base class of every positional encoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, dataclass_transform

import torch
from torch import Tensor

from vispe.attention.precision import float32_buffers, restore_buffers
from vispe.encodings.base.checkpoint import Checkpointed
from vispe.encodings.base.description import HOST_FACTS
from vispe.encodings.parts.eval_cache import EvalCache
from vispe.grid import Positions
from vispe.utils.declared_options import option_signature
from vispe.utils.options import check_options

_FIRST = (*HOST_FACTS, "axes")  # options of base classes that come first in signatures


@dataclass_transform(kw_only_default=True)
class Encoding(Checkpointed):
    """Base of every positional encoding.

    Class attributes describe the encoding: `name`, `paper` (title and link), `year`, `ndim` (accepted numbers of
    axes), `presets` (name to options), `extrapolates` (new grids need no resampling), `fused` (its bias has a form,
    such as a table of offsets, that needs no n x n mask), `encodes` (subset of `INFORMATION`), `invariant` (subset of
    `INVARIANCES`: of its contribution to attention between patches, with default options), `preset_invariant` (the
    same for presets that differ), `multi_softmax` (it implements `branches`), `reads_tokens` (it reads the tokens
    that it is added to, or that enter attention), `counts_keys` (the logit of a pair depends on other keys), `formula`
    (LaTeX, for the documentation), `tested_options` (option strings that the common tests cover).

    Annotated attributes are options, as in a dataclass: the constructor takes them as keywords, checks them by their
    annotations (`vispe.utils.options`), and calls `__post_init__`, which creates the parameters. `axes` and the
    values that the host supplies (`HOST_FACTS`) come first, then the options of the class, then those of its base
    classes. A bare assignment changes the default of an inherited option; a `ClassVar` fixes its value. If a class
    defines its own constructor, the constructor's arguments are its options.

    Raises:
        TypeError: the constructor is called with an unknown option, or without a required one.
        OptionError: the constructor is called with an option of the wrong type, or outside of its bounds.

    Example:
        >>> from vispe.encodings.base import Biased
        >>> class Tilt(Biased):
        ...     num_heads: int
        ...     strength: float = 0.1
        >>> Tilt(num_heads=2).config
        {'name': '', 'num_heads': 2, 'strength': 0.1}
    """

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
        self._eval_cache = EvalCache()
        # unknown and missing options raise TypeError, as in a function call
        bound = option_signature(type(self), Encoding, _FIRST).bind(**options)
        bound.apply_defaults()
        # past nn.Module.__setattr__, which would register modules among the options
        vars(self).update(bound.arguments)
        check_options(self, tuple(bound.arguments))
        default = torch.get_default_dtype()
        if default.itemsize >= 4:
            self.__post_init__()
            return
        # transformers builds models under the dtype of the checkpoint, in which frequencies would be rounded
        torch.set_default_dtype(torch.float32)
        try:
            self.__post_init__()
        finally:
            torch.set_default_dtype(default)
        self.to(default)

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
