"""Opening of images for the paint window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vispe.errors import InputError, OptionError
from vispe.images.paths import expanded
from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.micro_features import NAME
from vispe.segment.live.paint.session import Paint
from vispe.segment.out_of_core import is_store
from vispe.segment.run.image_pipeline import Reader
from vispe.segment.run.inputs import (
    BatchImage,
    expand_patterns,
    find_files,
    match_masks,
    select_images,
    single_mask,
)
from vispe.segment.types import ReadOptions


def open_paint(
    image: str | Path | Sequence[str | Path],
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
    watch: Callable[[str], None] = lambda text: None,
) -> Paint:
    """Read one or several images and create a paint session.

    Args:
        image: image file; or a list of files, folders and globs.
        out: folder for saved files; None: one next to the image, or next to the first of several.
        names: class names.
        page: index of the page of stacks, from 0; None for the middle page.
        channel: as in `vispe segment`.
        axes: as in `vispe segment`.
        crop: as in `vispe segment`.
        mask: a mask file, as in `vispe segment`; with several images also a folder or glob, matched by name.
        features: `'filters'`, `'tokens'` or `'both'`; None for both.
        classifier: as in `vispe segment`.
        stored_features: as in `vispe segment`.
        seed: as in `vispe segment`.
        device: as in `vispe segment`.
        force: overwrite existing files.
        watch: called with notes on the choice of images and masks, and on how they are read.

    Raises:
        InputError: an unreadable image, a store, a page that does not exist, or images that differ in their number of
            channels or have equal names.
    """
    # scribbles are saved in the orientation in which vispe segment reads the image
    reading = ReadOptions(channel=channel, axes=axes, crop=crop, mask=() if mask is None else (mask,))
    images = _images(image, out, reading, watch)
    config = None
    if features is not None:
        config = FeatureConfig(features, model=None if features == "filters" else NAME)
    folder = _folder(images[0].path, out)
    pages, reader = [], Reader(reading, images)
    for item in images:
        micrograph = reader.read(item.path)
        for note in micrograph.notes:
            watch(note)
        pages.append((micrograph, micrograph.n_pages // 2 if page is None else page))
    paint = Paint(
        *pages[0], folder, names=names, features=config, classifier=classifier, seed=seed, device=device,
        force=force, more=pages[1:],
    )  # fmt: skip
    if stored_features is not None:
        paint.live.use_stored_features(stored_features, images, reading)
    return paint


def _images(
    image: str | Path | Sequence[str | Path],
    out: str | Path | None,
    reading: ReadOptions,
    watch: Callable[[str], None],
) -> list[BatchImage]:
    """Return the images with their masks; a single path must be a file."""
    patterns = [image] if isinstance(image, str | Path) else list(image)
    samples = [str(pattern) for pattern in patterns if str(pattern).startswith("skimage:")]
    if out is None and samples:
        raise OptionError(
            f"{samples[0]} is in the package folder of scikit-image. Pass an output folder as out."
        )
    for pattern in patterns:
        path = Path(expanded(str(pattern)))
        if path.is_dir() and (isinstance(image, str | Path) or is_store(path)):
            raise InputError(
                f"{pattern} is a folder, but vispe paint needs an image file. Export a part of an OME-Zarr store as "
                "TIFF."
            )
    if isinstance(image, str | Path):
        images = [BatchImage(Path(expanded(str(image))))]
    else:
        files = expand_patterns(patterns, _refuse)
        images = select_images(files, (), _folder(next(iter(files)), out), watch)
    if len(images) == 1:
        images[0].mask = single_mask(reading)
    else:
        match_masks(images, find_files(reading.mask), watch)
    for item in images:
        item.axes = reading.axes
    return images


def _folder(image: Path, out: str | Path | None) -> Path:
    """Return the folder for saved files: `out`, or one next to the image."""
    return image.with_name(f"{image.stem}_paint") if out is None else Path(expanded(str(out)))


def _refuse(pattern: str, error: InputError) -> None:
    """Raise the error of a pattern without matches: no image is skipped silently."""
    del pattern
    raise error
