"""`vispe features`: model outputs of images, computed once for later segmentations."""

from typing import Literal

POSITIONALS = ("images",)
SHORT = {"out": "-o"}
ADVANCED = ("pos_embed", "token_stride", "token_shifts", "layers", "scene", "orientation", "tile")


def features(
    images: list[str],
    out: str,
    features: Literal["tokens", "both"] = "both",
    model: str = "vispe_micro",
    pos_embed: str | None = None,
    weights: str | None = None,
    token_stride: int | None = None,
    token_shifts: int | None = None,
    layers: list[int] | None = None,
    channel: str | None = None,
    z: str | None = None,
    axes: str | None = None,
    scene: str | None = None,
    orientation: Literal["stored", "tag"] = "stored",
    crop: str | None = None,
    mask: list[str] | None = None,
    normalize: Literal["stack", "image", "none"] = "stack",
    clip: list[float] | None = None,
    tile: int | None = None,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    json: bool = False,
) -> int:
    """Compute the outputs of the model of patch tokens once, for later segmentations of the same images.

    Writes NAME_features_0000.safetensors for each page into OUT, which `vispe segment`, `apply`, `paint` and `suggest`
    read with --stored-features OUT. The results are identical. Worthwhile for large timm models, on a machine with a
    GPU. Filters are not stored, since they are computed about as fast as they are read.

    Args:
        images: image files, folders or globs; no OME-Zarr stores.
        out: folder for the features.
        features: as for vispe segment; tokens and both (default) store the same.
        model: as for vispe segment.
        token_stride: stride of the patch embedding of a timm model in pixels.
        token_shifts: number of sub-stride shifts per axis whose features are interleaved.
        layers: indices of the blocks of the timm model whose outputs are concatenated, such as 5,8,11.
        normalize: grey limits per file (stack), per page (image), or none; as in the later segmentation.
        json: print the files of each image as JSON.

    Examples:
        vispe features run/*.tif --model vit_small_patch14_dinov2 -o features
        vispe segment run/*.tif --labels run_labels/ --model vit_small_patch14_dinov2 --stored-features features -o out
    """
    from json import dumps

    from vispe.cli.segmentation_console import Console
    from vispe.cli.terminal import one_line
    from vispe.errors import counted
    from vispe.segment.features.feature_config import FeatureConfig
    from vispe.segment.pipeline import store_features
    from vispe.segment.types import ReadOptions

    config = FeatureConfig(
        features,
        model=model,
        pos_embed=pos_embed,
        weights=weights,
        tile=tile,
        token_stride=token_stride,
        token_shifts=token_shifts,
        layers=None if layers is None else tuple(layers),
    )
    limits = tuple(clip) if clip else (0.5, 99.5)
    reading = ReadOptions(channel, z, axes, normalize, limits, scene, orientation, crop, mask or ())
    with Console(True, globals()["features"], POSITIONALS) as console:
        stored = store_features(
            images, out, features=config, reading=reading, seed=seed, device=device, force=force,
            watch=console,
        )  # fmt: skip
    if json:
        print(dumps({"images": stored.images, "failures": stored.failures}, indent=2))
    for record in () if json else stored.images:
        pages, size = counted(record["pages"], "page"), f"{record['bytes'] / 1e6:.1f} MB"
        print(one_line(f"{record['image']}: {pages}, {size} -> {record['files'][0]}"))
    return 1 if stored.failures else 0
