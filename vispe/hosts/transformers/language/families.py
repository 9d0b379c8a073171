"""Families of vision-language models: what a model type says of its pictures, and the scheme that it was trained with.

The language model itself is looked at, not looked up: how many rows of ids it takes, which channels are pairs, and in
which order their frequencies stand. What no module says stands here, a line for each family.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vispe.errors import UnsupportedHost
from vispe.multimodal import Scheme, create_scheme

Pictures = Literal["grids", "squares", "sizes", "rows", "places", "runs", "tiles", "one_vision"]
"""What says how large a picture is: grids of the call; the configuration, all are squares of one size (`'squares'`);
sizes of images in pixels, where they are given (`'sizes'`), with a word after every row of tokens that counts as one
more column (`'rows'`); places of patches, several of which make a token (`'places'`); tokens, of which every tile has
as many (`'runs'`); or sizes and the tiles that images are cut into, with one small copy (`'tiles'`, and with a limit
`'one_vision'`)."""
NEAR = (
    1e-2  # relative, for modules that multiply in bfloat16; neighbouring frequencies are 7 % apart and more
)
STATIC_ROPE = (
    "default",
    "linear",
    "yarn",
    "llama3",
    "proportional",
)  # frequencies do not depend on the length of a call


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        pictures: which rule finds the pictures of a call.
        own: the scheme that its models were trained with, by their configuration; with it nothing changes.
        frames_apart: frames of a video are blocks of their own, with the time of each in words between them.
        framed: frames are made of the token of images, and markers around say that they are a video.
        masked: the model without its head makes the masks of its layers, from ordinary ids.
    """

    pictures: Pictures
    own: Callable[[Any], Scheme] = lambda config: create_scheme("rope1d")
    frames_apart: bool = False
    framed: bool = False
    masked: bool = False


def _of(name: str) -> Callable[[Any], Scheme]:
    return lambda config: create_scheme(name, after="side")


def _timed(config: Any) -> Scheme:
    rate = float(config.vision_config.tokens_per_second)
    return create_scheme("mrope", after="side", tokens_per_second=rate)


def _ernie(config: Any) -> Scheme:
    rows, columns, time = config.text_config.rope_parameters.get("mrope_section", (22, 22, 20))
    return create_scheme("ernie_vl", after="side", sections=(time, rows, columns))


_QWEN3 = Family("grids", _of("mrope_i"), frames_apart=True)
_GLM = Family("grids", _of("mrope"), frames_apart=True, framed=True)

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family("grids", _of("mrope")),
    "qwen2_5_vl": Family("grids", _timed),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "glmga": _GLM,
    "glm_ocr": _GLM,
    "ernie4_5_vl_moe": Family("grids", _ernie),
    "paddleocr_vl": Family("grids", _of("mrope")),
    "llava": Family("sizes"),
    "lighton_ocr": Family("sizes"),
    "mistral3": Family("rows"),
    "vipllava": Family("squares"),
    "internvl": Family("squares"),
    "aya_vision": Family("runs"),
    "cohere2_vision": Family("runs"),
    "deepseek_vl": Family("runs"),
    "gemma3": Family("runs", masked=True),
    "gemma4": Family("places", masked=True),
    "got_ocr2": Family("runs"),
    "idefics3": Family("runs"),
    "ovis2": Family("runs"),
    "pp_chart2table": Family("runs"),
    "qianfan_ocr": Family("runs"),
    "smolvlm": Family("runs"),
    "llava_next": Family("tiles"),
    "llava_onevision": Family("one_vision"),
}


def missing(inner: Any) -> str:
    """Return what vispe lacks for a model whose family it does not know, in words that go on from 'but'."""
    config, text = inner.config, text_of(inner)
    if getattr(config, "is_encoder_decoder", False) or getattr(text.config, "is_encoder_decoder", False):
        return "its language model is an encoder and a decoder, whose positions are not those of one sequence"
    if getattr(text.config, "cross_attention_layers", None):
        return "its pictures are no tokens of the sequence: layers of their own attend to them"
    try:
        rotaries_of(text)
    except UnsupportedHost as error:
        return f"{str(error)[0].lower()}{str(error)[1:]}".rstrip(".")
    return "nothing that vispe knows says where its pictures are among the tokens, and how large they are"


def text_of(inner: Any) -> Any:
    """Return the language model inside a model without its head, or None."""
    if hasattr(inner, "language_model"):
        return inner.language_model
    # a text tower is called text_model elsewhere
    known = getattr(getattr(inner, "config", None), "model_type", None) in FAMILIES
    return getattr(inner, "text_model", None) if known else None


def family_of(config: Any) -> Family:
    """Return the family of the configuration of a model without its head, one of `FAMILIES`."""
    return FAMILIES[config.model_type]


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a language model, or of its layers of one kind.

    Attributes:
        pairs: of channels that turn; the others of a head do not.
        order: which of the frequencies turns each pair.
        interleaved: whether neighbours are pairs, and not the halves of a head.
        rows: of position ids that the language model takes: 4 where the first numbers the tokens, else 1.
        kind: of the layers, such as 'sliding_attention'; empty where all have the same frequencies.
        full: whether cosines and sines stay in float32 where the model runs in half precision.
    """

    pairs: int
    order: tuple[int, ...]
    interleaved: bool
    rows: int
    kind: str = ""
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
    def buffer(self) -> str:
        """Name of the buffer of a converted language model that says which axis turns each pair."""
        return f"vispe_axis_of_pair_{self.kind}".rstrip("_")

    def rates(self, module: Any) -> Tensor:
        """Return the frequencies (pairs,) that a module holds, pair by pair."""
        rates = getattr(module, _named(self.kind, "inv_freq"))
        return rates if self.usual else rates[list(self.order)]

    def scaling(self, module: Any) -> float:
        """Return what cosines and sines are multiplied by."""
        return getattr(module, _named(self.kind, "attention_scaling"))

    def wide(self, table: Tensor) -> Tensor:
        """Return cosines or sines (..., pairs) as the layers take them, (..., 2 pairs)."""
        return table.repeat_interleave(2, -1) if self.interleaved else torch.cat([table, table], -1)


def rotaries_of(text: Any) -> dict[str, Rotary]:
    """Return how a language model turns its queries and keys, by the kind of its layers.

    Raises:
        UnsupportedHost: it has no rotary embedding, or one of another kind.
    """
    rotary = getattr(text, "rotary_emb", torch.nn.Module())
    held = [name for name, _ in rotary.named_buffers(recurse=False)]
    ends, first = "_inv_freq", "original"
    kinds = [name.removesuffix(ends) for name in held if name.endswith(ends) and first not in name]
    if not kinds or "inv_freq" in held:
        return {"": rotary_of(text)}
    return {kind: rotary_of(text, kind) for kind in kinds}


def rotary_of(text: Any, kind: str = "") -> Rotary:
    """Return how the layers of a kind turn their queries and keys.

    Raises:
        UnsupportedHost: there is no rotary embedding, or one of another kind.
    """
    rotary = getattr(text, "rotary_emb", None)
    rates = getattr(rotary, _named(kind, "inv_freq"), None)
    if rotary is None or not isinstance(rates, Tensor):
        raise UnsupportedHost(
            f"The language model {type(text).__name__} has no rotary embedding `rotary_emb` with frequencies; position "
            "schemes need one."
        )
    rope = getattr(rotary, "rope_type", "default")
    rope = rope[kind] if kind else rope
    if rope not in STATIC_ROPE:
        raise UnsupportedHost(
            f"The language model scales its frequencies by rope_type={rope!r}, which depends on the length of a call; "
            f"position schemes go with {', '.join(STATIC_ROPE)}."
        )
    several = getattr(rotary, "mrope_section", None) is not None
    with torch.device(
        "cpu"
    ):  # where products of matrices are not rounded; on meta there are no numbers to look at
        rotary = type(rotary)(text.config) if rates.is_meta else copy.deepcopy(rotary).cpu()
    rates = getattr(rotary, _named(kind, "inv_freq"))
    at = torch.ones(1, 1, dtype=torch.long, device="cpu")
    x = torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32)  # while models load, the default is theirs
    how = (at.expand(3, 1, 1) if several else at, *((kind,) if kind else ()))
    made = rotary(x, *how)[1].flatten()
    full = rotary(x.bfloat16(), *how)[1].dtype == torch.float32
    interleaved = torch.equal(made[::2], made[1::2])
    # the sines of one step, as the module makes them, name the frequency of each pair; cosines of slow pairs are all 1
    scaling = getattr(rotary, _named(kind, "attention_scaling"))
    found, known = made[::2] if interleaved else made.chunk(2)[0], rates.float().sin() * scaling
    order = list(range(len(rates)))
    if len(found) == len(rates) and not torch.allclose(found, known, rtol=NEAR, atol=0):
        order = (found[:, None] - known).abs().argmin(1).tolist()
    permuted = sorted(order) == list(range(len(rates))) and len(found) == len(rates)
    if not permuted or not torch.allclose(found, known[order], rtol=NEAR, atol=0):
        raise UnsupportedHost(
            f"The sines that {type(rotary).__name__} makes are not those of its frequencies `inv_freq`, pair by pair; "
            "position schemes need to know which frequency turns which channels."
        )
    return Rotary(len(rates), tuple(order), interleaved, 4 if several else 1, kind, full)


def _named(kind: str, what: str) -> str:
    """Return the name under which a rotary embedding holds what belongs to layers of a kind."""
    return f"{kind}_{what}" if kind else what
