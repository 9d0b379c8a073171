"""GeoJSON, ImageJ ROI and COCO files as labels and ground truth: pixels, classes, overlaps and errors."""

import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import tifffile

from tests.cases import cases
from vispe.errors import InputError, OptionError
from vispe.images.annotations.imagej_rois import read_rois, roi_class
from vispe.images.formats.headers import stored_frame
from vispe.images.labels.label_files import read_label_set, read_labels
from vispe.images.labels.truth_files import read_truth
from vispe.images.read import read_image
from vispe.segment.out_of_core.source.open_image import open_image

roifile = pytest.importorskip("roifile", reason="roifile reads regions of ImageJ: pip install 'vispe[cli]'")
H, W = 20, 30


def feature(kind, coordinates, name=None, color=None, **extra):
    """Return a GeoJSON feature in the format of QuPath 0.5."""
    classification = {} if name is None else {"classification": {"name": name, "color": color or [1, 2, 3]}}
    return {
        "type": "Feature",
        "id": "3b1c9b2e-4a55-4f6f-9f66-6f2f2ce0d3a1",
        "geometry": {"type": kind, "coordinates": coordinates} | extra,
        "properties": {"objectType": "annotation"} | classification,
    }


def box(x0, y0, x1, y1):
    return [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]


def geojson(path, *features):
    path.write_text(json.dumps({"type": "FeatureCollection", "features": list(features)}))
    return path


PORE = feature("Polygon", [box(0, 0, 4, 4)], "pore", [255, 0, 0])
GRAIN = feature("Polygon", [box(10, 10, 30, 20)], "grain", [0, 0, 255])


def blocks(*regions):
    out = np.zeros((1, H, W), np.int32)
    for value, rows, columns in regions:
        out[0, rows, columns] = value
    return out


def test_qupath_polygons_holes_lines_and_points_are_rasterized(tmp_path):
    path = geojson(
        tmp_path / "a.geojson",
        feature("Polygon", [box(0, 0, 8, 6), box(2, 1, 5, 4)], "pore", [255, 0, 0]),
        feature(
            "MultiPolygon", [[box(10, 0, 12, 2)], [box(13, 0, 15, 2), box(14, 0, 15, 1)]], "pore", [255, 0, 0]
        ),
        feature("LineString", [[3.5, 10.5], [9.2, 10.9]], "grain", [0, 0, 255]),
        feature("Point", [20.9, 15.1], "grain", [0, 0, 255]),
        feature("MultiPoint", [[25.0, 15.0], [29.9, 19.9]], "grain", [0, 0, 255]),
    )
    actual = read_labels(path, (1, H, W))
    s = np.s_
    expected = blocks(
        *[
            (2, s[:6], s[:8]),
            (0, s[1:4], s[2:5]),
            (2, s[:2], s[10:12]),
            (2, s[:2], s[13:15]),
            (0, s[:1], s[14:15]),
        ],
        *[(1, s[10], s[3:10]), (1, s[15], s[20]), (1, s[15], s[25]), (1, s[19], s[29])],
    )
    np.testing.assert_array_equal(actual.values, expected)
    assert actual.names == ("grain", "pore")  # in natural order
    assert actual.colors == ((0, 0, 255), (255, 0, 0))
    assert actual.notes == ()


@cases("name", ["a.geojson", "a.json"])
def test_geojson_feature_lists_legacy_colours_and_derived_classes(tmp_path, name):
    old = feature("Polygon", [box(0, 0, 4, 4)])
    old["properties"]["classification"] = {"name": "Tumor", "colorRGB": -3670016}  # alpha 255, red 200
    derived = feature(
        "GeometryCollection", None, geometries=[{"type": "Polygon", "coordinates": [box(9, 9, 12, 12)]}]
    )
    derived["properties"]["classification"] = {"names": ["Tumor", "Positive"], "color": [9, 9, 9]}
    path = tmp_path / name
    path.write_text(json.dumps([old, derived]))
    actual = read_labels(path, (1, H, W))
    assert actual.names == ("Tumor", "Tumor: Positive")
    assert actual.colors == ((200, 0, 0), (9, 9, 9))
    np.testing.assert_array_equal(
        actual.values, blocks((1, np.s_[:4], np.s_[:4]), (2, np.s_[9:12], np.s_[9:12]))
    )


def test_classes_argument_sets_the_order_and_unknown_names_raise(tmp_path):
    path = geojson(tmp_path / "a.geojson", PORE, GRAIN)
    actual = read_labels(path, (1, H, W), classes=["pore", "grain", "crack"])
    np.testing.assert_array_equal(
        actual.values, blocks((1, np.s_[:4], np.s_[:4]), (2, np.s_[10:], np.s_[10:]))
    )
    assert actual.colors is None  # crack has no colour
    assert "class 'crack' has no labelled pixels" in actual.notes[0]
    with pytest.raises(
        InputError, match=r"feature 0: the class must be one of pores, grain, got 'pore'.*'pores'"
    ):
        read_labels(path, (1, H, W), classes=["pores", "grain"])


@cases("rotated", [False, True])
def test_the_smaller_of_overlapping_shapes_wins_in_any_order(tmp_path, rotated):
    large = feature("Polygon", [box(0, 0, 20, 20)], "a matrix")
    small, line = (
        feature("Polygon", [box(5, 5, 9, 9)], "pore"),
        feature("LineString", [[0, 7], [19, 7]], "scratch"),
    )
    shapes = [large, small, line]
    path = geojson(tmp_path / "a.geojson", *(shapes[::-1] if rotated else shapes))
    actual = read_labels(path, (1, H, W))
    # 16 pixels of the pore, 20 of the line
    expected = blocks((1, np.s_[:20], np.s_[:20]), (3, np.s_[7], np.s_[:20]), (2, np.s_[5:9], np.s_[5:9]))
    np.testing.assert_array_equal(actual.values, expected)
    assert actual.notes == (
        "32 pixels of a.geojson are covered by shapes of different classes; the smaller wins.",
    )


def test_unclassified_and_ignored_shapes_are_skipped_with_a_note(tmp_path):
    ignored = feature("Polygon", [box(0, 0, 30, 20)], "Ignore*")
    path = geojson(tmp_path / "a.geojson", PORE, GRAIN, feature("Point", [5, 5]), ignored)
    notes = read_labels(path, (1, H, W)).notes
    assert "a.geojson: skipped 1 shape of the class Ignore*, which QuPath ignores." in notes
    assert "a.geojson: skipped 1 shape without a class." in notes
    with pytest.raises(InputError, match=r"1 shape, none with a class. Assign a classification"):
        read_labels(geojson(path, feature("Point", [5, 5])), (1, H, W))


def test_shapes_are_clipped_at_the_border_and_raise_outside_the_image(tmp_path):
    path = geojson(tmp_path / "a.geojson", PORE, feature("Polygon", [box(-5, 15, 3.4, 99)], "grain"))
    actual = read_labels(path, (1, H, W))
    np.testing.assert_array_equal(
        actual.values, blocks((2, np.s_[:4], np.s_[:4]), (1, np.s_[15:], np.s_[:3]))
    )
    assert "a.geojson: clipped 1 shape at the border of the image." in actual.notes
    path = geojson(path, PORE, feature("Polygon", [box(31, 0, 40, 9)], "grain"))
    with pytest.raises(
        InputError, match=r"feature 1 is outside the image of 30 x 20 pixels, got x 31 to 40, y 0 to 9"
    ):
        read_labels(path, (1, H, W))


def test_qupath_planes_select_pages(tmp_path):
    planes = [{"c": -1, "z": 2, "t": 0}, {"c": -1, "z": 0, "t": 1}]
    shapes = [feature("Polygon", [box(0, 0, 4, 4)], n, plane=p) for n, p in zip("ab", planes, strict=True)]
    actual = read_labels(geojson(tmp_path / "a.geojson", *shapes), (3, H, W)).values
    assert [np.unique(page).tolist() for page in actual] == [[0], [0, 2], [0, 1]]
    path = geojson(tmp_path / "b.geojson", PORE, GRAIN)
    with pytest.raises(InputError, match=r"feature 0 has no page, but the image has 3. Set `label_page`"):
        read_labels(path, (3, H, W))
    assert read_labels(path, (3, H, W), label_page=1).values[1].max() == 2
    path = geojson(path, feature("Point", [1, 1], "a", plane={"z": 1, "t": 1}))
    with pytest.raises(InputError, match="got slice 1 of time 1"):
        read_labels(path, (3, H, W))
    with pytest.raises(InputError, match=r"feature 0: the page must be 0 to 1, got 2"):
        read_labels(geojson(path, *shapes), (2, H, W))


@cases("axes", ["TZ", "ZT"])
@cases("kind", ["geojson", "zip"])
def test_z_and_t_positions_select_the_page_of_a_4d_stack(tmp_path, axes, kind):
    pytest.importorskip("zarr", reason="needs the extra vispe[big]")
    lengths = {"Z": 4, "T": 3}
    array = np.zeros((*(lengths[a] for a in axes), H, W), np.uint8)
    tifffile.imwrite(
        tmp_path / "a.tif", array, ome=True, metadata={"axes": f"{axes}YX"}, photometric="minisblack"
    )
    planes = {"a": (2, 0), "b": (0, 2), "c": (3, 1)}
    if kind == "geojson":
        shapes = [
            feature("Polygon", [box(0, 0, 4, 4)], n, plane={"z": z, "t": t}) for n, (z, t) in planes.items()
        ]
        path = geojson(tmp_path / "a.geojson", *shapes)
    else:
        path = tmp_path / "a.zip"
        positions = {n: {"z_position": z + 1, "t_position": t + 1} for n, (z, t) in planes.items()}
        roifile.roiwrite(path, [roi("RECT", None, n, (2, 3, 9, 8), **p) for n, p in positions.items()])
    image = read_image(tmp_path / "a.tif")
    actual = read_labels(path, image.pages.shape[:3], frame=image.frame).values
    pages = {name: np.flatnonzero((actual == k).any((1, 2))).tolist() for k, name in enumerate(planes, 1)}
    expected = {n: [z + 4 * t if axes == "TZ" else 3 * z + t] for n, (z, t) in planes.items()}
    assert pages == expected
    assert (
        image.frame
        == stored_frame(tmp_path / "a.tif")
        == replace(open_image(tmp_path / "a.tif").frame, applied=True)
    )
    subset = read_image(tmp_path / "a.tif", z="2:7")
    assert subset.frame.planes == image.frame.planes[2:7]
    with pytest.raises(
        InputError, match=r"must be those of one page of the image, got slice 2 of time 0, which 0 p"
    ):
        read_labels(path, (2, H, W), frame=read_image(tmp_path / "a.tif", z="8:10").frame)


@cases("kind", ["plane", "position"])
def test_slice_numbers_refer_to_the_file_if_z_selects_pages(tmp_path, kind):
    metadata = {"axes": "ZYX"}
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((6, H, W), np.uint8), ome=True, metadata=metadata)
    if kind == "plane":
        shapes = [feature("Polygon", [box(0, 0, 4, 4)], f"{z}", plane={"z": z, "t": 0}) for z in (3, 4)]
        path = geojson(tmp_path / "a.geojson", *shapes)
    else:
        path = tmp_path / "a.zip"
        roifile.roiwrite(path, [roi("RECT", None, f"{z}", (2, 3, 9, 8), position=z + 1) for z in (3, 4)])
    image = read_image(tmp_path / "a.tif", z="2:5")
    assert image.frame == stored_frame(tmp_path / "a.tif", z="2:5")
    actual = read_labels(path, image.pages.shape[:3], frame=image.frame).values
    assert [page.max() for page in actual] == [0, 1, 2]
    frame = read_image(tmp_path / "a.tif", z=3).frame
    with pytest.raises(InputError, match=r"in the file of the image\) must be selected by `z`, got 4"):
        read_labels(path, (1, H, W), frame=frame)


@cases(
    ("bad", "text"),
    [
        ({"type": "Feature", "properties": {}}, "feature 0 has no geometry"),
        (feature("Circle", [1, 2], "a"), "polygons, lines or points, got the type 'Circle'"),
        (feature("Polygon", [[[0, 0], [1, 1]]], "a"), "3 or more pairs of numbers"),
        (feature("Polygon", [[[0, 0], [1, "x"], [2, 2]]], "a"), "3 or more pairs of numbers"),
        (feature("Polygon", [[[0, 0], [1, 1e300], [2, 2]]], "a"), "at most 10000000 pixels"),
        (feature("Polygon", [], "a"), "neither lists of parts"),
        (feature("Point", None, "a"), "pairs of numbers"),
    ],
)
def test_invalid_geojson_raises_a_one_line_error(tmp_path, bad, text):
    with pytest.raises(InputError, match=text) as caught:
        read_labels(geojson(tmp_path / "a.geojson", bad), (1, H, W))
    assert "\n" not in str(caught.value)


def test_json_without_features_in_a_geojson_file_raises(tmp_path):
    path = tmp_path / "a.geojson"
    path.write_text('{"type": "Topology"}')
    with pytest.raises(InputError, match="has no GeoJSON features"):
        read_labels(path, (1, H, W))


def test_shapes_with_dense_or_with_class_numbers_raise(tmp_path):
    path = geojson(tmp_path / "a.geojson", PORE, GRAIN)
    with pytest.raises(OptionError, match="Omit `dense`"):
        read_labels(path, (1, H, W), dense=True)
    numbers = tmp_path / "b.json"
    numbers.write_text(json.dumps([{"class": 1, "points": [[1, 1]]}]))
    arguments = [path, numbers], [(1, H, W)] * 2
    with pytest.raises(InputError, match=r"has class names and .* has class numbers. Set `classes`"):
        read_label_set(*arguments)
    first, second = read_label_set(*arguments, classes=["pore", "grain"])
    assert (first.values[0, 0, 0], second.values[0, 1, 1]) == (1, 1)


def test_class_numbers_are_shared_across_files(tmp_path):
    paths = [geojson(tmp_path / "a.geojson", PORE), geojson(tmp_path / "b.geojson", GRAIN)]
    first, second = read_label_set(paths, [(1, H, W)] * 2)
    assert first.names == second.names == ("grain", "pore")
    assert (first.values.max(), second.values.max()) == (2, 1)


def roi(kind, points=None, name="a", box=None, **attributes):
    region = roifile.ImagejRoi.frompoints(points, name=name) if points is not None else roifile.ImagejRoi()
    region.roitype, region.name = roifile.ROI_TYPE[kind], name
    if box:
        region.left, region.top, region.right, region.bottom = box
    for key, value in attributes.items():
        setattr(region, key, value)
    return region


def roi_mask(tmp_path, regions, shape=(1, H, W)):
    """Return the mask of one ROI, read from a file that also contains a point in the last pixel."""
    path = tmp_path / "a_RoiSet.zip"
    path.unlink(missing_ok=True)
    roifile.roiwrite(path, [regions, roi("POINT", np.array([[W - 1, H - 1]]), "zz")])
    actual = read_labels(path, shape)
    assert actual.names == ("a", "zz")
    return actual.values[-1] == 1


def mask(rows, columns):
    out = np.zeros((H, W), bool)
    out[rows, columns] = True
    return out


def test_imagej_rectangles_polygons_and_freehand_rois(tmp_path):
    np.testing.assert_array_equal(
        roi_mask(tmp_path, roi("RECT", box=(2, 3, 9, 8))), mask(np.s_[3:8], np.s_[2:9])
    )
    corners = np.array([[2, 3], [9, 3], [9, 8], [2, 8]])
    for kind in ("POLYGON", "FREEHAND", "TRACED"):
        np.testing.assert_array_equal(roi_mask(tmp_path, roi(kind, corners)), mask(np.s_[3:8], np.s_[2:9]))
    # between pixels: centres from 3.5 on are inside
    subpixel = roi("POLYGON", corners.astype(np.float32) + 0.6)
    np.testing.assert_array_equal(roi_mask(tmp_path, subpixel), mask(np.s_[4:9], np.s_[3:10]))


def test_imagej_ovals_and_ellipses(tmp_path):
    y, x = np.mgrid[:H, :W] + 0.5
    actual = roi_mask(tmp_path, roi("OVAL", box=(4, 2, 17, 9)))
    np.testing.assert_array_equal(actual, ((x - 10.5) / 6.5) ** 2 + ((y - 5.5) / 3.5) ** 2 < 1)
    ends = {"x1": 4.0, "y1": 4.0, "x2": 14.0, "y2": 14.0}
    region = roi("FREEHAND", box=(0, 0, 20, 20), subtype=roifile.ROI_SUBTYPE.ELLIPSE, **ends)
    # aspect ratio: minor by major axis
    aspect_ratio = np.frombuffer(np.array(0.5, ">f4").tobytes(), ">u1,>u1,>i2")[0]
    region.arrow_style_or_aspect_ratio, region.arrow_head_size, region.rounded_rect_arc_size = map(
        int, aspect_ratio
    )
    actual = roi_mask(tmp_path, region)
    along, across = (x + y - 18) / np.sqrt(2), (y - x) / np.sqrt(2)
    radius = (along / np.sqrt(50)) ** 2 + (across / np.sqrt(12.5)) ** 2
    unambiguous = abs(radius - 1) > 0.01  # the outline is a polygon of 720 corners
    np.testing.assert_array_equal(actual[unambiguous], (radius < 1)[unambiguous])


def test_imagej_rotated_rectangles(tmp_path):
    ends = {"x1": 5.0, "y1": 10.0, "x2": 15.0, "y2": 10.0}
    region = roi("FREEHAND", box=(0, 0, 20, 20), subtype=roifile.ROI_SUBTYPE.ROTATED_RECT, **ends)
    width = np.frombuffer(np.array(6, ">f4").tobytes(), ">u1,>u1,>i2")[0]
    region.arrow_style_or_aspect_ratio, region.arrow_head_size, region.rounded_rect_arc_size = map(int, width)
    np.testing.assert_array_equal(roi_mask(tmp_path, region), mask(np.s_[7:13], np.s_[5:15]))


def test_imagej_lines_and_points_use_pixel_centre_coordinates(tmp_path):
    points = np.array([[3, 4], [8, 4], [8, 9]])
    line = mask(np.s_[4], np.s_[3:9]) | mask(np.s_[4:10], np.s_[8])
    np.testing.assert_array_equal(roi_mask(tmp_path, roi("POLYLINE", points)), line)
    np.testing.assert_array_equal(roi_mask(tmp_path, roi("FREELINE", points)), line)
    wide = roi_mask(tmp_path, roi("POLYLINE", points[:2], stroke_width=3))
    # a stroke width of 3 draws 3 x 3 pixels
    np.testing.assert_array_equal(wide, mask(np.s_[3:6], np.s_[2:10]))
    np.testing.assert_array_equal(roi_mask(tmp_path, roi("POINT", points)), mask([4, 4, 9], [3, 8, 8]))
    straight = roi("LINE", box=(0, 0, 0, 0), x1=3.0, y1=4.0, x2=8.0, y2=4.0)
    np.testing.assert_array_equal(roi_mask(tmp_path, straight), mask(np.s_[4], np.s_[3:9]))


def test_imagej_composite_rois_have_holes(tmp_path):
    path = [0, 2, 2, 1, 12, 2, 1, 12, 10, 1, 2, 10, 4, 0, 4, 4, 1, 8, 4, 1, 8, 8, 1, 4, 8, 4]
    region = roi(
        "RECT", box=(2, 2, 12, 10), multi_coordinates=np.array(path, np.float32), shape_roi_size=len(path)
    )
    expected = mask(np.s_[2:10], np.s_[2:12]) & ~mask(np.s_[4:8], np.s_[4:8])
    np.testing.assert_array_equal(roi_mask(tmp_path, region), expected)


def test_imagej_positions_are_one_based_pages(tmp_path):
    actual = roi_mask(tmp_path, roi("RECT", box=(2, 3, 9, 8), position=0), (1, H, W))
    assert actual.any()
    path = tmp_path / "b.zip"
    positions = [{"position": 2}, {"c_position": 1, "z_position": 3, "t_position": 1}]
    regions = [roi("RECT", None, n, (2, 3, 9, 8), **p) for n, p in zip("ab", positions, strict=True)]
    roifile.roiwrite(path, regions)
    assert [np.unique(page).tolist() for page in read_labels(path, (3, H, W)).values] == [[0], [0, 1], [0, 2]]


def test_the_class_of_an_imagej_roi_is_its_group_or_name(tmp_path):
    path = tmp_path / "RoiSet.zip"
    named = [
        roi("RECT", None, n, (i, 0, i + 1, 5))
        for i, n in enumerate(["pore-1", "pore_2", "grain", "0012-0345"])
    ]
    roifile.roiwrite(path, named)
    actual = read_labels(path, (1, H, W))
    assert actual.names == ("grain", "pore")
    assert actual.values[0, 0, :4].tolist() == [2, 2, 1, 0]
    assert "RoiSet.zip: skipped 1 shape without a class." in actual.notes
    grouped = [roi("RECT", None, f"any-{i}", (i, 0, i + 1, 5), group=g) for i, g in enumerate([3, 1, 3])]
    path.unlink()
    roifile.roiwrite(path, grouped)
    actual = read_labels(path, (1, H, W))
    assert actual.names == ("class 1", "class 3")
    assert actual.values[0, 0, :3].tolist() == [2, 1, 2]
    actual = read_labels(path, (1, H, W), classes=["a", "b", "c"])  # group g is the g-th of `classes`
    assert actual.values[0, 0, :3].tolist() == [3, 1, 3]
    assert [roi_class(n) for n in ("phase 2", "0001-0012-0345-1", " x-9 ", "", "-3")] == [
        "phase 2",
        None,
        "x",
        None,
        "-3",
    ]


def test_a_single_roi_file_is_read(tmp_path):
    one, two = tmp_path / "a.roi", tmp_path / "b.roi"
    roi("RECT", None, "pore", (0, 0, 3, 3)).tofile(one)
    roi("RECT", None, "", (0, 0, 3, 3)).tofile(two)  # without a name, the file name is used
    actual = read_label_set([one, two], [(1, H, W)] * 2)
    assert actual[0].names == ("b", "pore")


def test_unsupported_rois_and_invalid_roi_files_raise(tmp_path):
    path = tmp_path / "a.roi"
    for region, text in [
        (roi("ANGLE", np.array([[1, 1], [5, 5], [9, 1]])), "regions of the kind angle"),
        (roi("RECT", box=(0, 0, 5, 5), subtype=roifile.ROI_SUBTYPE.TEXT), "regions of the kind text"),
        (roi("RECT", box=(0, 0, 5, 5), rounded_rect_arc_size=9), "rounded corners"),
        (roi("POLYGON", np.array([[1, 1], [5, 5]])), "an area needs 3 points, got 2"),
    ]:
        region.tofile(path)
        with pytest.raises(InputError, match=text):
            read_labels(path, (1, H, W))
    content = roi("POLYGON", np.array([[1, 1], [5, 5], [1, 9]])).tobytes()
    for data in (b"Iout", content[:70], b"Jout" + content[4:], b""):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"a\.roi") as caught:
            read_labels(path, (1, H, W))
        assert "\n" not in str(caught.value)
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("a.txt", "x")
    with pytest.raises(InputError, match=r"contains no \.roi file"):
        read_labels(archive, (1, H, W))
    archive.write_bytes(archive.read_bytes()[:30])
    with pytest.raises(InputError, match="is not a region of ImageJ"):
        read_labels(archive, (1, H, W))


def coco(path, annotations, images=({"id": 7, "file_name": "set/a.png", "height": H, "width": W},)):
    categories = [{"id": 5, "name": "pore"}, {"id": 9, "name": "grain"}]
    path.write_text(
        json.dumps({"images": list(images), "annotations": annotations, "categories": categories})
    )
    return path


def coco_annotation(category, segmentation, image=7):
    return {"id": 1, "image_id": image, "category_id": category, "segmentation": segmentation, "iscrowd": 0}


# encoded by pycocotools 2.0: rows 3 to 29 and columns 5 to 44 of 40 x 50 pixels, without rows 10 and 11
COMPRESSED = "[672;;" + "EE;;" * 38 + "EE;`6"


def test_coco_polygons_and_rle_masks(tmp_path):
    counts = [2 * H, 3, H * (W - 2) - 3]  # the first three pixels of column 2
    annotations = [
        coco_annotation(5, [[10, 10, 30, 10, 30, 20, 10, 20]]),
        coco_annotation(9, {"size": [H, W], "counts": counts}),
    ]
    actual = read_labels(coco(tmp_path / "a.json", annotations), (1, H, W))
    assert actual.names == ("grain", "pore")
    np.testing.assert_array_equal(
        actual.values, blocks((2, np.s_[10:], np.s_[10:]), (1, np.s_[:3], np.s_[2]))
    )
    images = [{"id": 7, "file_name": "b.png"}]
    path = coco(
        tmp_path / "b.json",
        [
            coco_annotation(5, {"size": [40, 50], "counts": COMPRESSED}),
            coco_annotation(9, [[0, 0, 1, 0, 1, 1]]),
        ],
        images,
    )
    expected = np.zeros((40, 50), bool)
    expected[3:30, 5:45] = True
    expected[10:12] = False
    np.testing.assert_array_equal(read_labels(path, (1, 40, 50)).values[0] == 2, expected)


def test_coco_images_are_selected_by_file_name(tmp_path):
    images = [
        {"id": i, "file_name": f"set\\{n}", "height": H, "width": W} for i, n in enumerate(["a.png", "b.png"])
    ]
    square = [[0, 0, 2, 0, 2, 2, 0, 2]]
    path = coco(tmp_path / "all.json", [coco_annotation(5, square, 0), coco_annotation(9, square, 1)], images)
    actual = read_label_set([path, path], [(1, H, W)] * 2, images=["x/a.png", "y/b.tif"])
    assert [f.values.max() for f in actual] == [2, 1]
    with pytest.raises(InputError, match=r"has no image called c\.png. Its images: a\.png, b\.png"):
        read_labels(path, (1, H, W), image="c.png")


@cases(
    ("annotation", "text"),
    [
        (coco_annotation(6, [[0, 0, 2, 0, 2, 2]]), "unknown category, got category_id=6"),
        (coco_annotation(5, [[0, 0, 2, 0, 2]]), "no polygons or run lengths as segmentation"),
        (
            {"id": 1, "image_id": 7, "category_id": 5, "bbox": [0, 0, 2, 2]},
            "a bounding box does not define pixels",
        ),
        (coco_annotation(5, {"size": [H, W], "counts": [5, 5]}), "do not sum to 20 x 30"),
        (
            coco_annotation(5, {"size": [W, H], "counts": [600]}),
            r"must have the size of the image, \[20, 30\], got \[30, 20\]",
        ),
        (coco_annotation(5, {"size": [H, W], "counts": "é"}), "invalid character"),
    ],
)
def test_invalid_coco_annotations_raise(tmp_path, annotation, text):
    with pytest.raises(InputError, match=text):
        read_labels(coco(tmp_path / "a.json", [annotation]), (1, H, W))


def test_coco_with_a_different_image_size_raises(tmp_path):
    with pytest.raises(InputError, match=r"a\.png must have the size of the image, 30 x 20 .*, got 20 x 30"):
        read_labels(coco(tmp_path / "a.json", [coco_annotation(5, [[0, 0, 2, 0, 2, 2]])]), (1, W, H))


def test_ground_truth_classes_are_matched_by_name(tmp_path):
    path = geojson(tmp_path / "a.geojson", PORE, GRAIN)
    notes = []
    actual = read_truth(path, (1, H, W), names=["pore", "grain"], note=notes.append)
    np.testing.assert_array_equal(actual, blocks((1, np.s_[:4], np.s_[:4]), (2, np.s_[10:], np.s_[10:])))
    assert notes == [
        "64 % of the pixels are outside of all shapes of a.geojson and are ignored in the score."
    ]
    assert read_truth(path, (1, H, W))[0, 0, 0] == 2  # clusters: in natural order of the names
    with pytest.raises(InputError, match="feature 1: the class must be one of pore, matrix, got 'grain'"):
        read_truth(path, (1, H, W), names=["pore", "matrix"])


def test_shapes_with_an_excessive_total_area_raise(tmp_path, monkeypatch):
    monkeypatch.setattr("vispe.images.annotations.coverage.MAX_COVERED_PIXELS", 100)
    squares = [feature("Polygon", [box(0, 0, 10, 10)], "ab"[k % 2]) for k in range(300)]
    path = geojson(tmp_path / "a.geojson", *squares)
    with pytest.raises(
        InputError, match=r"a\.geojson: the total area of its 300 shapes exceeds 0 million pixels"
    ):
        read_labels(path, (1, H, W))
    fewer = geojson(tmp_path / "b.geojson", *squares[:20])
    assert any(
        "100 pixels of b.geojson are covered by shapes of different classes" in n
        for n in read_labels(fewer, (1, H, W)).notes
    )


def test_small_overlaps_in_a_large_image_are_counted(tmp_path):
    shapes = [feature("Polygon", [box(k, 900, k + 2, 902)], "ab"[k % 2]) for k in range(2)]
    actual = read_labels(geojson(tmp_path / "a.geojson", *shapes), (1, 1000, 1000))
    assert any("2 pixels of a.geojson are covered by shapes of different classes" in n for n in actual.notes)


def test_damage_that_roifile_only_logs_raises_a_one_line_error(tmp_path, caplog, capfd):
    import roifile

    roi = roifile.ImagejRoi.frompoints([[1, 1], [9, 1], [9, 9]], name="pore")
    roi.props = "a: b\n"
    (tmp_path / "a.roi").write_bytes(roi.tobytes())
    assert len(read_rois(tmp_path / "a.roi")) == 1
    (tmp_path / "b.roi").write_bytes(roi.tobytes()[:-4])
    with pytest.raises(InputError, match=r"b\.roi is damaged: .*\. Save it again with the ROI Manager"):
        read_rois(tmp_path / "b.roi")
    assert "exceeds" not in caplog.text + "".join(capfd.readouterr())
