"""Families of vision-language models: how image sizes are passed, and the scheme that the models were trained with.

Properties of the language model itself are detected in `rotary_detection`. This table contains properties
that cannot be detected, with one line per model type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vispe.multimodal import Scheme, create_scheme

Pictures = Literal[
    "grids", "newline_grids", "squares", "sizes", "runs", "patch_positions", "patches", "regions", "tiles", "one_vision"
]  # fmt: skip
"""How the sizes of images are determined: from grids in the call (`'grids'`), also with a token after each row and at
both ends of an image (`'newline_grids'`); from the configuration, all squares of
one size (`'squares'`); from sizes in pixels, if passed, with an optional token after each row (`'sizes'`); from the
number of tokens, equal for all tiles (`'runs'`); from the position of every patch (`'patch_positions'`); from the
number of patches before merging (`'patches'`); from grids of the thumbnail and the image (`'regions'`); or from sizes
and tiles, with one thumbnail (`'tiles'`, and with an upper bound `'one_vision'`)."""


@dataclass(frozen=True)
class LanguageFamily:
    """A family of models.

    Attributes:
        image_layout: how the sizes of images are determined.
        own: function from a configuration to the scheme that the model was trained with.
        separate_frames: whether the frames of a video are separate blocks, with timestamps as text between them.
        framed: whether video frames consist of image tokens, between markers of a video.
        masks: whether the model around the language model creates masks itself, from ordinary position ids.
    """

    image_layout: Pictures
    own: Callable[[Any], Scheme] = lambda config: create_scheme("rope1d")
    separate_frames: bool = False
    framed: bool = False
    masks: bool = False


def _of(name: str) -> Callable[[Any], Scheme]:
    return lambda config: create_scheme(name, after="side")


def _timed(config: Any) -> Scheme:
    rate = float(config.vision_config.tokens_per_second)
    return create_scheme("mrope", after="side", tokens_per_second=rate)


def _ernie(config: Any) -> Scheme:
    rows, columns, time = config.text_config.rope_parameters.get("mrope_section", (22, 22, 20))
    return create_scheme("ernie_vl", after="side", sections=(time, rows, columns))


def _hunyuan(config: Any) -> Scheme:
    sections = (config.text_config.rope_parameters or {}).get("mrope_section")
    sections = None if sections is None else tuple(sections)
    return create_scheme("xdrope", sections=sections, layout="elementwise", image_index="batch")


def _clocked(name: str) -> Callable[[Any], Scheme]:
    return lambda config: create_scheme(name, tokens_per_second=float(config.position_id_per_seconds))


_QWEN3 = LanguageFamily("grids", _of("mrope_i"), separate_frames=True)
_GLM = LanguageFamily("grids", _of("mrope"), separate_frames=True, framed=True)

FAMILIES: dict[str, LanguageFamily] = {
    "qwen2_vl": LanguageFamily("grids", _of("mrope")),
    "qwen2_5_vl": LanguageFamily("grids", _timed),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "glmga": _GLM,
    "glm_ocr": _GLM,
    "ernie4_5_vl_moe": LanguageFamily("grids", _ernie),
    "paddleocr_vl": LanguageFamily("grids", _of("mrope")),
    "hunyuan_vl": LanguageFamily("newline_grids", _hunyuan),
    "qwen2_5_omni_thinker": LanguageFamily("grids", _clocked("tmrope")),
    "qwen3_omni_moe_thinker": LanguageFamily("grids", _clocked("tmrope_i")),
    "llava": LanguageFamily("sizes"),
    "lighton_ocr": LanguageFamily("sizes"),
    "mistral3": LanguageFamily("sizes"),
    "vipllava": LanguageFamily("squares"),
    "internvl": LanguageFamily("squares"),
    "aya_vision": LanguageFamily("runs"),
    "cohere2_vision": LanguageFamily("runs"),
    "deepseek_vl": LanguageFamily("runs"),
    "got_ocr2": LanguageFamily("runs"),
    "idefics3": LanguageFamily("runs"),
    "ovis2": LanguageFamily("runs"),
    "pp_chart2table": LanguageFamily("runs"),
    "qianfan_ocr": LanguageFamily("runs"),
    "smolvlm": LanguageFamily("runs"),
    "gemma3": LanguageFamily("runs", masks=True),
    "gemma3n": LanguageFamily("runs"),
    "gemma4": LanguageFamily("patch_positions", masks=True),
    "minicpmv4_6": LanguageFamily("patches"),
    "molmo2": LanguageFamily("regions", masks=True),
    "llava_next": LanguageFamily("tiles"),
    "llava_onevision": LanguageFamily("one_vision"),
}


def language_model_of(inner: Any) -> Any:
    """Return the language model inside a model without its head, or None."""
    if hasattr(inner, "language_model"):
        return inner.language_model
    # in other models, such as CLIP, text_model is a text tower
    known = getattr(getattr(inner, "config", None), "model_type", None) in FAMILIES
    return getattr(inner, "text_model", None) if known else None


def model_inside(model: Any) -> Any:
    """Return the model without its head."""
    return model.model if language_model_of(getattr(model, "model", None)) is not None else model


def family_of(config: Any) -> LanguageFamily:
    """Return the family, one of `FAMILIES`, for the configuration of a model without its head."""
    return FAMILIES[config.model_type]
