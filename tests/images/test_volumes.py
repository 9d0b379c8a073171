"""HDF5 files (ilastik, h5py, Imaris, EMD) and medical volumes (NRRD, MHA, NIfTI)."""

import json

import numpy as np
import pytest

from tests.cases import cases
from vispe.errors import InputError
from vispe.images.read import read_image

VOLUME = np.random.default_rng(0).integers(0, 4000, (4, 12, 19)).astype(np.uint16)


def needs(module):
    return pytest.importorskip(module, reason=f"{module} comes with vispe[vendors]")


def write_hdf5(path, datasets, **attributes):
    with needs("h5py").File(path, "w") as file:
        for name, values in datasets.items():
            file[name] = values
            for key, value in attributes.items():
                file[name].attrs[key] = value
    return path


def axistags(letters):
    return json.dumps({"axes": [{"key": key} for key in letters]})


def test_ilastik_datasets_have_axes_and_pixel_sizes(tmp_path):
    path = write_hdf5(
        tmp_path / "a.h5",
        {"exported_data": VOLUME[..., None]},
        axistags=axistags("zyxc"),
        element_size_um=[2, 0.5, 0.25],
    )
    image = read_image(path)
    np.testing.assert_array_equal(image.pages[..., 0], VOLUME)
    assert (image.pixel_size, image.z_step, image.page_axes) == ((0.5, 0.25), 2.0, (("Z", 4),))


def test_hdf5_datasets_without_axes_need_the_axes_argument(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"image": VOLUME})
    with pytest.raises(InputError, match="no axes Y and X"):
        read_image(path)
    np.testing.assert_array_equal(read_image(path, axes="ZYX").pages[..., 0], VOLUME)
    path = write_hdf5(tmp_path / "sized.h5", {"image": VOLUME}, element_size_um=[2, 0.5, 0.25])
    image = read_image(path, axes="ZYX")
    assert (image.pixel_size, image.z_step) == ((0.5, 0.25), 2.0)
    path = write_hdf5(tmp_path / "bad.h5", {"image": VOLUME}, element_size_um=[-2, np.nan, 0.25])
    image = read_image(path, axes="ZYX")
    assert (image.pixel_size, image.z_step) == (None, None)
    flat = read_image(write_hdf5(tmp_path / "b.h5", {"image": VOLUME[0]}))
    np.testing.assert_array_equal(flat.pages[0, ..., 0], VOLUME[0])


def test_hdf5_datasets_are_selected_as_scenes(tmp_path):
    path = write_hdf5(
        tmp_path / "a.h5", {"raw/left": VOLUME[0], "raw/right": VOLUME[1], "table": np.arange(5)}
    )
    with pytest.raises(
        InputError, match=r"contains 2 scenes\. Set `scene` to one of 0 '/raw/left', 1 '/raw/right'"
    ):
        read_image(path)
    for scene in ("raw/right", "/raw/right", "1"):
        np.testing.assert_array_equal(read_image(path, scene=scene).pages[0, ..., 0], VOLUME[1])


def test_external_hdf5_datasets_raise(tmp_path):
    h5py = needs("h5py")
    (tmp_path / "secret.raw").write_bytes(bytes(12 * 19))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(
            "image", (12, 19), np.uint8, external=[(str(tmp_path / "secret.raw"), 0, 12 * 19)]
        )
    with pytest.raises(InputError, match="/image is stored in other files"):
        read_image(tmp_path / "a.h5")
    write_hdf5(tmp_path / "other.h5", {"image": VOLUME[0]})
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["image"] = h5py.ExternalLink("other.h5", "/image")
    with pytest.raises(InputError, match="/image is stored in other files"):
        read_image(tmp_path / "b.h5")


def test_hdf5_decompression_bombs_raise(tmp_path):
    with needs("h5py").File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("image", (1 << 20, 1 << 20), np.uint8, chunks=(1024, 1024))
    with pytest.raises(InputError, match="suspected decompression bomb"):
        read_image(tmp_path / "a.h5")
    with needs("h5py").File(tmp_path / "a.h5", "a") as file:
        file.attrs["version_major"] = 0  # the layout of EMD, which is read by another library
    with pytest.raises(InputError, match="suspected decompression bomb"):
        read_image(tmp_path / "a.h5")


def test_imaris_padding_is_cropped(tmp_path):
    h5py = needs("h5py")
    values = np.stack([VOLUME, VOLUME[::-1]])

    def char_array(text):
        return np.frombuffer(str(text).encode(), "S1")

    with h5py.File(tmp_path / "a.ims", "w") as file:
        attributes = {"X": 19, "Y": 12, "Z": 4, "Unit": "um", "ExtMin0": 1, "ExtMin1": 0, "ExtMin2": 0}
        attributes |= {"ExtMax0": 1 + 19 * 0.25, "ExtMax1": 12 * 0.5, "ExtMax2": 4 * 2.0}
        group = file.create_group("DataSetInfo/Image")
        for key, value in attributes.items():
            group.attrs[key] = char_array(value)
        for c, name in enumerate(("DAPI", "GFP")):
            file.create_group(f"DataSetInfo/Channel {c}").attrs["Name"] = char_array(name)
            padded = np.pad(values[c], ((0, 4), (0, 4), (0, 13)))
            file[f"DataSet/ResolutionLevel 0/TimePoint 0/Channel {c}/Data"] = padded
    image = read_image(tmp_path / "a.ims")
    np.testing.assert_array_equal(image.pages, np.moveaxis(values, 0, -1))
    assert image.pixel_size == pytest.approx((0.5, 0.25))
    assert (image.z_step, image.channel_names) == (pytest.approx(2.0), ("DAPI", "GFP"))
    with pytest.raises(InputError, match="0 'a'"):  # the only scene
        read_image(tmp_path / "a.ims", scene="1")


def test_imaris_files_with_an_inconsistent_size_raise(tmp_path):
    with needs("h5py").File(tmp_path / "a.ims", "w") as file:
        group = file.create_group("DataSetInfo/Image")
        for key, value in {"X": 10**6, "Y": 10**6, "Z": 10**3}.items():
            group.attrs[key] = np.frombuffer(str(value).encode(), "S1")
        file["DataSet/ResolutionLevel 0/TimePoint 0/Channel 0/Data"] = VOLUME
    with pytest.raises(InputError, match="the image must fit into its data"):
        read_image(tmp_path / "a.ims")


@cases("name", ["a.nrrd", "a.mha", "a.nii"])
def test_medical_volumes_have_voxel_sizes(tmp_path, name):
    sitk = needs("SimpleITK")
    volume = sitk.GetImageFromArray(VOLUME)
    volume.SetSpacing((0.25e-3, 0.5e-3, 2e-3))
    sitk.WriteImage(volume, str(tmp_path / name))
    image = read_image(tmp_path / name)
    np.testing.assert_array_equal(image.pages[..., 0], VOLUME)
    assert image.pixel_size == pytest.approx((0.5, 0.25), rel=1e-5)
    assert image.z_step == pytest.approx(2.0, rel=1e-5)
    volume.SetSpacing((1, 1, 1))
    sitk.WriteImage(volume, str(tmp_path / name))
    image = read_image(tmp_path / name)
    assert image.pixel_size is None
    assert any("exactly 1 mm, which is interpreted as unknown" in note for note in image.notes)


def test_detached_headers_raise(tmp_path):
    sitk = needs("SimpleITK")
    sitk.WriteImage(sitk.GetImageFromArray(VOLUME), str(tmp_path / "a.mhd"))
    sitk.WriteImage(sitk.GetImageFromArray(VOLUME), str(tmp_path / "a.nhdr"))
    (tmp_path / "b.nrrd").write_bytes(b"NRRD0004\n" + b"# " + b"x" * (1 << 17) + b"\n\n")
    for name in ("a.mhd", "a.nhdr", "b.nrrd"):
        with pytest.raises(
            InputError, match=r"its pixels are in another file\. Save header and pixels in one file"
        ):
            read_image(tmp_path / name)


@cases("name", ["a.h5", "a.nrrd", "a.mha", "a.nii"])
def test_truncated_volumes_raise(tmp_path, name):
    sitk, path = needs("SimpleITK"), tmp_path / name
    if name == "a.h5":
        write_hdf5(path, {"image": VOLUME[0]})
    else:
        sitk.WriteImage(sitk.GetImageFromArray(VOLUME), str(path))
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])
    with pytest.raises(InputError, match=name):
        read_image(path)


NRRD = b"NRRD0004\ntype: uint16\nendian: little\ndimension: 3\nsizes: 19 12 4\nencoding: raw\n"
META = (
    b"ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = False\nDimSize = 19 12 4\n"
)
META_END = b"ElementSpacing = 0.5 0.25 2\nElementType = MET_USHORT\nElementDataFile = LOCAL\n"
DIRECTIONS = b"space dimension: 3\nspace directions: (0.5,0,0) (0,0.25,0) (0,0,2)\n"


@cases(
    ("head", "microns"),
    [
        (NRRD + b'spacings: 0.5 0.25 2\nunits: "micron" "micron" "micron"\n\n', 1),  # Fiji
        (NRRD + b'spacings: 0.5 0.25 2\nunits: "nm" "nm" "nm"\n\n', 1e-3),
        (NRRD + b"spacings: 0.5 0.25 2\n\n", 1e3),
        (NRRD + b'spacings: 0.5 0.25 2\nunits: "pixel" "pixel" "pixel"\n\n', None),
        (NRRD + DIRECTIONS + b'space units: "um" "um" "um"\n\n', 1),
        (NRRD + DIRECTIONS + b'Space Units: "\xc2\xb5m" "\xc2\xb5m" "\xc2\xb5m"\n\n', 1),
        (META + b"DistanceUnits = um\n" + META_END, 1),
        (META + b"DistanceUnits = cm\n" + META_END, 1e4),
        (META + META_END, 1e3),
    ],
)
def test_volume_units_are_read_from_the_header(tmp_path, head, microns):
    needs("SimpleITK")
    path = tmp_path / ("a.nrrd" if head.startswith(b"NRRD") else "a.mha")
    path.write_bytes(head + VOLUME.astype("<u2").tobytes())
    image = read_image(path)
    np.testing.assert_array_equal(image.pages[..., 0], VOLUME)
    if microns is None:
        assert (image.pixel_size, image.z_step) == (None, None)
        assert "a.nrrd has a pixel size in 'pixel', which is interpreted as unknown." in image.notes
    else:
        np.testing.assert_allclose((*image.pixel_size, image.z_step), np.array([0.25, 0.5, 2]) * microns)
