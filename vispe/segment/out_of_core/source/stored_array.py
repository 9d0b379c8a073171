"""Stored arrays of out-of-core images, and their metadata: OME-Zarr, Zarr and TIFF."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, counted, short
from vispe.images.formats.decoded_image import BROKEN, damaged
from vispe.images.orientation import known_tag
from vispe.images.remote import is_url, options_of, read_errors, unreadable


def open_store(path: Path) -> tuple[Any, dict[str, Any], list[str]]:
    """Open the largest level of an OME-Zarr image, or a Zarr array.

    Returns:
        The array; 'version', 'axes', 'details' (name, kind, unit and scale by axis) and 'names' of channels; and notes.

    Raises:
        InputError: not an image, several images, a plate, or a URL that cannot be read.
    """
    import zarr

    remote = {"storage_options": options_of(path)} if is_url(path) else {}
    try:
        node = zarr.open(str(path), mode="r", **remote)
        if isinstance(node, zarr.Array):
            names = getattr(node.metadata, "dimension_names", None) or node.attrs.get("_ARRAY_DIMENSIONS")
            version = "0.5" if node.metadata.zarr_format == 3 else "0.4"
            return node, {"version": version, "axes": _letters(names, node.ndim)}, []
        image = _image_of(path, node, _ome(node))
        return _multiscale(path, image, _ome(image))
    except InputError:
        raise
    except (*read_errors(), AttributeError) as error:
        if is_url(path):
            raise unreadable(path, error) from error
        raise InputError(
            f"{path} is not a readable OME-Zarr image ({short(error)}). Export it again."
        ) from error


def _ome(node: Any) -> Mapping[str, Any]:
    """Return the OME metadata of a group or array: in a separate entry from version 0.5 on."""
    attributes = dict(node.attrs)
    return attributes.get("ome", attributes)


def _image_of(path: Path, group: Any, ome: Mapping[str, Any]) -> Any:
    """Return the group of an image: this one, or its only series."""
    if "multiscales" in ome:
        return group
    if "plate" in ome or "well" in ome:
        kind = "plate" if "plate" in ome else "well"
        raise InputError(f"{path} is a {kind} of many images. Pass one of them, such as {path}/A/1/0.")
    series = sorted(key for key in group if "multiscales" in _ome(group[key]))
    if not series:
        raise InputError(
            f"{path} contains no image (no multiscales in its metadata). Pass the path of the array inside, with axes."
        )
    if len(series) > 1:
        listed = f"{counted(len(series), 'image')} ({', '.join(series[:5])})"
        raise InputError(f"{path} contains {listed}. Pass one of them, such as {path}/{series[0]}.")
    return group[series[0]]


def _multiscale(path: Path, group: Any, ome: Mapping[str, Any]) -> tuple[Any, dict[str, Any], list[str]]:
    multiscale = ome["multiscales"][0]
    levels = [(group[entry["path"]], entry) for entry in multiscale["datasets"]]
    array, entry = max(levels, key=lambda level: np.prod(level[0].shape[-2:], dtype=np.int64))
    listed = multiscale.get("axes") or ["t", "c", "z", "y", "x"][-array.ndim :]
    axes = [{"name": axis} if isinstance(axis, str) else axis for axis in listed]
    transforms = (
        *entry.get("coordinateTransformations", ()),
        *multiscale.get("coordinateTransformations", ()),
    )
    scales = [np.asarray(t["scale"], float) for t in transforms if t.get("type") == "scale"]
    scale = np.prod(scales, 0) if scales else np.ones(array.ndim)
    # a unit without a scale is not a size
    details = {
        i: (axis["name"], axis.get("type"), axis.get("unit") if scales else None, float(scale[i]))
        for i, axis in enumerate(axes)
    }
    names = [str(c.get("label", "")) for c in (ome.get("omero") or {}).get("channels", ())]
    version = "0.5" if array.metadata.zarr_format == 3 else "0.4"
    notes = []
    if len(ome["multiscales"]) > 1:
        notes.append(
            f"{path.name} contains {counted(len(ome['multiscales']), 'multiscale image')}; the first is used."
        )
    letters = _letters([axis["name"] for axis in axes], array.ndim, axes)
    facts = {"version": version, "axes": letters, "details": details, "names": names if all(names) else ()}
    return array, facts, notes


def _letters(names: Any, ndim: int, axes: list[Mapping[str, Any]] | None = None) -> str | None:
    """Convert axis names to one letter each; axes other than T, C, Z, Y and X count pages."""
    if not names:
        return "YX" if ndim == 2 else None
    spare = iter("IQRHEAMPV")
    out = ""
    for i, name in enumerate(names):
        letter = str(name).upper()
        kind = axes[i].get("type") if axes is not None else None
        if letter not in set("TCZYXS") or letter in out:
            letter = "C" if kind == "channel" and "C" not in out else next(spare)
        out += letter
    return out if {"Y", "X"} <= set(out) else None


def open_tiff(path: Path) -> tuple[Any, dict[str, Any], list[str]]:
    """Open a TIFF file as a Zarr array.

    Returns:
        As `open_store`, with 'unused', details of axes that the array does not have, and 'tag', its orientation.

    Raises:
        InputError: a damaged file, or pixels that cannot be read in blocks.
    """
    import zarr
    from tifffile import TiffFile, imread

    from vispe.images.formats.metadata import check_metadata, check_page_list
    from vispe.images.formats.tiff_metadata import (
        COLOUR_SPACES,
        has_alpha,
        largest_series,
        lut_note,
        separate_colours,
        series_notes,
        tag_value,
        tiff_channel_names,
        tiff_frame_interval,
        tiff_pixel_size,
        tiff_resolution,
        tiff_z_step,
    )

    check_page_list(path)
    try:
        with TiffFile(path) as tif:
            check_metadata(path, tif.pages.first.description)
            number = largest_series(tif.series)
            page, series = tif.series[number].keyframe, tif.series[number]
            notes = series_notes(path, tif.series)
            palette = tag_value(page, "ColorMap", None) is not None
            lut = lut_note(path, tif) if palette else None
            notes += [lut] if lut else []
            unsupported = {
                "a palette": palette and lut is None,
                "white as 0": page.photometric == 0,
                "an alpha channel": has_alpha(page),
                f"{COLOUR_SPACES.get(page.photometric)} colours": page.photometric in COLOUR_SPACES,
            }
            if any(unsupported.values()):
                first = next(name for name, present in unsupported.items() if present)
                raise InputError(
                    f"{path} has {first}, which is not supported when reading in blocks. Omit memory and scheduler, "
                    "or convert it to OME-Zarr."
                )
            size = tiff_pixel_size(tif, tiff_resolution(page), number)
            names, axes = tiff_channel_names(tif, number), series.axes
            tag = known_tag(tag_value(page, "Orientation", 1))
            steps = {"Z": tiff_z_step(tif, number), "T": tiff_frame_interval(tif, number)}
            planes = separate_colours(tif, series)
        opened = imread(path, aszarr=True, series=number, level=0)
        array = zarr.open(opened, mode="r")
        weakref.finalize(array, opened.close)
    except InputError:
        raise
    except BROKEN as error:
        raise damaged(path, error) from error
    known = {
        letter: (letter.lower(), "space", "micrometer", one)
        for letter, one in zip("YXZ", (*(size or (None, None)), steps["Z"]), strict=True)
        if one
    }
    if steps["T"]:
        known["T"] = ("t", "time", "second", steps["T"])
    details = {axes.index(letter): detail for letter, detail in known.items() if letter in axes}
    unused = {letter: detail for letter, detail in known.items() if letter not in axes}
    if planes:
        stack = axes.replace("S", "Z").replace("Q", "T")
        notes.append(
            f"{path.name}: its {counted(planes, 'plane')} are read as one colour image; if they are slices of a "
            f"stack, use axes={stack}."
        )
    facts = {"axes": axes, "details": details, "unused": unused, "names": names, "tag": tag}
    return array, {"version": "0.5", **facts}, notes
