"""Stacks from files of several writers: read, segmented and written with their axes."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from vispe.cli.main import main
from vispe.errors import InputError, OptionError
from vispe.images import write as outputs
from vispe.images.labels.label_files import read_labels
from vispe.images.labels.truth_files import read_truth
from vispe.images.read import Micrograph, read_image
from vispe.images.sample import read_mask
from vispe.images.write import write_labels, write_probabilities
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.model.model_file import load_model
from vispe.segment.out_of_core.scribbles import read_scribbles
from vispe.segment.out_of_core.source.open_image import open_image
from vispe.segment.pipeline import MODEL_NAME, LabelOptions, ReadOptions, apply, segment

RNG = np.random.default_rng(11)
H, W = 33, 46


def levels(*shape, kind=np.uint8):
    return RNG.integers(0, 250, (*shape, H, W)).astype(kind)


def write_raw_tiff(path, planes, description, order="<", one_entry=False):
    """Write an 8-bit TIFF byte by byte: contiguous planes, followed by one IFD per plane (or a single IFD)."""
    count, height, width = planes.shape
    text = description.encode() + b"\0"
    start = 8 + len(text)
    body = text + planes.tobytes()
    ifd_offset = 8 + len(body) + len(body) % 2
    data = (
        struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, ifd_offset)
        + body
        + b"\0" * (len(body) % 2)
    )
    numbers = range(1 if one_entry else count)
    for number in numbers:
        tags = [
            (256, 4, 1, width),
            (257, 4, 1, height),
            (258, 3, 1, 8),
            (259, 3, 1, 1),
            (262, 3, 1, 1),
            *([(270, 2, len(text), 8)] if number == 0 else []),
            (273, 4, 1, start + number * height * width),
            (277, 3, 1, 1),
            (278, 4, 1, height),
            (279, 4, 1, height * width),
        ]
        data += struct.pack(f"{order}H", len(tags))
        for tag, kind, length, value in tags:
            short = kind == 3
            data += struct.pack(
                f"{order}HHI" + ("HH" if short else "I"), tag, kind, length, value, *([0] if short else [])
            )
        next_ifd = 0 if number == numbers[-1] else len(data) + 4
        data += struct.pack(f"{order}I", next_ifd)
    path.write_bytes(data)
    return path


# --- reading ---


@cases(
    ("axes", "shape", "pages", "actual"),
    [
        ("ZYX", (4,), "zyx", (("Z", 4),)),
        ("TYX", (3,), "tyx", (("T", 3),)),
        ("CYX", (2,), "yxc", ()),
        ("ZCYX", (3, 2), "zyxc", (("Z", 3),)),
        ("CZYX", (2, 3), "zyxc", (("Z", 3),)),
        ("TZYX", (2, 3), "tzyx", (("T", 2), ("Z", 3))),
        ("ZTYX", (2, 3), "ztyx", (("Z", 2), ("T", 3))),
        ("TCZYX", (2, 3, 4), "tzyxc", (("T", 2), ("Z", 4))),
        ("CTZYX", (3, 2, 4), "tzyxc", (("T", 2), ("Z", 4))),
        ("TZCYX", (1, 3, 2), "zyxc", (("Z", 3),)),
    ],
)
def test_ome_files_of_tifffile_are_read_in_any_axis_order(tmp_path, axes, shape, pages, actual):
    array = levels(*shape, kind=np.uint16)
    metadata = {"axes": axes, "PhysicalSizeX": 250, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 250}
    metadata |= {"PhysicalSizeYUnit": "nm", "PhysicalSizeZ": 2.0, "PhysicalSizeZUnit": "µm"}
    tifffile.imwrite(tmp_path / "a.ome.tif", array, photometric="minisblack", metadata=metadata)
    image = read_image(tmp_path / "a.ome.tif")
    letters = "".join(a for a in axes if a.lower() in pages)
    squeezed = array.squeeze() if len(letters) < len(axes) else array
    expected = np.einsum(f"{letters.lower()}->{pages}", squeezed)
    expected = expected.reshape(-1, H, W, *([expected.shape[-1]] if pages.endswith("c") else [1]))
    np.testing.assert_array_equal(image.pages, expected)
    assert image.page_axes == actual
    assert image.pixel_size == pytest.approx((0.25, 0.25))
    assert image.z_step == 2.0


def test_imagej_hyperstacks_of_tifffile_are_read(tmp_path):
    array = levels(2, 3, 2, kind=np.uint16)
    metadata = {"axes": "TZCYX", "unit": "micron", "spacing": 1.5, "finterval": 3.0}
    tifffile.imwrite(tmp_path / "a.tif", array, imagej=True, resolution=(4, 5), metadata=metadata)
    image = read_image(tmp_path / "a.tif")
    np.testing.assert_array_equal(image.pages, array.reshape(6, 2, H, W).transpose(0, 2, 3, 1))
    assert image.page_axes == (("T", 2), ("Z", 3))
    assert image.pixel_size == (0.2, 0.25)
    assert image.z_step == 1.5
    assert any("T=2 x Z=3 are read as 6 pages" in note for note in image.notes)


@cases("one_entry", [False, True])
def test_raw_imagej_files_are_read(tmp_path, one_entry):
    planes = levels(6)
    text = (
        "ImageJ=1.54f\nimages=6\nslices=3\nframes=2\nhyperstack=true\nmode=grayscale\nunit=\\u00B5m\n"
        "spacing=2.5\nloop=false\nmin=0.0\nmax=255.0\n"
    )
    image = read_image(write_raw_tiff(tmp_path / "a.tif", planes, text, ">", one_entry))
    np.testing.assert_array_equal(image.pages[..., 0], planes)
    assert image.page_axes == (("T", 2), ("Z", 3))
    assert image.z_step == 2.5
    assert image.pixel_size is None


@cases(
    ("order", "schema"),
    [("XYZCT", "OME/2016-06"), ("XYCZT", "OME/2013-06"), ("XYTCZ", "OME/2010-06")],
)
def test_raw_ome_files_with_permuted_planes_are_read(tmp_path, order, schema):
    sizes = {"T": 2, "C": 2, "Z": 3}
    planes = levels(12)
    positions = RNG.permutation(12)  # plane number -> IFD in the file
    slow = order[:1:-1]  # slowest axis first
    counts = [sizes[a] for a in slow]
    blocks = ""
    for number, index in enumerate(np.ndindex(*counts)):
        firsts = " ".join(f'First{a}="{i}"' for a, i in zip(slow, index, strict=True))
        blocks += f'<TiffData {firsts} IFD="{positions[number]}" PlaneCount="1"/>'
    channels = "".join(f'<Channel ID="Channel:0:{c}" SamplesPerPixel="1"/>' for c in range(2))
    sizes_text = " ".join(f'Size{a}="{n}"' for a, n in sizes.items())
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?><OME xmlns="http://www.openmicroscopy.org/Schemas/{schema}">'
        f'<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="{order}" Type="uint8" SizeX="{W}" SizeY="{H}" '
        f'{sizes_text} PhysicalSizeX="0.5" PhysicalSizeY="0.5" PhysicalSizeZ="1500" PhysicalSizeZUnit="nm">'
        f"{channels}{blocks}</Pixels></Image></OME>"
    )
    stored = np.empty_like(planes)
    stored[positions] = planes
    image = read_image(write_raw_tiff(tmp_path / "a.ome.tif", stored, text))
    pages = "".join(a for a in slow if a != "C")
    expected = np.einsum(f"{slow.lower()}yx->{pages.lower()}yxc", planes.reshape(*counts, H, W)).reshape(
        6, H, W, 2
    )
    np.testing.assert_array_equal(image.pages, expected)
    assert image.page_axes == tuple((a, sizes[a]) for a in pages)
    assert image.pixel_size == (0.5, 0.5)
    assert image.z_step == pytest.approx(1.5)


def test_multipage_files_of_pillow_and_scikit_image_are_read(tmp_path):
    planes = levels(5)  # tifffile writes 3 or 4 planes as colours
    frames = [Image.fromarray(p) for p in planes]
    frames[0].save(tmp_path / "p.tif", save_all=True, append_images=frames[1:], compression="tiff_lzw")
    image = read_image(tmp_path / "p.tif")
    np.testing.assert_array_equal(image.pages[..., 0], planes)
    assert [n for _, n in image.page_axes] == [5]
    assert image.z_step is None
    colours = levels(2)[..., None] // np.array([1, 2, 3], np.uint8)
    frames = [Image.fromarray(c) for c in colours]
    frames[0].save(tmp_path / "c.tif", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(read_image(tmp_path / "c.tif").pages, colours)
    io = pytest.importorskip("imageio.v3", reason="imageio is not installed")
    io.imwrite(tmp_path / "i.tif", planes.astype(np.uint16), plugin="tifffile")
    np.testing.assert_array_equal(read_image(tmp_path / "i.tif").pages[..., 0], planes)
    from skimage.io import imsave

    imsave(tmp_path / "s.tif", planes.astype(np.float32), check_contrast=False)
    np.testing.assert_array_equal(read_image(tmp_path / "s.tif").pages[..., 0], planes)


KINDS = ("labels", "truth", "mask", "blocks", "store")


def _label_pages(folder, kind, image_axes, label_axes, values, z=None):
    """Return the label pages (z, h, w) of an image along other axes, as read by one of `KINDS`."""
    path = folder / "a_labels.tif"
    tifffile.imwrite(path, values, imagej=True, metadata={"axes": f"{label_axes}YX"})
    pages = np.zeros((3, 2, H, W), np.uint8)
    metadata = {"axes": f"{image_axes}YX"}
    tifffile.imwrite(folder / "a.tif", pages, ome=True, photometric="minisblack", metadata=metadata)
    image = read_image(folder / "a.tif", z=z)
    if kind == "labels":
        return read_labels(path, image.pages.shape[:3], frame=image.frame).values
    if kind == "truth":
        return read_truth(path, image.pages.shape[:3], frame=image.frame, zero_is="ignore")
    if kind == "mask":
        return read_mask(path, image.pages.shape[:3], image.frame)[0]
    pytest.importorskip("zarr", reason="needs the extra vispe[big]")
    from tests.segment.out_of_core.stores import write_store

    if kind == "store":
        path = write_store(folder / "a_labels.zarr", values, f"{label_axes.lower()}yx")
    scribbles = read_scribbles([path], [open_image(folder / "a.tif", z=z)], LabelOptions())[0][0]
    out = np.zeros(image.pages.shape[:3], int)
    out.ravel()[scribbles.indices] = scribbles.classes
    return out


@cases("kind", KINDS)
def test_label_pages_match_by_slice_and_time(tmp_path, kind):
    values = RNG.integers(0, 3, (2, 3, H, W), dtype=np.uint8)  # Fiji saves T before Z
    actual = _label_pages(tmp_path, kind, "ZT", "TZ", values)
    expected = values.swapaxes(0, 1).reshape(6, H, W)
    np.testing.assert_array_equal(actual, expected > 0 if kind == "mask" else expected)


@cases("kind", KINDS)
def test_labels_with_other_slices_and_times_raise(tmp_path, kind):
    values = RNG.integers(0, 3, (3, 2, H, W), dtype=np.uint8)
    text = (
        r"must have the slices and times of the image, got 2 slices at 3 times for 3 slices at 2 times\. Save"
    )
    with pytest.raises(InputError, match=text):
        _label_pages(tmp_path, kind, "ZT", "TZ", values)


@cases("kind", KINDS)
def test_label_slices_and_times_of_selected_pages_start_at_0(tmp_path, kind):
    values = RNG.integers(0, 3, (2, 2, H, W), dtype=np.uint8)
    actual = _label_pages(tmp_path, kind, "ZT", "TZ", values, z="2:6")
    expected = values.swapaxes(0, 1).reshape(4, H, W)
    np.testing.assert_array_equal(actual, expected > 0 if kind == "mask" else expected)


def test_selected_pages_keep_their_axes(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", levels(2, 4), imagej=True, metadata={"axes": "TZYX"})
    for z, axes in (("5:8", (("Z", 3),)), ("2:6", (("TZ", 4),)), ("3", ()), ("0:8", (("T", 2), ("Z", 4)))):
        assert read_image(tmp_path / "a.tif", z=z).page_axes == axes
    named = read_image(tmp_path / "a.tif", axes="ZTYX")
    assert named.page_axes == (("Z", 2), ("T", 4))


# --- result files ---


def image_of(axes, **facts):
    count = int(np.prod([n for _, n in axes]))
    return Micrograph(Path("x.tif"), np.zeros((count, H, W, 1), np.uint8), page_axes=axes, **facts)


@cases("axes", [(("Z", 3),), (("T", 3),), (("T", 2), ("Z", 3)), (("I", 4),), (("TZ", 5),)])
def test_results_are_imagej_files_with_axes_and_voxel_size(tmp_path, axes):
    image = image_of(axes, pixel_size=(0.5, 0.25), z_step=2.0, resolution=(72.0, 72.0, "inch"))
    count = image.n_pages
    labels = RNG.integers(0, 3, (count, H, W), dtype=np.uint8)
    prob = RNG.random((count, 2, H, W), dtype=np.float32)
    write_labels(tmp_path / "seg.tif", labels, image)
    write_probabilities(tmp_path / "prob.tif", prob, image, ["matrix", "Poren, große"])
    letters = "".join(a for a, _ in axes) if axes[0][0] == "T" else "Z"
    lengths = tuple(n for _, n in axes)
    with tifffile.TiffFile(tmp_path / "seg.tif") as tif:
        assert tif.is_imagej
        assert tif.series[0].axes == f"{letters}YX"
        np.testing.assert_array_equal(tif.asarray(), labels.reshape(*lengths, H, W))
        metadata = tif.imagej_metadata
        assert (metadata["unit"], metadata["spacing"]) == ("um", 2.0)
        x, y = (tif.pages[0].tags[f"{a}Resolution"].value for a in "XY")
        assert (x[0] / x[1], y[0] / y[1]) == (4, 2)  # pixels per micron, and not the 72 dpi of the image
    with tifffile.TiffFile(tmp_path / "prob.tif") as tif:
        assert tif.series[0].axes == f"{letters}CYX"
        np.testing.assert_array_equal(tif.asarray(), prob.reshape(*lengths, 2, H, W))
        assert tif.imagej_metadata["Labels"][2:4] == ["page 1: matrix", "page 1: Poren, große"]
        assert json.loads(tif.imagej_metadata["classes"]) == ["matrix", "Poren, große"]
    for name in ("seg.tif", "prob.tif"):
        reread = read_image(tmp_path / name)
        assert reread.pixel_size == pytest.approx((0.5, 0.25))
        assert reread.z_step == 2.0
        assert reread.page_axes == (axes if axes[0][0] == "T" else (("Z", count),))
        assert reread.n_pages == count


@cases(("axes", "room"), [((("Z", 3), ("T", 2)), None), ((("T", 2), ("Z", 3)), 0)])
def test_results_unsupported_by_imagej_are_ome_tiff(tmp_path, monkeypatch, axes, room):
    if room is not None:
        monkeypatch.setattr(outputs, "_IMAGEJ", room)
    image = image_of(axes, pixel_size=(0.5, 0.25), z_step=2.0)
    prob = RNG.random((6, 2, H, W), dtype=np.float32)
    write_probabilities(tmp_path / "prob.tif", prob, image, ["matrix", "pore"])
    with tifffile.TiffFile(tmp_path / "prob.tif") as tif:
        assert tif.is_ome
        assert tif.is_bigtiff == (room == 0)
    reread = read_image(tmp_path / "prob.tif")
    np.testing.assert_array_equal(reread.pages, prob.transpose(0, 2, 3, 1))
    assert reread.page_axes == axes
    assert reread.channel_names == ("matrix", "pore")
    assert reread.pixel_size == pytest.approx((0.5, 0.25))
    assert reread.z_step == 2.0
    write_labels(tmp_path / "seg.tif", np.ones((6, H, W), np.uint8), image)
    assert read_image(tmp_path / "seg.tif").page_axes == axes


# --- segmentation ---


def scene(pages=4, seed=0, noise=14):
    """Make a noisy stack with a disk that moves 2 px per slice -> (pages uint8, classes 1 and 2)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:H, :W]
    classes = np.stack([1 + ((y - 16) ** 2 + (x - 15 - 2 * z) ** 2 < 81) for z in range(pages)]).astype(
        np.uint8
    )
    grey = np.where(classes == 2, 90, 150) + rng.normal(0, noise, classes.shape)
    return np.clip(grey, 0, 255).astype(np.uint8), classes


def scribbles(classes, pages):
    """Label a tenth of the pixels of some pages."""
    scribbled = np.where(np.random.default_rng(3).random(classes.shape) < 0.1, classes, 0).astype(np.uint8)
    scribbled[[z for z in range(len(classes)) if z not in pages]] = 0
    return scribbled


@pytest.fixture
def folder(tmp_path):
    grey, classes = scene()
    metadata = {"axes": "ZYX", "unit": "um", "spacing": 1.0}
    tifffile.imwrite(tmp_path / "s.tif", grey, imagej=True, resolution=(2, 2), metadata=metadata)
    tifffile.imwrite(tmp_path / "drawn.tif", scribbles(classes, (1, 3)), photometric="minisblack")
    return tmp_path


@pytest.mark.slow
def test_label_page_label_stack_and_json_scribbles_are_equivalent(folder):
    label_stack = scribbles(scene()[1], (1,))
    Image.fromarray(label_stack[1]).save(folder / "page.png")
    tifffile.imwrite(folder / "pages.tif", label_stack, imagej=True, metadata={"axes": "ZYX"})
    dots = [
        {"class": int(label_stack[1, y, x]), "points": [[int(x), int(y)]], "page": 1}
        for y, x in np.argwhere(label_stack[1] > 0)
    ]
    (folder / "dots.json").write_text(json.dumps(dots))
    actual = []
    for name, page in (("page.png", 1), ("pages.tif", None), ("dots.json", None)):
        out = folder / name.replace(".", "_")
        report = segment(
            [folder / "s.tif"],
            out,
            labels=[folder / name],
            labelling=LabelOptions(label_page=page),
            features=FeatureConfig(),
        )
        actual.append(tifffile.imread(out / "s_seg.tif"))
        assert report.run["training"]["labelled_pixels"] == {
            f"class {k}": int((label_stack == k).sum()) for k in (1, 2)
        }
    assert (actual[0] == scene()[1]).mean() > 0.95
    np.testing.assert_array_equal(actual[0], actual[1])
    np.testing.assert_array_equal(actual[0], actual[2])


@pytest.mark.slow
def test_single_slices_equal_slices_of_the_stack(folder):
    labels = [folder / "drawn.tif"]
    for mode in ("image", "none"):
        out, single = folder / mode, folder / f"{mode}_again"
        segment(
            [folder / "s.tif"],
            out,
            labels=labels,
            features=FeatureConfig(),
            reading=ReadOptions(normalize=mode),
        )
        stack, prob = tifffile.imread(out / "s_seg.tif"), tifffile.imread(out / "s_prob.tif")
        Image.fromarray(scene()[0][2]).save(folder / "slice.png")
        apply(out / MODEL_NAME, [folder / "slice.png"], single)
        np.testing.assert_array_equal(np.asarray(Image.open(single / "slice_seg.png")), stack[2])
        np.testing.assert_array_equal(tifffile.imread(single / "slice_prob.tif"), prob[2])
        apply(out / MODEL_NAME, [folder / "s.tif"], folder / f"{mode}_part", reading=ReadOptions(z="2:4"))
        np.testing.assert_array_equal(tifffile.imread(folder / f"{mode}_part" / "s_seg.tif"), stack[2:])


def test_segmentation_is_independent_of_slice_order(folder):
    segment([folder / "s.tif"], folder / "out", labels=[folder / "drawn.tif"], features=FeatureConfig())
    stack = tifffile.imread(folder / "out" / "s_seg.tif")
    tifffile.imwrite(folder / "r.tif", scene()[0][::-1], imagej=True, metadata={"axes": "ZYX"})
    apply(folder / "out" / MODEL_NAME, [folder / "r.tif"], folder / "back")
    np.testing.assert_array_equal(tifffile.imread(folder / "back" / "r_seg.tif"), stack[::-1])


def test_5d_stacks_keep_axes_and_voxel_size(tmp_path):
    grey, classes = scene(6)
    array = np.stack([grey, 255 - grey], 1).reshape(2, 3, 2, H, W).swapaxes(1, 2)  # T, C, Z
    metadata = {"axes": "TCZYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5, "PhysicalSizeZ": 1.5}
    tifffile.imwrite(tmp_path / "a.ome.tif", array, photometric="minisblack", metadata=metadata)
    tifffile.imwrite(tmp_path / "l.tif", scribbles(classes, (0, 4)))
    report = segment(
        [tmp_path / "a.ome.tif"], tmp_path / "out", labels=[tmp_path / "l.tif"], features=FeatureConfig()
    )
    record = report.images[0]
    assert record["page_axes"] == {"T": 2, "Z": 3}
    assert record["z_step_um"] == 1.5
    assert record["channels"] == 2
    reread = read_image(record["files"]["labels"])
    assert reread.page_axes == (("T", 2), ("Z", 3))
    assert (reread.pixel_size, reread.z_step) == ((0.5, 0.5), 1.5)
    assert (reread.pages[..., 0] == classes).mean() > 0.95
    with tifffile.TiffFile(record["files"]["uncertainty"]) as tif:
        assert tif.series[0].axes == "TZYX"


def test_3d_filters_use_adjacent_slices_and_are_stored_in_the_model(tmp_path):
    grey, classes = scene(8, noise=150)
    metadata = {"axes": "ZYX", "unit": "um", "spacing": 1.0}
    tifffile.imwrite(tmp_path / "s.tif", grey, imagej=True, resolution=(1, 1), metadata=metadata)
    tifffile.imwrite(tmp_path / "l.tif", scribbles(classes, (2, 5)))
    accuracy = {}
    for name, config in (("flat", FeatureConfig()), ("deep", FeatureConfig(filters_3d=True))):
        report = segment([tmp_path / "s.tif"], tmp_path / name, labels=[tmp_path / "l.tif"], features=config)
        accuracy[name] = (tifffile.imread(tmp_path / name / "s_seg.tif") == classes).mean()
    assert accuracy["deep"] > accuracy["flat"] + 0.01
    assert any("1 times the pixel size: 3D filters" in note for note in report.images[0]["notes"])
    model = tmp_path / "deep" / MODEL_NAME
    assert load_model(model).features.filters_3d
    apply(model, [tmp_path / "s.tif"], tmp_path / "again", tile=20)
    first, second = (tifffile.imread(tmp_path / name / "s_prob.tif") for name in ("deep", "again"))
    np.testing.assert_allclose(first, second, atol=1e-5)
    tifffile.imwrite(tmp_path / "r.tif", grey[::-1], imagej=True, resolution=(1, 1), metadata=metadata)
    apply(model, [tmp_path / "r.tif"], tmp_path / "over")
    reversed_prob = tifffile.imread(tmp_path / "over" / "r_prob.tif")
    np.testing.assert_allclose(reversed_prob[::-1], first, atol=1e-5)


def test_3d_filters_raise_without_a_z_axis(tmp_path, folder, capsys):
    Image.fromarray(scene()[0][0]).save(folder / "one.png")
    tifffile.imwrite(folder / "t.tif", scene()[0], imagej=True, metadata={"axes": "TYX"})
    config = FeatureConfig(filters_3d=True)
    for name, message in (("one.png", "has one page, but 3D filters"), ("t.tif", "time series of 4 frames")):
        with pytest.raises(InputError, match=message):
            segment([folder / name], folder / "out", cluster=2, features=config)
    with pytest.raises(OptionError, match=r"trust rotates single pages, but 3D filters need several"):
        segment(
            [folder / "s.tif"], folder / "out", labels=[folder / "drawn.tif"], features=config, trust=True
        )
    command = f"segment {folder}/s.tif --cluster 2 --filters-3d --features tokens -o {folder}/out"
    assert main(command.split()) == 2
    assert "--filters-3d has no effect on --features tokens" in capsys.readouterr().err


def test_3d_filters_on_the_command_line(folder, capsys):
    command = (
        f"segment {folder}/s.tif --labels {folder}/drawn.tif --features filters --filters-3d -o {folder}/out"
    )
    assert main(command.split()) == 0
    assert "the slice spacing of s.tif is 1 microns, 2 times the pixel size" in capsys.readouterr().err
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["features"]["filters_3d"] is True
