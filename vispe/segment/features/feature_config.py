"""Configuration of the features of a pixel."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from vispe.errors import OptionError
from vispe.segment.features import micro_features
from vispe.segment.features.filters.filters2d import SIGMAS
from vispe.utils.interval import Interval
from vispe.utils.options import Integer, Options, PositiveFloat, PositiveInt

FeatureKind = Literal["filters", "tokens", "both"]
KINDS: tuple[FeatureKind, ...] = get_args(FeatureKind)
TOKEN_OPTIONS = ("token_stride", "token_shifts", "layers")
"""Options of token models; None is the default."""


@dataclass(frozen=True)
class FeatureConfig(Options):
    """Configuration of the features of a pixel; JSON-able.

    Attributes:
        kind: `'filters'`, `'tokens'` or `'both'`.
        sigmas: scales of the filters, in pixels.
        model: `'vispe_micro'`, which is shipped with the package, or a timm model.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file, `'random'` (timm), or None for the pretrained weights.
        fingerprint: SHA-256 of the weights; verified when the model is loaded again.
        tile: side of a tile in pixels; None for the default.
        components: principal components of the tokens of a timm model.
        filters_3d: add filters of the volume, for Z stacks.
        token_stride: stride of the tokens of a timm model in pixels, a divisor of its patch size (the default). The
            number of tokens grows by (patch / stride)^2, and the cost of attention by the square of that.
        token_shifts: number of sub-stride shifts per axis whose tokens are interleaved; the number of passes
            is its square. None means 2 for a timm or open_clip model with a single feature map and an even
            stride, otherwise 1.
        layers: blocks whose outputs are concatenated, negative from the end; the last if None.

    Raises:
        OptionError: an unknown kind, or options that do not apply to it.

    Example:
        >>> FeatureConfig("both", model="vispe_micro", sigmas=(1.0, 4.0)).filters_3d
        False
    """

    kind: FeatureKind = "filters"
    sigmas: tuple[PositiveFloat, ...] = SIGMAS
    model: str | None = None
    pos_embed: str | None = None
    weights: str | None = None
    fingerprint: str | None = None
    tile: Annotated[int, Interval(least=16)] | None = None
    components: PositiveInt = 32
    filters_3d: bool = False
    token_stride: PositiveInt | None = None
    token_shifts: PositiveInt | None = None
    layers: tuple[Integer, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind != "filters" and not self.model:
            raise OptionError(
                f"features={self.kind!r} needs a model. Pass model=vispe_micro or the name of a timm model."
            )
        for name in ("model", "pos_embed", "weights"):
            if self.kind == "filters" and getattr(self, name) is not None:
                value = getattr(self, name)
                raise OptionError(
                    f"{name}={value!r} has no effect on features=filters. Use features=both or tokens with a model."
                )
        if self.filters_3d and self.kind == "tokens":
            raise OptionError(
                "filters_3d=True has no effect on features=tokens. Use features=both or filters."
            )
        self._check_tokens()
        if self.model == micro_features.NAME:
            micro_features.check_options(self.pos_embed, self.token_options())

    def token_options(self) -> dict[str, Any]:
        """Return the values of `token_stride`, `token_shifts` and `layers` that are set, by name."""
        options = {name: getattr(self, name) for name in TOKEN_OPTIONS}
        return {name: value for name, value in options.items() if value is not None}

    def _check_tokens(self) -> None:
        """Raise OptionError for token options that are invalid for every model."""
        if self.kind == "filters" and (options := self.token_options()):
            name, value = next(iter(options.items()))
            raise OptionError(
                f"{name}={value!r} has no effect on features=filters. Use features=both or tokens with a model."
            )
        if self.layers is not None and (not self.layers or len(set(self.layers)) < len(self.layers)):
            listed = ",".join(map(str, self.layers)) or "none"
            raise OptionError(
                f"layers={listed} must be a non-empty list of distinct blocks. Name each block once, such as 5,8,11."
            )
