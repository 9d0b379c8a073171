"""Readouts of patch embeddings from the last block of a CLIP image tower.

A CLIP tower is trained to map one image to one vector; its last block mixes patches for that purpose. Each readout
leaves all blocks but the last unchanged and modifies the last one, so that every patch preserves its local
information. With q, k, v of the last block and s = head_dim ** -0.5:

| name | weights | residual | MLP | source |
|---|---|---|---|---|
| vanilla | softmax(s q k) | yes | yes | the original tower |
| maskclip | identity | yes | yes | arXiv 2112.01071 |
| sclip | softmax(s q q) + softmax(s k k) | yes | yes | arXiv 2312.01597 |
| clearclip | softmax(s q q) | no | no | arXiv 2407.12442 |
| naclip | softmax(s k k + Gaussian of the distance) | no | no | arXiv 2404.08181 |

Encodings of vispe in the tower act in all readouts: rotations apply to both sides of the product, and biases
are added to the logits. NACLIP's Gaussian is itself such an encoding, `gaussian2d` on the last block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from vispe.encodings.spec import parse_text
from vispe.errors import OptionError, UnknownName, did_you_mean
from vispe.hosts.common.context import Context


@dataclass(frozen=True)
class Readout:
    """Computation of the last block.

    Attributes:
        name: name of the method.
        pairs: attention maps to be summed, each named by its two factors; empty for the identity.
        residual: whether the block's input is added to its attention.
        mlp: whether the block's MLP follows.
        sigma: standard deviation of the Gaussian on the logits, in patches; None for no Gaussian.
    """

    name: str
    pairs: tuple[str, ...]
    residual: bool
    mlp: bool
    sigma: float | None = None

    @property
    def encoding(self) -> str:
        """Spec of the bias added to the tower; active in no block if there is no Gaussian."""
        return (
            "gaussian2d(layers=[])" if self.sigma is None else f"gaussian2d(sigma={self.sigma},layers=[-1])"
        )


_KNOWN = (
    Readout("naclip", ("kk",), False, False, 5.0),
    Readout("clearclip", ("qq",), False, False),
    Readout("sclip", ("qq", "kk"), True, True),
    Readout("maskclip", (), True, True),
    Readout("vanilla", ("qk",), True, True),
)
READOUTS = {r.name: r for r in _KNOWN}


def parse_readout(text: str) -> Readout:
    """Parse ``name`` or ``name(option=value, ...)``; options are `residual`, `mlp` and, for naclip, `sigma`.

    Raises:
        UnknownName: no such readout.
        OptionError: an unknown option, or an invalid value.

    Example:
        >>> parse_readout("naclip(sigma=2)").encoding
        'gaussian2d(sigma=2.0,layers=[-1])'
    """
    terms = parse_text(text)
    name, options = terms[0] if len(terms) == 1 else (text, {})
    if name not in READOUTS:
        hint = did_you_mean(name, READOUTS)
        raise UnknownName(f"readout={text!r} is not one of {', '.join(READOUTS)}.{hint}")
    readout = READOUTS[name]
    known = ["residual", "mlp", *(["sigma"] if readout.sigma is not None else [])]
    for option, value in options.items():
        if option not in known:
            raise OptionError(f"readout {name} has no option {option!r}. Its options are {', '.join(known)}.")
        if option == "sigma":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise OptionError(
                    f"sigma of readout {name} must be a positive number of patches, got {value!r}."
                )
            options[option] = float(value)
        elif not isinstance(value, bool):
            raise OptionError(f"{option} of readout {name} must be true or false, got {value!r}.")
    return replace(readout, **options)


class ReadoutContext(Context):
    """Context of the last block, with the attention of a readout."""

    __slots__ = ("readout",)

    def __init__(self, context: Context, readout: Readout) -> None:
        state = context.positions, context.encodings, context.mask
        super().__init__(*state, context.is_causal, context.rope, context.mixed)
        self.readout = readout

    def plain_mask(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return None: stock attention cannot compute a readout."""
        return None

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, dropout_p: float
    ) -> Tensor:
        """Return the values (b, h, n, d_h) under the weights of the readout; arguments as of `Context.attend`."""
        sides = {"q": q, "k": k}
        out = None if self.readout.pairs else v
        for a, b in self.readout.pairs:
            values = super().attend(module, sides[a], sides[b], v, x, dropout_p)
            out = values if out is None else out + values
        return out
