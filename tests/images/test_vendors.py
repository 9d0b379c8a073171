"""Microscope files: values, axes, channels, pixel sizes, scenes, damage, and the error without vispe[vendors].

CZI and MRC files are written by the libraries that read them. No library writes LIF or DM3, so minimal files are
assembled here. ND2 has no writer and a complex format, so a fake replaces the nd2 library.
"""

import importlib.util
import json
import struct
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.cases import cases
from vispe.cli.main import main
from vispe.errors import InputError, MissingExtra
from vispe.images.file_search import find_images
from vispe.images.formats.vendors.registry import VENDORS, vendor_of
from vispe.images.read import read_image

H, W = 12, 19
RNG = np.random.default_rng(3)


def needs(module):
    return pytest.importorskip(module, reason=f"{module} comes with vispe[vendors]")


def write_czi(path, planes, names=None, scale=(0.0, 0.0, 0.0), scenes=1, **where):
    """Write planes {(t, z, c): (h, w) or (h, w, 3)} once for each scene, with an offset of 100 pixels."""
    czi = needs("pylibCZIrw.czi")
    with czi.create_czi(str(path), exist_ok=True) as document:
        for scene in range(scenes):
            for (t, z, c), plane in planes.items():
                data = plane + scene if scenes > 1 else plane
                data = data[..., None] if data.ndim == 2 else np.ascontiguousarray(data[..., ::-1])
                position = {"T": t, "Z": z, "C": c}
                document.write(data, plane=position, scene=scene, location=(100 * scene, 0))
        x, y, z = scale
        document.write_metadata("a", channel_names=names, scale_x=x, scale_y=y, scale_z=z)
    return path


def test_czi_planes_channels_and_pixel_sizes(tmp_path):
    values = RNG.integers(0, 4000, (2, 3, 2, H, W)).astype(np.uint16)
    planes = {(t, z, c): values[t, z, c] for t in range(2) for z in range(3) for c in range(2)}
    path = write_czi(tmp_path / "a.czi", planes, {0: "DAPI", 1: "GFP"}, (0.2e-6, 0.25e-6, 2e-6))
    actual = read_image(path)
    np.testing.assert_array_equal(actual.pages, values.reshape(6, 2, H, W).transpose(0, 2, 3, 1))
    assert actual.pages.dtype == np.uint16
    assert actual.channel_names == ("DAPI", "GFP")
    assert actual.pixel_size == pytest.approx((0.25, 0.2))
    assert actual.z_step == pytest.approx(2.0)
    assert actual.page_axes == (("T", 2), ("Z", 3))
    assert "a.czi: the axes T=2 x Z=3 are read as 6 pages." in actual.notes
    np.testing.assert_array_equal(read_image(path, channel="GFP", z=1).pages[0, ..., 0], values[0, 1, 1])


@cases("kind", [np.uint8, np.uint16, np.float32])
def test_czi_dtypes_and_rgb_without_pixel_sizes(tmp_path, kind):
    grey = (RNG.random((H, W)) * 200).astype(kind)
    actual = read_image(write_czi(tmp_path / "g.czi", {(0, 0, 0): grey}))
    np.testing.assert_array_equal(actual.pages[0, ..., 0], grey)
    assert (actual.pixel_size, actual.z_step) == (None, None)
    if kind != np.float32:
        rgb = RNG.integers(0, 200, (H, W, 3)).astype(kind)
        actual = read_image(write_czi(tmp_path / "rgb.czi", {(0, 0, 0): rgb}))
        np.testing.assert_array_equal(actual.pages[0], rgb)  # stored blue first


def test_czi_scenes_are_selected_by_number_or_name(tmp_path):
    grey = RNG.integers(0, 200, (H, W)).astype(np.uint8)
    path = write_czi(tmp_path / "a.czi", {(0, 0, 0): grey}, scenes=3)
    with pytest.raises(
        InputError, match=r"a.czi contains 3 scenes. Set `scene` to one of 0 'scene 0', 1 'scene 1', 2"
    ):
        read_image(path)
    for requested, number in (("2", 2), ("scene 1", 1)):
        np.testing.assert_array_equal(read_image(path, scene=requested).pages[0, ..., 0], grey + number)
    with pytest.raises(InputError, match=r"a.czi: scene must be one of 0 'scene 0'"):
        read_image(path, scene="3")


def test_mrc_volumes_and_voxel_sizes(tmp_path):
    mrcfile = needs("mrcfile")
    path = tmp_path / "a.mrc"
    for kind in (np.int8, np.int16, np.uint16, np.float32):
        values = (RNG.random((4, H, W)) * 100).astype(kind)
        with mrcfile.new(path, values, overwrite=True) as file:
            file.voxel_size = (20.0, 25.0, 50.0)  # Angstrom: x, y, z
        actual = read_image(path)
        np.testing.assert_array_equal(actual.pages[..., 0], values)
        assert actual.pages.dtype == kind
        assert actual.pixel_size == pytest.approx((0.0025, 0.002))
        assert actual.z_step == pytest.approx(0.005)
        assert actual.page_axes == (("Z", 4),)
    with mrcfile.new(path, values[0], overwrite=True) as file:
        file.voxel_size = 1.0
    actual = read_image(path)
    assert actual.pages.shape == (1, H, W, 1)
    assert actual.pixel_size is None
    assert "exactly 1 Angstrom, which is interpreted as unknown" in actual.notes[0]
    with mrcfile.new(path, values, overwrite=True) as file:
        file.set_image_stack()
    assert read_image(path).page_axes == (("I", 4),)
    with mrcfile.new(path, values.astype(np.complex64), overwrite=True):
        pass
    with pytest.raises(InputError, match="values must be real numbers, got complex64"):
        read_image(path)


def write_lif(path, images):
    """Write images {name: (z, c, h, w) uint16} with a pixel size of 0.25 x 0.5 (y, x) and a z step of 3 microns."""
    elements, blocks = [], b""
    for number, (name, values) in enumerate(images.items()):
        z, c, h, w = values.shape
        sizes = {1: (w, 0.5e-6, 2), 2: (h, 0.25e-6, 2 * w), 3: (z, 3e-6, 2 * w * h * c)}
        dimensions = "".join(
            f'<DimensionDescription DimID="{i}" NumberOfElements="{n}" Origin="0" Length="{step * (n - 1)}" Unit="m" '
            f'BitInc="0" BytesInc="{inc}"/>'
            for i, (n, step, inc) in sizes.items()
        )
        channels = "".join(
            f'<ChannelDescription DataType="0" ChannelTag="0" Resolution="16" NameOfMeasuredQuantity="" Min="0" '
            f'Max="1" Unit="" LUTName="{lut}" IsLUTInverted="0" BytesInc="{2 * w * h * i}" BitInc="0"/>'
            for i, lut in zip(range(c), ("Green", "Red"), strict=False)
        )
        elements.append(
            f'<Element Name="{name}" UniqueID="u{number}"><Data><Image><ImageDescription>'
            f"<Channels>{channels}</Channels><Dimensions>{dimensions}</Dimensions></ImageDescription></Image></Data>"
            f'<Memory Size="{values.nbytes}" MemoryBlockID="MemBlock_{number}"/></Element>'
        )
        title = f"MemBlock_{number}"
        header = struct.pack("<BQBI", 0x2A, values.nbytes, 0x2A, len(title)) + title.encode("utf-16-le")
        blocks += struct.pack("<II", 0x70, len(header)) + header + values.astype("<u2").tobytes()
    xml = (
        '<LMSDataContainerHeader Version="2"><Element Name="a"><Children>'
        f"{''.join(elements)}</Children></Element></LMSDataContainerHeader>"
    )
    header_block = struct.pack("<IIBI", 0x70, 2 * len(xml) + 5, 0x2A, len(xml)) + xml.encode("utf-16-le")
    path.write_bytes(header_block + blocks)
    return path


def test_lif_planes_channels_and_pixel_sizes(tmp_path):
    needs("liffile")
    values = RNG.integers(0, 4000, (3, 2, H, W)).astype(np.uint16)
    path = write_lif(tmp_path / "a.lif", {"one": values})
    actual = read_image(path)
    np.testing.assert_array_equal(actual.pages, values.transpose(0, 2, 3, 1))
    assert actual.channel_names == ("Green", "Red")
    assert actual.pixel_size == pytest.approx((0.25, 0.5))
    assert actual.z_step == pytest.approx(3.0)
    assert actual.page_axes == (("Z", 3),)
    flat = write_lif(tmp_path / "b.lif", {"one": values[:1, :1], "two": values[1:2, :1]})
    with pytest.raises(InputError, match=r"b.lif contains 2 scenes\. .* one of 0 'one', 1 'two'\."):
        read_image(flat)
    np.testing.assert_array_equal(read_image(flat, scene="two").pages[0, ..., 0], values[1, 0])
    with pytest.raises(InputError, match=r"scene must be one of .*, got 'tow'. Did you mean 'two'"):
        read_image(flat, scene="tow")


def tag(name, value):
    """Return the bytes of a DM3 tag: a group (dict or list), a number, a string or an array."""
    head = struct.pack(">H", len(name)) + name.encode()
    if isinstance(value, dict | list):
        return b"\x14" + head + group(value)
    if isinstance(value, str):
        text = value.encode("utf-16-le")
        info, data = (20, 4, len(value)), text
    elif isinstance(value, np.ndarray):
        code = {"uint16": 4, "float32": 6, "uint8": 10}[value.dtype.name]
        info, data = (20, code, value.size), value.tobytes()
    elif isinstance(value, float):
        info, data = (6,), struct.pack("<f", value)
    else:
        info, data = (5,), struct.pack("<I", value)
    return b"\x15" + head + b"%%%%" + struct.pack(f">{len(info) + 1}i", len(info), *info) + data


def group(value):
    items = value.items() if isinstance(value, dict) else [("", v) for v in value]
    return struct.pack(">BBi", 1, 0, len(value)) + b"".join(tag(n, v) for n, v in items)


def write_dm3(path, values, unit="nm", kind=None):
    """Write (h, w) or (z, h, w) with a pixel size of 0.25 x 0.5 (y, x) and a z step of 4 nm."""
    kind = kind or {"uint16": 10, "float32": 2, "uint8": 6}[values.dtype.name]
    sizes = dict(zip(range(3), (0.5, 0.25, 4.0), strict=True))
    dimensions = [{"Origin": 0.0, "Scale": sizes[i], "Units": unit} for i in range(values.ndim)]
    brightness = {"Origin": 0.0, "Scale": 1.0, "Units": ""}
    image = {
        "ImageData": {
            "Calibrations": {"Brightness": brightness, "Dimension": dimensions},
            "Data": np.ascontiguousarray(values).ravel(),
            "DataType": kind,
            "Dimensions": list(values.shape[::-1]),
            "PixelDepth": values.itemsize,
        },
        "ImageTags": {"x": 1},
        "Name": "sample",
    }
    root = group({"ImageList": [image]})
    path.write_bytes(struct.pack(">iii", 3, len(root) + 8, 1) + root + bytes(8))
    return path


def test_dm3_planes_and_pixel_sizes(tmp_path):
    needs("rsciio")
    needs("rsciio.digitalmicrograph")
    for kind in (np.uint8, np.uint16, np.float32):
        values = (RNG.random((H, W)) * 200).astype(kind)
        actual = read_image(write_dm3(tmp_path / "a.dm3", values))
        np.testing.assert_array_equal(actual.pages[0, ..., 0], values)
        assert actual.pages.dtype == kind
        assert actual.pixel_size == pytest.approx((0.00025, 0.0005))
    stack = RNG.integers(0, 200, (3, H, W)).astype(np.uint16)
    actual = read_image(write_dm3(tmp_path / "s.dm3", stack))
    np.testing.assert_array_equal(actual.pages[..., 0], stack)
    assert actual.z_step == pytest.approx(0.004)
    # a diffraction pattern
    assert read_image(write_dm3(tmp_path / "d.dm3", values, unit="1/nm")).pixel_size is None
    with pytest.raises(InputError, match=r"l.dm3: no axes Y and X, got an array of 19 along Q"):
        read_image(write_dm3(tmp_path / "l.dm3", values[0]))


class FakeND2File:
    """Fake of nd2.ND2File with the attributes that vispe uses."""

    values = RNG.integers(0, 4000, (2, 3, 2, H, W)).astype(np.uint16)
    calibrated = (True, True, True)

    def __init__(self, path):
        self.sizes = {"P": 2, "Z": 3, "C": 2, "Y": H, "X": W}
        self.dtype = self.values.dtype
        points = [SimpleNamespace(name=n) for n in ("left", None)]
        self.experiment = [SimpleNamespace(type="XYPosLoop", parameters=SimpleNamespace(points=points))]
        volume = SimpleNamespace(axesCalibrated=self.calibrated)
        channels = [SimpleNamespace(channel=SimpleNamespace(name=n), volume=volume) for n in ("DAPI", "GFP")]
        self.metadata = SimpleNamespace(channels=channels)

    def __enter__(self):
        return self

    def __exit__(self, *passed):
        return None

    def asarray(self, position=None):
        return self.values[position : position + 1]

    def voxel_size(self):
        return SimpleNamespace(x=0.5, y=0.25, z=2.0)


def test_nd2_planes_channels_and_pixel_sizes(tmp_path, monkeypatch):
    module = ModuleType("nd2")
    module.ND2File, module.__spec__ = FakeND2File, ModuleSpec("nd2", None)
    monkeypatch.setitem(sys.modules, "nd2", module)
    path = tmp_path / "a.nd2"
    path.write_bytes(b"\xda\xce\xbe\x0a" + bytes(300))
    with pytest.raises(
        InputError, match=r"a.nd2 contains 2 scenes. Set `scene` to one of 0 'left', 1 'position 1'"
    ):
        read_image(path)
    actual = read_image(path, scene="left")
    np.testing.assert_array_equal(actual.pages, FakeND2File.values[0].transpose(0, 2, 3, 1))
    assert (actual.channel_names, actual.pixel_size, actual.z_step) == (("DAPI", "GFP"), (0.25, 0.5), 2.0)
    monkeypatch.setattr(FakeND2File, "calibrated", (False, False, False))
    actual = read_image(path, scene="1")
    np.testing.assert_array_equal(actual.pages, FakeND2File.values[1].transpose(0, 2, 3, 1))
    assert (actual.pixel_size, actual.z_step) == (None, None)


def test_the_fake_nd2_has_the_interface_of_the_library():
    nd2 = needs("nd2")
    assert all(
        hasattr(nd2.ND2File, name)
        for name in ("asarray", "voxel_size", "sizes", "dtype", "experiment", "metadata")
    )


WRITERS = {
    "a.czi": lambda p: write_czi(p, {(0, 0, 0): np.ones((H, W), np.uint16)}),
    "a.lif": lambda p: write_lif(p, {"one": np.ones((2, 1, H, W), np.uint16)}),
    "a.dm3": lambda p: write_dm3(p, np.ones((H, W), np.float32)),
    "a.mrc": lambda p: needs("mrcfile").write(p, np.ones((H, W), np.float32)),
}


@cases("name", WRITERS)
def test_truncated_vendor_files_raise_a_one_line_error(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    data = path.read_bytes()
    needs(vendor_of(data[:352]).module)
    read_image(path)
    for fraction in (0.02, 0.2, 0.5, 0.8):
        path.write_bytes(data[: max(int(fraction * len(data)), 12)])
        with pytest.raises(
            InputError, match=rf"{name} (is truncated or damaged|is not a readable|holds no image)"
        ) as caught:
            read_image(path)
        assert "\n" not in str(caught.value)


def test_corrupted_vendor_files_raise_only_input_error(tmp_path):
    for name, write in WRITERS.items():
        path = tmp_path / name
        try:
            write(path)
            data = path.read_bytes()
            needs(vendor_of(data[:352]).module)
        except pytest.skip.Exception:
            continue
        rng = np.random.default_rng(0)
        for _ in range(40):
            corrupted = bytearray(data)
            for position in rng.integers(4, min(len(data), 1500), 3):
                corrupted[position] = int(rng.integers(256))
            path.write_bytes(bytes(corrupted))
            with suppress(InputError):
                read_image(path)


@cases("vendor", VENDORS, ids=lambda v: v.name)
def test_missing_vendor_packages_raise_missing_extra(tmp_path, monkeypatch, vendor):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(vendor.at) + vendor.mark + bytes(300))
    assert vendor_of(path.read_bytes()[:352]) == vendor
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == vendor.module else find(n, *a)
    )
    with pytest.raises(MissingExtra) as caught:
        read_image(path)
    assert (
        str(caught.value)
        == f"{path} is a {vendor.name} file, which needs {vendor.module}: pip install 'vispe[vendors]'"
    )


def test_find_images_includes_vendor_files(tmp_path):
    for name in ("b.CZI", "a.lif", "c.nd2", "d.mrc", "e.dm3", "f.dm4", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert [p.name for p in find_images([tmp_path])] == ["a.lif", "b.CZI", "c.nd2", "d.mrc", "e.dm3", "f.dm4"]


def test_segment_on_a_scene_reports_its_pixel_size(tmp_path, monkeypatch, capsys):
    grey = np.full((40, 51), 180, np.uint8)
    grey[10:20, 17:25] = 40
    grey += RNG.integers(0, 20, grey.shape).astype(np.uint8)
    labels = np.zeros(grey.shape, np.uint8)
    labels[2:5], labels[12:16, 19:23] = 1, 2
    np.save(tmp_path / "drawn.npy", labels)
    write_czi(tmp_path / "a.czi", {(0, 0, 0): grey}, scale=(5e-7, 5e-7, 0.0), scenes=2)
    monkeypatch.chdir(tmp_path)
    command = "segment a.czi --labels drawn.npy --features filters"
    assert main([*command.split(), "-o", "out"]) == 2
    assert "a.czi contains 2 scenes. Set --scene to one of" in capsys.readouterr().err
    assert main([*command.split(), "-o", "out", "--scene", "1"]) == 0
    assert main(["apply", "out/model.vispe", "a.czi", "--scene", "0", "-o", "more"]) == 0
    assert "has no effect for this format" not in capsys.readouterr().err
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["images"][0]["pixel_size_um"] == pytest.approx([0.5, 0.5])
