"""How a language model turns its queries and keys: looked at, not looked up.

How many rows of ids it takes, which channels are pairs, in which order their frequencies stand, and which layers have
frequencies of their own.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vispe.errors import UnsupportedHost

# relative, for modules that multiply in bfloat16; neighbouring frequencies are 7 % apart and more
NEAR = 1e-2
# whose frequencies do not depend on the length of a call
STATIC_ROPE = ("default", "linear", "yarn", "llama3", "proportional")


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a language model, or of one kind of its layers.

    Attributes:
        pairs: of channels that turn; the others of a head do not.
        order: which of `inv_freq` turns each pair.
        interleaved: whether neighbours are pairs, and not the halves of a head.
        rows: of position ids that the language model takes: 4 where the first numbers the tokens, else 1.
        still: pairs whose frequency is 0.
        module: which of the language model has the frequencies.
        prefix: of their name in there.
        full: whether cosines and sines stay in float32 where the model runs in half precision.
    """

    pairs: int
    order: tuple[int, ...]
    interleaved: bool
    rows: int
    still: tuple[int, ...] = ()
    module: str = "rotary_emb"
    prefix: str = ""
    full: bool = False

    @property
    def usual(self) -> bool:
        """Whether frequencies stand in the order of their pairs."""
        return self.order == tuple(range(self.pairs))

    @property
    def layout(self) -> Literal["half", "interleaved"]:
        """Which channels are pairs, in the words of `PairRotation`."""
        return "interleaved" if self.interleaved else "half"

    @property
    def turning(self) -> int:
        """How many pairs turn."""
        return self.pairs - len(self.still)

    def rates(self, text: Any) -> Tensor:
        """Return the frequency of each pair (pairs,)."""
        rates: Tensor = getattr(getattr(text, self.module), f"{self.prefix}inv_freq")
        return rates if self.usual else rates[list(self.order)]

    def scaling(self, text: Any) -> float:
        """Return what cosines and sines are multiplied by."""
        return float(getattr(getattr(text, self.module), f"{self.prefix}attention_scaling"))

    def wide(self, table: Tensor) -> Tensor:
        """Return cosines or sines (..., pairs) as the layers take them, (..., 2 pairs)."""
        return table.repeat_interleave(2, -1) if self.interleaved else torch.cat([table, table], -1)


def kinds_of(text: Any) -> list[str]:
    """Return the kind of each layer of a language model; '' where all have the same frequencies."""
    if hasattr(text, "rotary_emb_unscaled"):
        return list(text.rope_types)
    rotary = getattr(text, "rotary_emb", None)
    layers = len(getattr(text, "layers", None) or ("",))
    for kinds in (_groups(rotary, layers), list(getattr(text.config, "layer_types", None) or ())):
        if not hasattr(rotary, "inv_freq") and any(hasattr(rotary, f"{k}_inv_freq") for k in kinds):
            return kinds
    return [""] * layers


def _groups(rotary: Any, layers: int) -> list[str]:
    """Return the group of each layer, where the rotary embedding lists them; else an empty list."""
    groups = getattr(rotary, "layer_idx_to_group", None)
    if groups is None:
        return []
    return [str(groups[number]) for number in range(layers)]


def _kind_argument(text: Any, rotary: Any, kind: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the arguments, by position and by keyword, that say for which kind of layers tables are asked."""
    if not kind:
        return (), {}
    named = inspect.signature(rotary.forward).parameters
    grouped = kind not in (getattr(text.config, "layer_types", None) or ())
    if "layer_type" in named and not (grouped and "layer_idx" in named):
        return (), {"layer_type": kind}
    if "layer_idx" in named:
        return (), {"layer_idx": kinds_of(text).index(kind)}
    return (kind,), {}


def rotaries_of(text: Any) -> dict[str, Rotary]:
    """Return how each kind of the layers of a language model turns queries and keys.

    Raises:
        UnsupportedHost: it has no rotary embedding, or one of another kind.
    """
    kinds = sorted(set(kinds_of(text)))
    if kinds == ["scaled", "unscaled"] or hasattr(text, "rotary_emb_unscaled"):
        modules = {"scaled": "rotary_emb", "unscaled": "rotary_emb_unscaled"}
        return {kind: rotary_of(text, modules[kind]) for kind in kinds}
    return {kind: rotary_of(text, kind=kind) for kind in kinds}


def rotary_of(text: Any, module: str = "rotary_emb", kind: str = "") -> Rotary:
    """Return how a language model turns its queries and keys, in all layers or in those of a kind.

    Raises:
        UnsupportedHost: it has no rotary embedding for these layers, or one of another kind.
    """
    prefix = f"{kind}_" if kind else ""
    rotary = getattr(text, module, None)
    rates = getattr(rotary, f"{prefix}inv_freq", None)
    if rotary is None or not isinstance(rates, Tensor):
        raise UnsupportedHost(
            f"The language model {type(text).__name__} has no rotary embedding `{module}` with frequencies for "
            f"{f'its layers of {kind}' if kind else 'all layers'}; position schemes need them."
        )
    rope = getattr(rotary, "rope_type", "default")
    rope = rope.get(kind, "default") if isinstance(rope, dict) else rope
    if rope not in STATIC_ROPE:
        raise UnsupportedHost(
            f"The language model scales its frequencies by rope_type={rope!r}, which depends on the length of a call; "
            f"position schemes go with {', '.join(STATIC_ROPE)}."
        )
    several = getattr(rotary, "mrope_section", None) is not None
    # products of matrices are not rounded on the CPU; on meta there are no numbers to look at
    with torch.device("cpu"):
        if rates.is_meta:
            plain = {} if module == "rotary_emb" else {"scaled": False}
            rotary = type(rotary)(text.config, **plain)
        else:
            rotary = copy.deepcopy(rotary).cpu()
    rates, scaling = (getattr(rotary, prefix + name) for name in ("inv_freq", "attention_scaling"))
    at = torch.ones(1, 1, dtype=torch.long, device="cpu")
    x = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")  # loading has set another default
    ids = at.expand(3, 1, 1) if several else at
    args, named = _kind_argument(text, rotary, kind)
    tables = rotary(x, ids, *args, **named)
    if not isinstance(tables, tuple) or len(tables) != 2:
        raise UnsupportedHost(
            f"The rotary embedding {type(rotary).__name__} does not return cosines and sines; position schemes need "
            "them."
        )
    made = tables[1].flatten()
    full = rotary(x.bfloat16(), ids, *args, **named)[1].dtype == torch.float32
    interleaved = torch.equal(made[::2], made[1::2])
    # the sines of one step, as the module makes them, name the frequency of each pair; cosines of slow pairs are all 1
    found = made[::2] if interleaved else made.chunk(2)[0]
    known = rates.float().sin() * scaling
    order = list(range(len(rates)))
    if len(found) == len(rates) and not torch.allclose(found, known, rtol=NEAR, atol=0):
        order = (found[:, None] - known).abs().argmin(1).tolist()
    permuted = sorted(order) == list(range(len(rates))) and len(found) == len(rates)
    if not permuted or not torch.allclose(found, known[order], rtol=NEAR, atol=0):
        raise UnsupportedHost(
            f"The sines that {type(rotary).__name__} makes are not those of its frequencies `inv_freq`, pair by pair; "
            "position schemes need to know which frequency turns which channels."
        )
    still = tuple((rates[order] == 0).nonzero()[:, 0].tolist())
    return Rotary(len(rates), tuple(order), interleaved, 4 if several else 1, still, module, prefix, full)
