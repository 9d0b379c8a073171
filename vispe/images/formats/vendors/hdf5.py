"""Decoder of HDF5 files: datasets of any program (ilastik, h5py), Imaris IMS, and EMD of electron microscopes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import InputError
from vispe.images.formats.size_limits import check_size
from vispe.images.formats.units import microns
from vispe.images.formats.vendors.electron_microscopy import read_rsciio
from vispe.images.formats.vendors.scenes import Planes, both, choose_scene

if TYPE_CHECKING:
    import h5py

_IMAGE = "DataSetInfo/Image"  # group of Imaris with size and extent of the image


def read_hdf5(path: Path, scene: str | None) -> Planes:
    """Read an image of an HDF5 file; `scene` is the path of a dataset inside the file, such as '/exported_data'.

    Raises:
        InputError: several datasets and `scene` is None, no image, or a dataset that is stored in other files.
    """
    import h5py

    with h5py.File(path) as file:
        _check_contained(path, file)
        if _IMAGE in file and "DataSet/ResolutionLevel 0" in file:
            choose_scene(path, [path.stem], scene)
            return _read_imaris(path, file)
        if not _is_emd(file):
            return _read_dataset(path, file, scene)
        for name in _image_names(file):  # RosettaSciIO reads all of them
            check_size(path, file[name].shape, 8 * file[name].dtype.itemsize)
    from rsciio.emd import file_reader

    return read_rsciio(path, file_reader(str(path)), scene)


def _check_contained(path: Path, file: h5py.File) -> None:
    """Refuse links to other files, and datasets stored in them, which could be any file of the machine."""
    import h5py

    elsewhere: list[str] = []

    def check_link(name: str, link: Any) -> None:
        if isinstance(link, h5py.ExternalLink):
            elsewhere.append(name)

    def check_item(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and (item.external or item.is_virtual):
            elsewhere.append(name)

    # h5py cannot raise errors from within a visit of links
    file.visititems_links(check_link)
    file.visititems(check_item)
    if elsewhere:
        raise InputError(
            f"{path}: /{elsewhere[0]} is stored in other files. Copy it into one file, or save it as TIFF."
        )


def _is_emd(file: h5py.File) -> bool:
    """Return whether a file has the layout of Velox or of the Berkeley Lab, which RosettaSciIO reads."""
    return "Data/Image" in file or "version_major" in file.attrs or "emd_group_type" in file.attrs


def _read_dataset(path: Path, file: h5py.File, scene: str | None) -> Planes:
    """Read a dataset with at least two dimensions."""
    names = _image_names(file)
    requested = None if scene is None or scene.isdecimal() else f"/{scene.strip('/')}"
    dataset = file[names[choose_scene(path, names, requested or scene)]]
    check_size(path, dataset.shape, 8 * dataset.dtype.itemsize)
    letters, sizes = _axes(dataset), dataset.attrs.get("element_size_um")
    z, y, x = (microns(s, "um") for s in (np.ravel(sizes) if np.size(sizes) == 3 else (None, None, None)))
    return Planes(np.array(dataset), letters, both(y, x), z if "Z" in letters or not letters else None)


def _image_names(file: h5py.File) -> list[str]:
    """Return the paths of the numeric datasets with at least two dimensions."""
    import h5py

    names: list[str] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.ndim >= 2 and item.dtype.kind in "buif":
            names.append(f"/{name}")

    file.visititems(visit)
    return names


def _axes(dataset: h5py.Dataset) -> str:
    """Return the axes of a dataset from the metadata of vigra (ilastik) or of HDF5; '' if they are unknown."""
    try:
        tags = json.loads(dataset.attrs["axistags"])["axes"]
        letters = "".join(str(tag["key"]) for tag in tags).upper()
    except (KeyError, TypeError, ValueError):
        letters = "".join(str(dimension.label) for dimension in dataset.dims).upper()
    if len(letters) == dataset.ndim and letters.isalpha() and len(set(letters)) == len(letters):
        return letters
    return "YX" if dataset.ndim == 2 else ""


def _read_imaris(path: Path, file: h5py.File) -> Planes:
    """Read the full resolution of an Imaris file, whose chunks are padded beyond the size in the metadata."""
    about = {name: _text(value) for name, value in file[_IMAGE].attrs.items()}
    shape = tuple(int(about[axis]) for axis in "ZYX")
    level = file["DataSet/ResolutionLevel 0"]
    n_times = len([name for name in level if name.startswith("TimePoint ")])
    n_channels = len([name for name in level["TimePoint 0"] if name.startswith("Channel ")])
    first = level["TimePoint 0/Channel 0/Data"]
    if any(n > stored for n, stored in zip(shape, first.shape, strict=True)):
        raise InputError(
            f"{path}: the image must fit into its data, got a size of {shape} and {first.shape}."
        )
    check_size(path, (n_times, n_channels, *first.shape), 8 * first.dtype.itemsize)
    array = np.empty((n_times, n_channels, *shape), first.dtype)
    for t in range(n_times):
        for c in range(n_channels):
            array[t, c] = level[f"TimePoint {t}/Channel {c}/Data"][tuple(slice(n) for n in shape)]
    names = [_text(file[f"DataSetInfo/Channel {c}"].attrs.get("Name", b"")) for c in range(n_channels)]
    extents = [float(about[f"ExtMax{k}"]) - float(about[f"ExtMin{k}"]) for k in (2, 1, 0)]
    z, y, x = (microns(e / n, about.get("Unit", "um")) for e, n in zip(extents, shape, strict=True))
    used = [k for k, n in enumerate(array.shape[:3]) if n > 1]
    letters = "".join("TCZ"[k] for k in used) + "YX"
    array = array.reshape(*(array.shape[k] for k in used), *shape[1:])
    channel_names = tuple(names) if "C" in letters and all(names) and len(set(names)) == n_channels else ()
    return Planes(array, letters, both(y, x), z if "Z" in letters else None, channel_names)


def _text(value: Any) -> str:
    """Return an attribute of Imaris, which stores text as an array of single bytes."""
    return b"".join(np.atleast_1d(value).astype("S").tolist()).decode(errors="replace")
