"""Files of microscopes and their programs: CZI, LIF, ND2, MRC and DM3/4, each through a library of its own.

The libraries come with the extra `vendors` and are imported when a file needs them.
"""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vispe.errors import InputError, MissingExtra
from vispe.images.formats.decoded_image import Decoded, count_axes, damaged, times, to_pages
from vispe.images.formats.electron_microscopy import read_dm, read_mrc
from vispe.images.formats.light_microscopy import read_czi, read_lif, read_nd2
from vispe.images.formats.scenes import Planes


@dataclass(frozen=True)
class Vendor:
    """A format that a library reads.

    Attributes:
        name: of the format.
        at: place of `mark` in the file.
        mark: bytes by which the format is recognised.
        module: that reads it.
        read: path and scene that is asked for -> planes.
    """

    name: str
    at: int
    mark: bytes
    module: str
    read: Callable[[Path, str | None], Planes]


def vendor_of(head: bytes) -> Vendor | None:
    """Return the format of a file by its first 212 bytes; None for other files."""
    return next((v for v in VENDORS if head[v.at : v.at + len(v.mark)] == v.mark), None)


def decode_vendor(path: Path, vendor: Vendor, axes: str | None, scene: str | None) -> Decoded:
    """Read a file of a microscope.

    Args:
        path: the file.
        vendor: its format.
        axes: the meaning of each stored dimension; None believes the file.
        scene: the name or the number (from 0) of one of several scenes.

    Raises:
        MissingExtra: the library is not installed.
        InputError: damaged, several scenes and none chosen, or no picture in it.
    """
    if importlib.util.find_spec(vendor.module.partition(".")[0]) is None:
        raise MissingExtra(f"{path} is a {vendor.name} file: pip install 'vispe[vendors]'")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = vendor.read(path, scene)
        except InputError:
            raise
        except Exception as error:  # whatever the libraries of others raise on damaged files
            raise damaged(path, error) from error
    letters = found.letters
    if axes is None and not {"Y", "X"} <= set(letters):
        raise InputError(
            f"{path} holds an array of {times(found.array.shape)} along {' x '.join(letters)}, which is no picture; "
            "if it is one, say with axes what the dimensions mean, such as YX."
        )
    said = [
        f"{path.name}: {' '.join(str(w.message).split())}"
        for w in caught
        if w.category is not DeprecationWarning
    ]
    counted = count_axes(letters, axes, found.array.shape)
    if len(counted) > 1 and axes is None:
        sizes = " x ".join(f"{a}={n}" for a, n in counted)
        said.append(f"{path.name}: the axes {sizes} are read as {np.prod([n for _, n in counted])} pages.")
    return Decoded(
        pages=to_pages(path, found.array, letters, axes),
        format=vendor.name,
        pixel_size=found.pixel_size,
        channel_names=found.channel_names,
        notes=(*found.notes, *said),
        page_axes=counted,
        z_step=found.z_step,
    )


VENDORS = (
    Vendor("Zeiss CZI", 0, b"ZISRAWFILE", "pylibCZIrw", read_czi),
    Vendor("Leica LIF", 0, b"p\0\0\0", "liffile", read_lif),
    Vendor("Nikon ND2", 0, b"\xda\xce\xbe\x0a", "nd2", read_nd2),
    Vendor("MRC", 208, b"MAP ", "mrcfile", read_mrc),
    Vendor("Gatan DM3", 0, b"\0\0\0\x03\0\0", "rsciio", read_dm),
    Vendor("Gatan DM4", 0, b"\0\0\0\x04\0\0", "rsciio", read_dm),
)
"""The formats that the extra `vendors` brings."""

ENDINGS = (".czi", ".lif", ".nd2", ".mrc", ".dm3", ".dm4")
"""Of names of such files, which are looked for in folders."""
