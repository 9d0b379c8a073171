"""Dispatch of formats of microscopes and volumes to the libraries that read them.

The libraries are in the extra `vendors` and imported on first use.
"""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vispe.errors import InputError, MissingExtra, counted
from vispe.images.formats.decoded_image import Decoded, count_axes, damaged, times, to_pages
from vispe.images.formats.vendors.electron_microscopy import read_dm, read_mrc
from vispe.images.formats.vendors.hdf5 import read_hdf5
from vispe.images.formats.vendors.itk_volumes import read_volume
from vispe.images.formats.vendors.light_microscopy import read_czi, read_lif, read_nd2
from vispe.images.formats.vendors.scenes import Planes


@dataclass(frozen=True)
class Vendor:
    """Microscope format and the library that reads it.

    Attributes:
        name: name of the format.
        at: offset of `mark` in the file.
        mark: magic bytes of the format.
        module: import name of the library.
        read: function (path, requested scene) -> planes.
    """

    name: str
    at: int
    mark: bytes
    module: str
    read: Callable[[Path, str | None], Planes]


def vendor_of(head: bytes) -> Vendor | None:
    """Return the microscope format of a file from its first 352 bytes; None for other files."""
    return next((v for v in VENDORS if head[v.at : v.at + len(v.mark)] == v.mark), None)


def decode_vendor(path: Path, vendor: Vendor, axes: str | None, scene: str | None) -> Decoded:
    """Read a microscope file.

    Args:
        path: the file.
        vendor: its format.
        axes: axis of each stored dimension; None uses the metadata of the file.
        scene: name or number (from 0) of a scene.

    Raises:
        MissingExtra: the library is not installed.
        InputError: damaged, several scenes and `scene` is None, or no image.
    """
    if importlib.util.find_spec(vendor.module.partition(".")[0]) is None:
        raise MissingExtra(
            f"{path} is a {vendor.name} file, which needs {vendor.module}: pip install 'vispe[vendors]'"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            planes = vendor.read(path, scene)
        except InputError:
            raise
        except Exception as error:  # vendor libraries raise arbitrary exceptions on damaged files
            raise damaged(path, error) from error
    letters = planes.letters or (axes or "").upper()
    if axes is None and not {"Y", "X"} <= set(letters):
        raise InputError(
            f"{path}: no axes Y and X, got an array of {times(planes.array.shape)} along {' x '.join(letters)}. If it "
            "is an image, set `axes`, such as YX."
        )
    notes = [
        f"{path.name}: {' '.join(str(w.message).split())}"
        for w in caught
        if w.category is not DeprecationWarning
    ]
    page_axes = count_axes(letters, axes, planes.array.shape)
    if len(page_axes) > 1 and axes is None:
        sizes = " x ".join(f"{a}={n}" for a, n in page_axes)
        notes.append(
            f"{path.name}: the axes {sizes} are read as {counted(np.prod([n for _, n in page_axes]), 'page')}."
        )
    return Decoded(
        pages=to_pages(path, planes.array, letters, axes),
        format=vendor.name,
        pixel_size=planes.pixel_size,
        channel_names=planes.channel_names,
        notes=(*planes.notes, *notes),
        page_axes=page_axes,
        z_step=planes.z_step,
    ).with_axes(letters, axes)


VENDORS = (
    Vendor("Zeiss CZI", 0, b"ZISRAWFILE", "pylibCZIrw", read_czi),
    Vendor("Leica LIF", 0, b"p\0\0\0", "liffile", read_lif),
    Vendor("Nikon ND2", 0, b"\xda\xce\xbe\x0a", "nd2", read_nd2),
    Vendor("MRC", 208, b"MAP ", "mrcfile", read_mrc),
    Vendor("Gatan DM3", 0, b"\0\0\0\x03\0\0", "rsciio", read_dm),
    Vendor("Gatan DM4", 0, b"\0\0\0\x04\0\0", "rsciio", read_dm),
    Vendor("HDF5", 0, b"\x89HDF\r\n\x1a\n", "h5py", read_hdf5),
    Vendor("NRRD", 0, b"NRRD", "SimpleITK", read_volume),
    Vendor("MetaImage", 0, b"ObjectType", "SimpleITK", read_volume),
    Vendor("NIfTI", 344, b"n+1\0", "SimpleITK", read_volume),
)
"""Formats of the extra `vendors`."""

ENDINGS = (".czi", ".lif", ".nd2", ".mrc", ".dm3", ".dm4", ".ims", ".emd", ".nrrd", ".mha", ".nii")
"""Suffixes that are searched for in folders; not .h5, since ilastik writes its results alongside the images."""
