"""A vision model by the name that a user gives: of timm, or `open_clip:`."""

from typing import Any

from torch import nn

PREFIX = "open_clip:"


def load_model(
    name: str,
    *,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: Any = None,
    any_size: bool = False,
    options: dict[str, Any] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Build a timm model, or the image tower of an open_clip model, in evaluation mode.

    Args:
        name: a timm model, `local-dir:FOLDER` or `hf-hub:OWNER/NAME`; or `open_clip:MODEL` or `open_clip:MODEL/TAG`.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file, or random; by default the pretrained weights, which an open_clip model names by its
            tag.
        img_size: side of the images in pixels.
        any_size: let a timm model take images of any size, where its class can.
        options: more arguments for `timm.create_model`.
        seed: of random weights.

    Raises:
        UnknownName: there is no such model.
        InputError: weights that are not there, cannot be fetched or do not fit.
        OptionError: an image size that the model refuses; an open_clip model with no or two sources of weights.

    >>> type(load_model("test_vit", weights="random")).__name__
    'VisionTransformer'
    """
    shared = {"pos_embed": pos_embed, "weights": weights, "img_size": img_size, "seed": seed}
    if name.startswith(PREFIX):
        from vispe.backbones.open_clip import load_tower

        return load_tower(name.removeprefix(PREFIX), **shared)
    from vispe.backbones.timm import load_backbone

    return load_backbone(name, any_size=any_size, options=options, **shared)


def names_weights(name: str) -> bool:
    """Return whether the name of a model says which weights it has and takes no others: `open_clip:MODEL/TAG`.

    >>> names_weights("open_clip:ViT-B-32/openai"), names_weights("vit_small_patch14_dinov2")
    (True, False)
    """
    return name.startswith(PREFIX) and "/" in name
