"""Decoders of light microscopy formats: Zeiss CZI, Leica LIF, Nikon ND2."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from vispe.errors import InputError
from vispe.images.formats.size_limits import check_size
from vispe.images.formats.units import microns
from vispe.images.formats.vendors.scenes import Planes, both, choose_scene


def read_czi(path: Path, requested: str | None) -> Planes:
    """Read a scene of a Zeiss CZI file with pylibCZIrw (Zeiss' libCZI), which stitches tiles."""
    from pylibCZIrw import czi

    with czi.open_czi(str(path)) as document:
        boxes = document.total_bounding_box
        other_dimensions = {
            d: end - start for d, (start, end) in boxes.items() if d not in "TZCXY" and end - start > 1
        }
        if other_dimensions:
            sizes = " x ".join(f"{d}={n}" for d, n in other_dimensions.items())
            raise InputError(
                f"{path}: unsupported dimensions, got {sizes}. Export one of each as CZI or OME-TIFF with ZEN."
            )
        root = ElementTree.fromstring(document.raw_metadata)
        rectangles = document.scenes_bounding_rectangle
        scene_names = {int(s.get("Index", "-1")): s.get("Name", "") for s in root.iter("Scene")}
        numbers = sorted(rectangles)
        names = [scene_names.get(i) or f"scene {i}" for i in numbers]
        scene = numbers[choose_scene(path, names, requested)] if numbers else None
        area = document.total_bounding_rectangle if scene is None else rectangles[scene]
        spans = [range(*boxes.get(d, (0, 1))) for d in "TZC"]
        counts = tuple(len(s) for s in spans)
        check_size(path, (*counts, area.h, area.w), 16)
        planes = [
            document.read(plane={"T": t, "Z": z, "C": c}, scene=scene)
            for t in spans[0]
            for z in spans[1]
            for c in spans[2]
        ]
    if len({(p.shape, p.dtype) for p in planes}) > 1:
        raise InputError(
            f"{path}: channels differ in size or dtype. Export one of them (ZEN: Create Image Subset)."
        )
    array = np.stack(planes).reshape(*counts, *planes[0].shape)
    # colours are stored as BGR
    array = array[..., ::-1]
    letters = "TZCYXS"
    if array.shape[-1] == 1:
        array, letters = array[..., 0], "TZCYX"
    elif counts[2] == 1:
        array, letters = array[:, :, 0], "TZYXS"
    length = {
        e.get("Id"): microns(e.findtext("Value"), "m")
        for e in root.iterfind("./Metadata/Scaling/Items/Distance")
    }
    channels = root.iterfind("./Metadata/Information/Image/Dimensions/Channels/Channel")
    titles = tuple(c.get("Name") or "" for c in channels)
    channel_names = titles if "S" not in letters and all(titles) and len(titles) == counts[2] else ()
    return Planes(array, letters, both(length.get("Y"), length.get("X")), length.get("Z"), channel_names)


def read_lif(path: Path, requested: str | None) -> Planes:
    """Read an image of a Leica LIF file with liffile."""
    import liffile

    with liffile.LifFile(path) as file:
        images = list(file.images)
        image = images[choose_scene(path, [i.path for i in images], requested)]
        check_size(path, tuple(image.shape), 8 * image.dtype.itemsize)
        array, labels = image.asarray(), tuple(image.dims)
        length = {}
        for dimension in image.xml_element.iterfind(
            "./Data/Image/ImageDescription/Dimensions/DimensionDescription"
        ):
            count = int(dimension.get("NumberOfElements", "1"))
            # the length is the distance between the centres of the first and the last element
            step = abs(float(dimension.get("Length", "0"))) / max(count - 1, 1)
            length[dimension.get("DimID")] = microns(step, dimension.get("Unit", ""))
        titles = tuple(
            e.get("LUTName", "")
            for e in image.xml_element.iterfind("./Data/Image/ImageDescription/Channels/ChannelDescription")
        )
    letters = _letters(labels)
    channels = array.shape[letters.index("C")] if "C" in letters else 0
    channel_names = titles if len(titles) == channels and all(titles) and len(set(titles)) == channels else ()
    return Planes(array, letters, both(length.get("2"), length.get("1")), length.get("3"), channel_names)


def _letters(labels: Sequence[str]) -> str:
    """Return dimension names as letters; unknown names become page axes with an unused letter."""
    free = iter("QIABDEFGHJKLNOPRUVW")
    out = []
    for label in labels:
        plain = len(label) == 1 and label.isascii() and label.isupper() and label not in out
        out.append(label if plain else next(letter for letter in free if letter not in labels))
    return "".join(out)


def read_nd2(path: Path, requested: str | None) -> Planes:
    """Read a position of a Nikon ND2 file with nd2."""
    import nd2

    with nd2.ND2File(path) as file:
        sizes = dict(file.sizes)
        count = sizes.pop("P", 1)
        points = next((loop.parameters.points for loop in file.experiment if loop.type == "XYPosLoop"), [])
        titles = [point.name or f"position {i}" for i, point in enumerate(points)]
        names = titles if len(titles) == count else [f"position {i}" for i in range(count)]
        number = choose_scene(path, names, requested)
        check_size(path, tuple(sizes.values()), 8 * file.dtype.itemsize)
        array = np.asarray(file.asarray(position=number)).reshape(tuple(sizes.values()))
        channels = list(file.metadata.channels or ())
        voxel = file.voxel_size()
        # uncalibrated axes have the size 1
        calibrated = channels[0].volume.axesCalibrated if channels else (False, False, False)
        x, y, z = (
            microns(v, "um") if ok else None
            for v, ok in zip((voxel.x, voxel.y, voxel.z), calibrated, strict=True)
        )
        channel_names = tuple(str(c.channel.name) for c in channels)
    letters = _letters(tuple(sizes))
    all_named = sizes.get("C") == len(channel_names) and all(channel_names) and "S" not in letters
    return Planes(array, letters, both(y, x), z if "Z" in sizes else None, channel_names if all_named else ())
