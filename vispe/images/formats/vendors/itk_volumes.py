"""Decoder of volumes of medical and tomographic programs with SimpleITK: NRRD, MetaImage (MHA) and NIfTI."""

import math
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vispe.errors import InputError
from vispe.images.formats.size_limits import check_size
from vispe.images.formats.units import micron_factor, microns
from vispe.images.formats.vendors.scenes import Planes, both, choose_scene

if TYPE_CHECKING:
    import SimpleITK

_HEADER = 1 << 16  # bytes in which a header must end
_DETACHED = (b"data file:", b"datafile:")
_DEFAULT_UNIT = "mm"  # of these formats


def read_volume(path: Path, scene: str | None) -> Planes:
    """Read a volume, in the order of its slices.

    Raises:
        InputError: the pixels are in another file, or the pixels have more than one value per channel.
    """
    import SimpleITK

    choose_scene(path, [path.stem], scene)
    _check_attached(path)
    reader = SimpleITK.ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    # sizes are along x, y, z
    shape = tuple(reversed(reader.GetSize()))
    n_channels = reader.GetNumberOfComponents()
    name = SimpleITK.GetPixelIDValueAsString(reader.GetPixelID())
    if "complex" in name:
        raise InputError(f"{path}: pixels must be real numbers, got {name}. Save the magnitude.")
    bits = next((int(part) for part in name.replace("-", " ").split() if part.isdecimal()), 64)
    check_size(path, (*shape, n_channels), bits)
    _check_complete(path, math.prod(shape) * n_channels * bits // 8)
    array = SimpleITK.GetArrayFromImage(reader.Execute())
    letters = {2: "YX", 3: "ZYX", 4: "TZYX"}.get(len(shape), "") + ("C" if n_channels > 1 else "")
    units, sizes = _units(path, reader), [abs(float(s)) for s in reader.GetSpacing()]
    spacing = [microns(size, unit or _DEFAULT_UNIT) for size, unit in zip(sizes, units, strict=True)]
    notes: tuple[str, ...] = ()
    if all(size == 1 for size in sizes) and not any(units):
        # the default of all three formats
        notes = (f"{path.name} has a pixel size of exactly 1 mm, which is interpreted as unknown.",)
        spacing = [None] * len(spacing)
    elif unknown := [unit for unit in units[:3] if unit and micron_factor(unit) is None]:
        notes = (f"{path.name} has a pixel size in {unknown[0]!r}, which is interpreted as unknown.",)
    z = spacing[2] if "Z" in letters else None
    return Planes(np.asarray(array), letters, both(spacing[1], spacing[0]), z, notes=notes)


def _units(path: Path, reader: "SimpleITK.ImageFileReader") -> list[str]:
    """Return the unit of each axis, x first; '' if the header names none. SimpleITK converts those of NIfTI."""
    keys, count = reader.GetMetaDataKeys(), reader.GetDimension()
    if "ITK_VoxelUnits" in keys:
        return [reader.GetMetaData("ITK_VoxelUnits")] * count
    names = [f"NRRD_units[{axis}]" for axis in range(count)]
    if any(name in keys for name in names):
        return [reader.GetMetaData(name) if name in keys else "" for name in names]
    with path.open("rb") as stream:
        head = stream.read(_HEADER).replace(b"\r", b"").partition(b"\n\n")[0]
    line = (
        re.search(rb"^space units:(.*)$", head, re.IGNORECASE | re.MULTILINE)
        if head.startswith(b"NRRD")
        else None
    )
    units = [] if line is None else re.findall(r'"([^"]*)"', line[1].decode(errors="replace"))
    return units if len(units) == count else [""] * count


def _check_complete(path: Path, size: int) -> None:
    """Refuse truncated NIfTI files, whose missing pixels SimpleITK reads as 0; it checks the other formats itself."""
    with path.open("rb") as stream:
        head = stream.read(352)
    if head[344:348] != b"n+1\0":
        return
    order = "<" if struct.unpack("<i", head[:4])[0] == 348 else ">"
    start = int(struct.unpack(f"{order}f", head[108:112])[0])
    if path.stat().st_size < start + size:
        raise InputError(
            f"{path} is truncated: {start + size} bytes expected, got {path.stat().st_size}. Copy it again."
        )


def _check_attached(path: Path) -> None:
    """Refuse headers that name another file, which could be any file of the machine."""
    with path.open("rb") as stream:
        head = stream.read(_HEADER).replace(b"\r", b"").lower()
    if head.startswith(b"nrrd"):
        header, end, _ = head.partition(b"\n\n")
        attached = bool(end) and not any(line.startswith(_DETACHED) for line in header.splitlines())
    elif head.startswith(b"objecttype"):
        _, key, rest = head.partition(b"elementdatafile")
        attached = bool(key) and rest.partition(b"\n")[0].strip(b" =\t") == b"local"
    else:
        attached = True  # NIfTI files with the mark of a single file
    if not attached:
        raise InputError(
            f"{path}: its pixels are in another file. Save header and pixels in one file (.nrrd, .mha)."
        )
