"""Unsupported file formats, detected by their first bytes or suffix, and how to convert them."""

from pathlib import Path

_BIOFORMATS = "convert it to OME-TIFF with bfconvert (Bio-Formats) or Fiji"
_EM = "export it as TIFF from the microscope's program or with Fiji or ImageJ"

_BEGINS = (
    (b"OLYMPUSRAWFORMAT", "Olympus OIR", _BIOFORMATS),
    (b"II\x97\x01", "FEI SER", _EM),
    (b"\0\0\0\x0cjP", "JPEG 2000", "convert it to TIFF or PNG"),
    (b"\xd0\xcf\x11\xe0", "OLE (Olympus OIB, Zeiss ZVI)", _BIOFORMATS),
    (b"8BPS", "Photoshop", "save a flat copy as TIFF or PNG"),
    (b"gimp xcf", "GIMP", "export it as TIFF or PNG"),
    (b"%PDF", "PDF", "export its images as TIFF or PNG"),
    (b"PK\x03\x04", "ZIP", "unpack it, or pass a RoiSet.zip of ImageJ as `labels`"),
    (b"\x1f\x8b", "gzip", "unpack it with gunzip"),
    (b"Iout", "ImageJ ROI", "pass it as `labels`"),
    (b"<svg", "SVG", "export it as PNG"),
)  # fmt: skip
_INSIDE = (
    (4, b"ftyp", "HEIF or AVIF", "convert it to PNG"),
    (128, b"DICM", "DICOM", "convert it to TIFF, for example with Fiji"),
)
_NAMES = {
    **dict.fromkeys((".vsi", ".mrxs", ".oif", ".lof", ".xlef"), ("a microscope file", _BIOFORMATS)),
    **dict.fromkeys((".spm", ".sxm", ".ibw", ".gwy", ".nid"), ("a scanning probe file", "export TIFF with Gwyddion")),
    **dict.fromkeys((".raw", ".dat", ".bin"), ("raw data", "import it in Fiji (File, Import, Raw), save TIFF")),
    ".geojson": ("QuPath GeoJSON", "pass it as `labels`"),
}  # fmt: skip


def unsupported_format(path: Path) -> str | None:
    """Return the format of an unsupported file and how to convert it; None if the format is unknown.

    Args:
        path: a file.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(352)
    except OSError:
        return None
    for begin, name, how in _BEGINS:
        if head.startswith(begin):
            return f"it looks like {name}: {how}"
    for at, mark, name, how in _INSIDE:
        if head[at : at + len(mark)] == mark:
            return f"it looks like {name}: {how}"
    name, how = _NAMES.get(path.suffix.lower(), ("", ""))
    return f"it looks like {name}: {how}" if name else None
