"""Detection of a language model's RoPE by inspecting its modules.

The detected properties are the number of rows of position ids, the channels that form pairs, the order of
their frequencies, and the layers with separate frequencies.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vispe.errors import UnsupportedHost

# relative tolerance, for modules that multiply in bfloat16; adjacent frequencies differ by at least 7 %
RTOL = 1e-2
# rope types whose frequencies do not depend on the sequence length
STATIC_ROPE = ("default", "linear", "yarn", "llama3", "proportional", "ntk_alpha")
# language models with several axes that reject a first row of ordinary ids; they expand ids (b, s) themselves
WITHOUT_ORDINARY_ROW = ("hunyuan_vl_text",)
# language models whose layers need the rotation of cached tokens as well
ALL_POSITIONS = ("qwen4_exp_text",)


@dataclass(frozen=True)
class DetectedRotary:
    """The rotary embedding of a language model, or of one kind of its layers.

    Attributes:
        pairs: number of channel pairs with a frequency; other channels of a head are not rotated.
        order: index into `inv_freq` of each pair.
        interleaved: whether adjacent channels form pairs, instead of the halves of a head.
        rows: number of rows of position ids: 4 if the first contains ordinary ids, otherwise 1.
        unrotated: indices of pairs with frequency 0.
        module: name of the module with the frequencies.
        prefix: prefix of their buffer names in the module.
        full: whether cosines and sines are float32 even if the model runs in half precision.
    """

    pairs: int
    order: tuple[int, ...]
    interleaved: bool
    rows: int
    unrotated: tuple[int, ...] = ()
    module: str = "rotary_emb"
    prefix: str = ""
    full: bool = False

    @property
    def is_ordered(self) -> bool:
        """Whether the frequencies are in the order of the pairs."""
        return self.order == tuple(range(self.pairs))

    @property
    def layout(self) -> Literal["half", "interleaved"]:
        """Which channels form pairs, as in `PairRotation`."""
        return "interleaved" if self.interleaved else "half"

    @property
    def num_rotated(self) -> int:
        """Number of pairs with a nonzero frequency."""
        return self.pairs - len(self.unrotated)

    def rates(self, text: Any) -> Tensor:
        """Return the frequency of each pair (pairs,)."""
        rates = _frequencies(getattr(text, self.module), self.prefix)
        return rates if self.is_ordered else rates[list(self.order)]

    def scaling(self, text: Any) -> float:
        """Return the factor of cosines and sines."""
        return float(getattr(getattr(text, self.module), f"{self.prefix}attention_scaling"))

    def expand(self, table: Tensor) -> Tensor:
        """Return cosines or sines (..., pairs) for all channels, (..., 2 pairs), in the layout of the layers.

        Tables that already have all channels are returned unchanged.
        """
        if table.shape[-1] == 2 * self.pairs:
            return table
        return table.repeat_interleave(2, -1) if self.interleaved else torch.cat([table, table], -1)


def _frequencies(rotary: Any, prefix: str) -> Tensor:
    """Return the frequencies of a rotary embedding, which may be scaled by a learned tensor (Mistral Large 4)."""
    rates: Tensor = getattr(rotary, f"{prefix}inv_freq")
    learned = getattr(rotary, "alpha", None)
    return rates.float() * learned.float().exp() if isinstance(learned, Tensor) else rates


def kinds_of(text: Any) -> list[str]:
    """Return the kind of each layer of a language model; '' if all have the same frequencies."""
    if hasattr(text, "rotary_emb_unscaled"):
        return list(text.rope_types)
    rotary = getattr(text, "rotary_emb", None)
    layers = len(getattr(text, "layers", None) or ("",))
    for kinds in (_groups(rotary, layers), list(getattr(text.config, "layer_types", None) or ())):
        if not hasattr(rotary, "inv_freq") and any(hasattr(rotary, f"{k}_inv_freq") for k in kinds):
            return kinds
    return [""] * layers


def _groups(rotary: Any, layers: int) -> list[str]:
    """Return the group of each layer if the rotary embedding lists groups, otherwise an empty list."""
    groups = getattr(rotary, "layer_idx_to_group", None)
    if groups is None:
        return []
    return [str(groups[number]) for number in range(layers)]


def _kind_argument(text: Any, rotary: Any, kind: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that select the tables of one kind of layers."""
    if not kind:
        return (), {}
    named = inspect.signature(rotary.forward).parameters
    grouped = kind not in (getattr(text.config, "layer_types", None) or ())
    if "layer_type" in named and not (grouped and "layer_idx" in named):
        return (), {"layer_type": kind}
    if "layer_idx" in named:
        return (), {"layer_idx": kinds_of(text).index(kind)}
    return (kind,), {}


def rotaries_of(text: Any) -> dict[str, DetectedRotary]:
    """Return the rotary embedding of each kind of layers of a language model.

    Raises:
        UnsupportedHost: the model has no rotary embedding, or it is not supported.
    """
    kinds = sorted(set(kinds_of(text)))
    if kinds == ["scaled", "unscaled"] or hasattr(text, "rotary_emb_unscaled"):
        modules = {"scaled": "rotary_emb", "unscaled": "rotary_emb_unscaled"}
        return {kind: rotary_of(text, modules[kind]) for kind in kinds}
    return {kind: rotary_of(text, kind=kind) for kind in kinds}


def rotary_of(text: Any, module: str = "rotary_emb", kind: str = "") -> DetectedRotary:
    """Return the rotary embedding of a language model, for all layers or one kind of them.

    Raises:
        UnsupportedHost: these layers have no rotary embedding, or it is not supported.
    """
    rotary = getattr(text, module, None)
    _check_rotary(text, rotary, module, kind)
    sections = getattr(rotary, "mrope_section", None)
    ordinary_row = sections is not None and text.config.model_type not in WITHOUT_ORDINARY_ROW
    prefix = f"{kind}_" if kind else ""
    # on the CPU matrix products are not rounded to TF32, and modules on the meta device are built again with values
    with torch.device("cpu"):
        if getattr(rotary, f"{prefix}inv_freq").is_meta:
            plain = {} if module == "rotary_emb" else {"scaled": False}
            rotary = type(rotary)(text.config, **plain)
        else:
            rotary = copy.deepcopy(rotary).cpu()
    rates, scaling = _frequencies(rotary, prefix).detach(), getattr(rotary, f"{prefix}attention_scaling")
    # sections of the last axes may be omitted
    rows = 1 if sections is None else max(3, len(sections))
    sines, full = _sines_at_one(text, rotary, kind, rows)
    interleaved = torch.equal(sines[::2], sines[1::2])
    order = _order_of_pairs(sines[::2] if interleaved else sines.chunk(2)[0], rates.float().sin() * scaling)
    if order is None:
        raise UnsupportedHost(
            "Position schemes need the frequency of each channel pair, but the sines of "
            f"{type(rotary).__name__} are not those of its frequencies `inv_freq`."
        )
    unrotated = tuple((rates[order] == 0).nonzero()[:, 0].tolist())
    return DetectedRotary(
        len(rates), tuple(order), interleaved, 4 if ordinary_row else 1, unrotated, module, prefix, full
    )


def _check_rotary(text: Any, rotary: Any, module: str, kind: str) -> None:
    """Raise `UnsupportedHost` if there is no rotary embedding, or one without constant frequencies or sections."""
    rates = getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq", None)
    if rotary is None or not isinstance(rates, Tensor):
        raise UnsupportedHost(
            f"Position schemes need a rotary embedding `{module}` with frequencies for "
            f"{f'layers of {kind}' if kind else 'all layers'}, got a {type(text).__name__} without."
        )
    rope = getattr(rotary, "rope_type", "default")
    rope = rope.get(kind, "default") if isinstance(rope, dict) else rope
    if rope not in STATIC_ROPE:
        raise UnsupportedHost(
            f"Position schemes support rope_type {', '.join(STATIC_ROPE)}, got {rope!r}, whose frequencies depend on "
            "the sequence length."
        )
    if hasattr(rotary, "mrope_section") and rotary.mrope_section is None:
        raise UnsupportedHost(
            f"Position schemes need sections of the channels, got mrope_section=None in {type(rotary).__name__}. Set "
            "mrope_section in rope_parameters of the configuration."
        )


def _sines_at_one(text: Any, rotary: Any, kind: str, rows: int) -> tuple[Tensor, bool]:
    """Return the sines of all channels (d) at position 1, and whether they are float32 for inputs in half precision.

    Args:
        text: the language model.
        rotary: a copy of its rotary embedding on the CPU.
        kind: kind of layers, or ''.
        rows: number of rows of position ids with one row per axis, or 1.

    Raises:
        UnsupportedHost: the output is not a pair of cosines and sines.
    """
    ids = torch.ones(1, 1, dtype=torch.long, device="cpu")
    ids = ids.expand(rows, 1, 1) if rows > 1 else ids
    x = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")  # the default dtype may differ during loading
    args, named = _kind_argument(text, rotary, kind)
    tables = rotary(x, ids, *args, **named)
    if not isinstance(tables, tuple) or len(tables) != 2:
        raise UnsupportedHost(
            "Position schemes need a rotary embedding that returns cosines and sines, got "
            f"{type(rotary).__name__} with another output."
        )
    full = rotary(x.bfloat16(), ids, *args, **named)[1].dtype == torch.float32
    return tables[1].detach().flatten(), full


def _order_of_pairs(sines: Tensor, expected: Tensor) -> list[int] | None:
    """Return the index of the frequency of each pair, or None if the sines are not a permutation of the expected ones.

    Sines at position 1 identify a frequency; cosines of low frequencies are all 1.
    """
    if len(sines) != len(expected):
        return None
    order = list(range(len(expected)))
    if not torch.allclose(sines, expected, rtol=RTOL, atol=0):
        order = (sines[:, None] - expected).abs().argmin(1).tolist()
    is_permutation = sorted(order) == list(range(len(expected)))
    return order if is_permutation and torch.allclose(sines, expected[order], rtol=RTOL, atol=0) else None
