"""Reasons why other timm models do not support encodings, and the nearest supported model."""

from __future__ import annotations

from torch import nn

_RELATIVE = "adds a relative position table of its own inside every attention, and its blocks take no mask"
_WINDOWS = "attends inside windows of a grid that shrinks from stage to stage, so one grid does not describe its tokens"
_STAGES = "attends on grids that shrink from stage to stage, so one grid does not describe its tokens"
_POOLED = "attends from tokens to a pooled grid"
_CHANNELS = "attends between channels, where tokens have no distance"
_CONVOLUTIONS = (
    "is a convolutional network, so there is no attention between tokens that an encoding could enter"
)
_LINEAR = "has linear attention, which never forms the logits that an encoding changes"
_ENCODER = "is the encoder of a language model, with blocks and a rotary embedding of its own"
_HYBRID = "consists of stages of convolutions and attention or similar layers, not of transformer blocks on one grid"

# class name: why it cannot be converted
REASONS: dict[str, str] = {
    "Beit": _RELATIVE,
    "VisionTransformerRelPos": _RELATIVE,
    "Levit": _RELATIVE,
    "LevitDistilled": _RELATIVE,
    "EfficientFormer": _RELATIVE,
    "EfficientFormerV2": _RELATIVE,
    "SwinTransformerV2Cr": _WINDOWS,
    "Hiera": _WINDOWS,
    "HieraDet": _WINDOWS,
    "GlobalContextVit": _WINDOWS,
    "Nest": _WINDOWS,
    "TinyVit": _WINDOWS,
    "EfficientVitMsra": _WINDOWS,
    "CoaT": _STAGES,
    "PoolingVisionTransformer": _STAGES,
    "Visformer": _STAGES,
    "NextViT": _POOLED,
    "PyramidVisionTransformerV2": _POOLED,
    "Twins": "alternates windowed attention with attention to pooled tokens",
    "MultiScaleVit": "pools queries and keys to different grids in one attention",
    "Cait": "excludes its class token from the first blocks and mixes heads inside attention",
    "Xcit": _CHANNELS,
    "EdgeNeXt": _CHANNELS,
    "DaVit": "alternates windowed attention with attention between channels",
    "VOLO": "mixes outlook attention with two grids of tokens",
    "CrossVit": "runs two branches with grids of their own",
    "ConVit": "mixes attention by content with attention by position of its own (`vispe convert-weights` converts its "
    "weights to those of a plain ViT with gpsa)",
    "TNT": "runs a second transformer inside every patch",
    "EfficientVit": _LINEAR,
    "EfficientVitLarge": _LINEAR,
    "SwiftFormer": _LINEAR,
    "MlpMixer": "mixes tokens by matrices with an entry for every pair of positions, which encode position already",
    "Sequencer2d": "reads tokens in order, row by row and column by column, and has no attention",
    "Gemma4VitClassifier": _ENCODER,
    "Gemma4VitEncoder": _ENCODER,
    "Qwen3VitClassifier": _ENCODER,
    "Qwen3VitEncoder": _ENCODER,
    "DeepseekVitClassifier": _ENCODER,
    "DeepseekVitEncoder": _ENCODER,
    "ByobNet": _HYBRID,
    "CPUBone": _HYBRID,
    "CSATv2": _HYBRID,
    "EfficientViM": _HYBRID,
    "FastVit": _HYBRID,
    "FocalNet": _HYBRID,
    "IFormer": _HYBRID,
    "LowFormer": _HYBRID,
    "MetaFormer": _HYBRID,
    "MobileNetV5": _HYBRID,
    "MobileNetV5Encoder": _HYBRID,
    "SHViT": _HYBRID,
} | dict.fromkeys(
    (
        "ConvMixer", "ConvNeXt", "CspNet", "CspNext", "DLA", "DPN", "DenseNet", "EfficientNet", "FasterNet", "GhostNet",
        "HighPerfGpuNet", "HighResolutionNet", "InceptionResnetV2", "InceptionV3", "InceptionV4", "LCNetV2", "MambaOut",
        "MetaNeXt", "MobileNetV3", "NASNetALarge", "NormFreeNet", "PNASNet5Large", "RDNet", "RegNet", "RepGhostNet",
        "RepVit", "ResNet", "ResNetV2", "RexNet", "SENet", "SelecSls", "StarNet", "TResNet", "VGG", "VovNet",
        "Xception", "XceptionAligned",
    ),
    _CONVOLUTIONS,
)  # fmt: skip


def refusal(cls: type[nn.Module]) -> str:
    """Return a message with the reason why models of class `cls` cannot be converted, and an alternative."""
    names = [c.__name__ for c in cls.__mro__]
    reason = next(
        (REASONS[n] for n in names if n in REASONS),
        "is not a plain stack of transformer blocks that pass a mask to their attention",
    )
    return (
        f"{cls.__name__} does not support encodings of vispe: it {reason}. Use 'vit_base_patch16_224', "
        "'vit_base_patch16_rope_224' or 'naflexvit_base_patch16_gap' with pos_embed=..., or vispe.Attention in your "
        "own blocks."
    )
