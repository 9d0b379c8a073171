"""Result store as an OME-Zarr image: probabilities, labels and uncertainty, each with a resolution pyramid.

- `0, 1, ...`: probabilities, float32 (t, c, z, y, x), one channel per class, reweighted like the labels; 0 where
  there is no data. The axes t and z exist if the image has them.
- `labels/classes/0, 1, ...`: uint8 (t, z, y, x), 1..K, 0 = no data, with the colours and names of the classes.
- `labels/objects/0, 1, ...`: uint32 (t, z, y, x), if objects were requested: their numbers in the table, 0 = none.
- `uncertainty/0, 1, ...`: float32 (t, z, y, x), 1 - (largest - second largest probability); NaN = no data.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.segment.features.tiles import Region
from vispe.segment.out_of_core.source.image import OutOfCoreImage, PageAxis
from vispe.segment.overlays import PALETTE

LABELS = "classes"
PARTS = {"prob": "", "labels": f"labels/{LABELS}/", "uncertainty": "uncertainty/"}
OBJECTS = "objects"


def page_axes(image: OutOfCoreImage) -> tuple[PageAxis, ...]:
    """Return the page axes of the result: t, z or both, as in the image; otherwise all page axes combined as z."""
    names = tuple(axis.name for axis in image.page_axes)
    if names in ((), ("t",), ("z",), ("t", "z")):
        return image.page_axes
    return (PageAxis("z", "space", None, 1.0, image.n_pages),)


def array_index(image: OutOfCoreImage, page: int, region: Region, classes: bool | int) -> tuple[Any, ...]:
    """Return the index of a region in the array of labels (False), or of probabilities: all, or of one class from 0."""
    axes = page_axes(image)
    index = [int(i) for i in np.unravel_index(page, [a.length for a in axes])] if axes else []
    if classes is not False:
        index.insert(_channel_axis(axes), slice(None) if classes is True else classes)
    return (*index, *region.slices)


def create(folder: Path, image: OutOfCoreImage, n_classes: int, chunk: int) -> None:
    """Create the groups and the full-resolution arrays, without pixels."""
    import zarr

    lead = [axis.length for axis in page_axes(image)]
    at = _channel_axis(page_axes(image))
    root = zarr.create_group(store=str(folder), zarr_format=3 if image.version == "0.5" else 2)
    root.create_group("labels").create_group(LABELS)
    root.create_group("uncertainty")
    shape = (*lead, *image.shape)
    _array(root, "0", (*shape[:at], n_classes, *shape[at:]), chunk, np.float32, 0.0)
    _array(root, f"labels/{LABELS}/0", shape, chunk, np.uint8, 0)
    _array(root, "uncertainty/0", shape, chunk, np.float32, np.nan)


def create_objects(root: Any, image: OutOfCoreImage, chunk: int) -> Any:
    """Create the group and the full-resolution array of objects, without pixels, replacing an existing one."""
    root["labels"].create_group(OBJECTS, overwrite=True)
    shape = (*(axis.length for axis in page_axes(image)), *image.shape)
    return _array(root, f"labels/{OBJECTS}/0", shape, chunk, np.uint32, 0)


def write(
    folder: Path,
    image: OutOfCoreImage,
    page: int,
    region: Region,
    prob: np.ndarray,
    labels: np.ndarray,
    uncertainty: np.ndarray,
) -> None:
    """Write a region aligned with chunks: probabilities (K, h, w), labels and uncertainty (h, w)."""
    import zarr

    root = zarr.open_group(str(folder), mode="r+")
    root["0"][array_index(image, page, region, True)] = prob
    root[f"labels/{LABELS}/0"][array_index(image, page, region, False)] = labels
    root["uncertainty/0"][array_index(image, page, region, False)] = uncertainty


def finish(
    folder: Path,
    image: OutOfCoreImage,
    names: Sequence[str],
    colors: Sequence[tuple[int, int, int]] | None,
    chunk: int,
    side: int,
    facts: dict[str, Any],
) -> None:
    """Write the pyramids and all metadata, with reproducible bytes."""
    import zarr
    from ome_zarr.format import format_from_version
    from ome_zarr.writer import add_metadata, write_label_metadata, write_multiscales_metadata

    root = zarr.open_group(str(folder), mode="r+")
    fmt = format_from_version(image.version)
    colors = [PALETTE[i % len(PALETTE)] for i in range(len(names))] if colors is None else colors
    has_objects = OBJECTS in root["labels"]
    parts = {**PARTS, **({OBJECTS: f"labels/{OBJECTS}/"} if has_objects else {})}
    for part, prefix in parts.items():
        count = _pyramid(root, prefix, part, chunk, side)
        group = root[prefix.rstrip("/")] if prefix else root
        axes, scales = _axes(image, count, part == "prob")
        datasets = [
            {"path": str(i), "coordinateTransformations": [{"type": "scale", "scale": scale}]}
            for i, scale in enumerate(scales)
        ]
        name = LABELS if part == "labels" else part
        write_multiscales_metadata(group, datasets, fmt=fmt, axes=axes, name=name)
    window = {"min": 0.0, "max": 1.0, "start": 0.0, "end": 1.0}
    channels = [
        {"label": name, "color": "".join(f"{v:02X}" for v in color), "window": window, "active": True}
        for name, color in zip(names, colors, strict=False)
    ]
    add_metadata(root, {"omero": {"channels": channels, "rdefs": {"model": "color"}}}, fmt=fmt)
    labels_group = root["labels"]
    if image.version == "0.5":
        labels_group.attrs.update({"ome": {"version": "0.5"}})
    numbered_colors = enumerate(colors[: len(names)], start=1)
    color_entries = [{"label-value": i, "rgba": [*map(int, color), 255]} for i, color in numbered_colors]
    class_entries = [{"label-value": i, "class": name} for i, name in enumerate(names, start=1)]
    write_label_metadata(
        labels_group, LABELS, color_entries, class_entries, fmt=fmt, source={"image": "../../"}
    )
    if has_objects:
        write_label_metadata(labels_group, OBJECTS, fmt=fmt, source={"image": "../../"})
    root.attrs.update({"vispe": {**facts, "uncertainty": "uncertainty"}})
    for leftover in folder.rglob("*.partial"):
        leftover.unlink()


def _array(root: Any, name: str, shape: tuple[int, ...], chunk: int, dtype: Any, fill: float) -> Any:
    v3 = root.metadata.zarr_format == 3
    return root.create_array(
        name,
        shape=shape,
        chunks=(*([1] * (len(shape) - 2)), chunk, chunk),
        dtype=dtype,
        fill_value=fill,
        chunk_key_encoding={"name": "default" if v3 else "v2", "separator": "/"},
        overwrite=True,
    )


def _pyramid(root: Any, prefix: str, part: str, chunk: int, side: int) -> int:
    """Build the pyramid of an array down to one chunk, and return the number of levels.

    Squares of about `side` pixels are read at once. Labels are subsampled by two; all other arrays are
    averaged over 2 x 2 pixels with data.
    """
    level = 0
    while max(root[f"{prefix}{level}"].shape[-2:]) > chunk:
        source = root[f"{prefix}{level}"]
        level += 1
        height, width = (-(-n // 2) for n in source.shape[-2:])
        shape = (*source.shape[:-2], height, width)
        target = _array(root, f"{prefix}{level}", shape, chunk, source.dtype, source.fill_value)
        step = max(side // 2 // chunk, 1) * chunk
        for page in np.ndindex(source.shape[:-2]):
            for top in range(0, height, step):
                for left in range(0, width, step):
                    rows, columns = slice(top, min(top + step, height)), slice(left, min(left + step, width))
                    source_pixels = source[
                        (*page, slice(2 * top, 2 * rows.stop), slice(2 * left, 2 * columns.stop))
                    ]
                    # labels are subsampled, since means of class numbers are meaningless
                    target[(*page, rows, columns)] = (
                        source_pixels[::2, ::2] if part in ("labels", OBJECTS) else _mean(source_pixels)
                    )
    return level + 1


def _mean(values: np.ndarray) -> np.ndarray:
    """Average blocks of 2 x 2 pixels that are not NaN; blocks at an odd end are smaller."""
    height, width = (-(-n // 2) for n in values.shape)
    sums, counts = np.zeros((height, width), np.float32), np.zeros((height, width), np.float32)
    for y in (0, 1):
        for x in (0, 1):
            part = values[y::2, x::2]
            finite = ~np.isnan(part)
            index = slice(0, part.shape[0]), slice(0, part.shape[1])
            sums[index] += np.where(finite, part, 0)
            counts[index] += finite
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.float32(np.nan))


def _channel_axis(axes: Sequence[PageAxis]) -> int:
    return int(bool(axes) and axes[0].name == "t")


def _axes(
    image: OutOfCoreImage, levels: int, classes: bool
) -> tuple[list[dict[str, str]], list[list[float]]]:
    """Return the axes metadata, and the scale of each level."""
    pages = page_axes(image)
    axes = [_axis(a.name, "time" if a.name == "t" else "space", a.unit) for a in pages]
    axes += [_axis(name, "space", image.unit) for name in "yx"]
    lead = [a.scale for a in pages]
    if classes:
        axes.insert(_channel_axis(pages), {"name": "c", "type": "channel"})
        lead.insert(_channel_axis(pages), 1.0)
    return axes, [[*lead, *(s * 2**level for s in image.scale)] for level in range(levels)]


def _axis(name: str, kind: str, unit: str | None) -> dict[str, str]:
    return {"name": name, "type": kind, **({"unit": unit} if unit else {})}
