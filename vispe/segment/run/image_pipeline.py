"""Pipeline of one image: read, normalise, segment page by page, write."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vispe.errors import OptionError
from vispe.images.normalize import normalize
from vispe.images.read import Micrograph, read_image
from vispe.images.write import label_suffix, write_labels, write_png, write_probabilities
from vispe.segment.features.filters.filters3d import Stack
from vispe.segment.model.model_file import Model
from vispe.segment.model.prediction import Segmenter, within_memory
from vispe.segment.overlays import overlay, uncertainty_image
from vispe.segment.run.inputs import BatchImage
from vispe.segment.types import Prediction, ReadOptions


@dataclass(frozen=True, eq=False)
class Grey:
    """A normalised image.

    Attributes:
        image: the image as stored.
        pages: (z, h, w, c) float32 in [0, 1].
        stack: the volumes that the pages belong to, for 3D filters; None without these.
        notes: messages for the user.
    """

    image: Micrograph
    pages: np.ndarray
    stack: Stack | None
    notes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width."""
        return self.pages.shape[1:3]

    @property
    def exclusions(self) -> tuple[str, ...]:
        """Messages about excluded pixels."""
        return tuple(self.image.exclusions)

    def page(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return grey levels (h, w, c) and the mask (h, w) of pixels with data."""
        return self.pages[number], self.image.valid[number]

    def have_data(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Return which pixels y * w + x (n,) of a page have data, as (n,) bool."""
        return self.image.valid[number].ravel()[indices]


class Reader:
    """Reader of normalised images with a cache of the last one, which training, prediction and report share.

    Args:
        reading: options.
        images: mask and axes of each image, where these differ from `reading`.
    """

    def __init__(self, reading: ReadOptions, images: Sequence[BatchImage] = ()) -> None:
        self.reading, self._images = reading, {image.path: image for image in images}
        self._image: tuple[Path, Micrograph] | None = None
        self._pages: tuple[Micrograph, np.ndarray, list[str]] | None = None

    def read(self, path: Path) -> Micrograph:
        """Read an image."""
        if self._image is None or self._image[0] != path:
            options, self._pages = self.reading, None
            entry = self._images.get(path, BatchImage(path))
            micrograph = read_image(
                path,
                channel=options.channel,
                z=options.z,
                axes=entry.axes or options.axes,
                scene=options.scene,
                orientation=options.orientation,
                crop=options.crop,
                mask=entry.mask,
            )
            self._image = path, micrograph
        return self._image[1]

    def grey(self, path: Path, config: object, trust: bool) -> Grey:
        """Read an image and normalise it.

        Args:
            path: the image.
            config: configuration of the features; determines whether volumes are needed.
            trust: whether pages will be rotated.

        Raises:
            InputError: 3D filters, but the image is not a Z stack.
            OptionError: 3D filters together with `trust`.
        """
        image = self.read(path)
        if self._pages is None or self._pages[0] is not image:
            self._pages = image, *normalize(image, self.reading.normalize, self.reading.clip)
        _, pages, notes = self._pages
        stack = None
        if getattr(config, "filters_3d", False):
            if trust:
                raise OptionError(
                    "trust rotates single pages, but 3D filters need several. Omit trust, or train without filters_3d."
                )
            stack = Stack(image, pages)
        more = () if stack is None else stack.notes
        return Grey(image, pages, stack, (*image.notes, *image.exclusions, *notes, *more))


def predict(
    grey: Grey, by: Segmenter, step: Callable[[float], None], note: Callable[[str], None]
) -> list[Prediction]:
    """Segment every page of an image.

    Args:
        grey: the image.
        by: model, features and post-processing.
        step: called with the fraction of a page that each piece covers.
        note: called when memory runs out and the tile is reduced.
    """
    return [
        within_memory(by.features, lambda p=page, v=valid, n=n: by.page(p, v, step, grey.stack, n), note)
        for n, (page, valid) in enumerate(zip(grey.pages, grey.image.valid, strict=True))
    ]


def write(
    folder: Path, path: Path, grey: Grey, results: Sequence[Prediction], model: Model, force: bool
) -> tuple[dict[str, Path], list[str]]:
    """Write the files of one image; the label map is last, so that its existence implies a complete image.

    Args:
        folder: destination.
        path: the image file, for the names.
        grey: the image.
        results: results of its pages.
        model: provides names and colours of the classes.
        force: overwrite.

    Returns:
        The files by kind, and notes.
    """
    stem, count, middle = path.stem, len(results), len(results) // 2
    ending = label_suffix(count)
    files = {
        "probabilities": folder / f"{stem}_prob.tif",
        "uncertainty": folder / f"{stem}_uncertainty{ending}",
        "overlay": folder / f"{stem}_overlay.png",
        "labels": folder / f"{stem}_seg{ending}",
    }
    result = results[middle]

    def draw() -> None:
        figure = overlay(
            grey.pages[middle],
            result.labels,
            model.names,
            model.colors,
            pixel_size=grey.image.pixel_size,
            title=stem if count == 1 else f"{stem}, page {middle}",
        )
        write_png(files["overlay"], figure, force)

    # compression and drawing take about equally long, so run both in parallel
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(draw)
        prob = results[0].prob[None] if count == 1 else np.stack([r.prob for r in results])
        write_probabilities(files["probabilities"], prob, grey.image, model.names, force)
        uncertainty = np.stack([uncertainty_image(r.uncertainty) for r in results])
        write_labels(files["uncertainty"], uncertainty, grey.image, force)
        drawing.result()
    write_labels(files["labels"], np.stack([r.labels for r in results]), grey.image, force)
    note = f"the overlay of {path.name} shows page {middle} of {count} (from 0)."
    return files, [note] if count > 1 else []
