"""From the name of a file to a window's page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vispe.errors import InputError
from vispe.images.paths import expanded
from vispe.images.read import read_image
from vispe.segment.features.micro_features import NAME
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.live.paint.session import Paint
from vispe.segment.run.inputs import Reading, one_mask


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
    classifier: str = "logistic",
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
) -> Paint:
    """Read an image and get ready to paint on it.

    Args:
        image: a file.
        out: folder for what is saved; None for one beside the image.
        names: of the classes.
        page: of a stack, from 0; None for the middle one.
        channel: as in `vispe segment`.
        axes: likewise.
        crop: likewise.
        mask: a file, likewise.
        features: `'filters'`, `'tokens'` or `'both'`; None for both.
        classifier: likewise.
        seed: likewise.
        device: likewise.
        force: replace files that exist.

    Raises:
        InputError: the image cannot be read, is a store, or has no such page.
    """
    path = Path(expanded(str(image)))
    if path.is_dir():
        raise InputError(
            f"{image} is a folder; vispe paint opens one image file. Of an OME-Zarr store, cut out a part as TIFF."
        )
    # strokes are saved in the frame in which vispe segment reads the image
    how = Reading(channel=channel, axes=axes, crop=crop, mask=() if mask is None else (mask,))
    found = read_image(
        path, channel=channel, axes=axes, orientation=how.orientation, crop=crop, mask=one_mask(how)
    )
    number = found.n_pages // 2 if page is None else page
    config = None
    if features is not None:
        config = FeatureConfig(features, model=None if features == "filters" else NAME)
    folder = path.with_name(f"{path.stem}_paint") if out is None else Path(expanded(str(out)))
    return Paint(
        found, number, folder, names=names, features=config, classifier=classifier, seed=seed, device=device,
        force=force,
    )  # fmt: skip
