"""Opening of an image for the paint window."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vispe.errors import InputError
from vispe.images.paths import expanded
from vispe.images.read import read_image
from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.features.micro_features import NAME
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.live.paint.session import Paint
from vispe.segment.run.inputs import BatchImage, single_mask
from vispe.segment.types import ReadOptions


def open_paint(
    image: str | Path,
    out: str | Path | None = None,
    names: Sequence[str] = (),
    *,
    page: int | None = None,
    channel: str | None = None,
    axes: str | None = None,
    crop: str | None = None,
    mask: str | None = None,
    features: str | None = None,
    classifier: str = KINDS[0],
    stored_features: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
) -> Paint:
    """Read an image and create a paint session.

    Args:
        image: image file.
        out: folder for saved files; None: one next to the image.
        names: class names.
        page: index of the page of a stack, from 0; None for the middle page.
        channel: as in `vispe segment`.
        axes: as in `vispe segment`.
        crop: as in `vispe segment`.
        mask: a mask file, as in `vispe segment`.
        features: `'filters'`, `'tokens'` or `'both'`; None for both.
        classifier: as in `vispe segment`.
        stored_features: as in `vispe segment`.
        seed: as in `vispe segment`.
        device: as in `vispe segment`.
        force: overwrite existing files.

    Raises:
        InputError: an unreadable image, a store, or a page that does not exist.
    """
    path = Path(expanded(str(image)))
    if path.is_dir():
        raise InputError(
            f"{image} is a folder, but vispe paint needs an image file. Export a part of an OME-Zarr store as TIFF."
        )
    # scribbles are saved in the orientation in which vispe segment reads the image
    reading = ReadOptions(channel=channel, axes=axes, crop=crop, mask=() if mask is None else (mask,))
    micrograph = read_image(
        path,
        channel=channel,
        axes=axes,
        orientation=reading.orientation,
        crop=crop,
        mask=single_mask(reading),
    )
    number = micrograph.n_pages // 2 if page is None else page
    config = None
    if features is not None:
        config = FeatureConfig(features, model=None if features == "filters" else NAME)
    folder = path.with_name(f"{path.stem}_paint") if out is None else Path(expanded(str(out)))
    paint = Paint(
        micrograph, number, folder, names=names, features=config, classifier=classifier, seed=seed, device=device,
        force=force,
    )  # fmt: skip
    if stored_features is not None:
        image_file = BatchImage(path, mask=single_mask(reading), axes=axes)
        paint.live.use_stored_features(stored_features, image_file, reading)
    return paint
