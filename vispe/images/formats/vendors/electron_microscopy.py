"""Decoders of electron microscopy formats: MRC, Gatan DM3 and DM4."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vispe.images.formats.size_limits import check_size
from vispe.images.formats.units import microns
from vispe.images.formats.vendors.scenes import Planes, both, choose_scene


def read_mrc(path: Path, scene: str | None) -> Planes:
    """Read an MRC file with mrcfile; rows are in file order."""
    import mrcfile

    choose_scene(path, [path.stem], scene)
    with mrcfile.open(path) as file:
        header = file.header
        bits = {0: 8, 1: 16, 2: 32, 4: 64, 6: 16, 12: 16}.get(int(header.mode), 8)
        check_size(path, (int(header.nz), int(header.ny), int(header.nx)), bits)
        array = np.array(file.data)
        size = tuple(float(file.voxel_size[axis]) for axis in "zyx")
        stack = file.is_image_stack()
    notes: tuple[str, ...] = ()
    if size == (1.0, 1.0, 1.0):
        # many programs write 1 Angstrom for unknown sizes (in IMOD: not set)
        notes = (f"{path.name} has a voxel size of exactly 1 Angstrom, which is interpreted as unknown.",)
        size = (0.0, 0.0, 0.0)
    z, y, x = (microns(s, "angstrom") for s in size)
    letters = {2: "YX", 3: "IYX" if stack else "ZYX"}.get(array.ndim, "QZYX")
    return Planes(array, letters, both(y, x), z if letters == "ZYX" else None, notes=notes)


def read_dm(path: Path, scene: str | None) -> Planes:
    """Read an image of a Gatan DM3 or DM4 file with RosettaSciIO."""
    from rsciio.digitalmicrograph import file_reader

    return read_rsciio(path, file_reader(str(path)), scene)


def read_rsciio(path: Path, images: Sequence[dict[str, Any]], scene: str | None) -> Planes:
    """Return one of the images that RosettaSciIO has read, with its axes and scales."""
    names = [str(i["metadata"].get("General", {}).get("title") or f"image {n}") for n, i in enumerate(images)]
    image = images[choose_scene(path, names, scene)]
    array = np.asarray(image["data"])
    if array.dtype.names:  # colours are stored as structured arrays
        array = np.stack([array[n] for n in array.dtype.names if n.upper() in "RGB"], -1)
        letters = "ZYXS"[-array.ndim :]
    else:
        letters = {1: "Q", 2: "YX", 3: "ZYX"}.get(array.ndim, "QIZYX"[-array.ndim :])
    scales = {}
    for letter, axis in zip(letters.removesuffix("S"), image["axes"], strict=False):
        unit = str(axis.get("units") or "")
        with suppress(TypeError, ValueError):
            scales[letter] = microns(abs(float(axis["scale"])), unit)
    return Planes(array, letters, both(scales.get("Y"), scales.get("X")), scales.get("Z"))
