"""Untrusted label images, scribbles and legends: read exactly or rejected with one error message."""

import json
from itertools import pairwise

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from skimage.draw import disk, line

from tests.cases import cases
from tests.segment.fuzz import corpus
from vispe.errors import InputError, VispeError
from vispe.images.labels.class_names import read_names
from vispe.images.labels.label_files import read_labels
from vispe.images.labels.truth_files import read_truth

SHAPE = (1, 12, 17)
GOOD = [{"class": 1, "points": [[2, 3], [9, 3]]}, {"class": 2, "width": 3, "points": [[5, 8]]}]


def read_scribbles(tmp_path, content):
    """Read scribbles -> labels; `content` is a text or an object to encode as JSON."""
    path = tmp_path / "s.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_labels(path, SHAPE)


def modified(index, **changes):
    """Return the valid scribbles with changes to one of them."""
    return [{**scribble, **(changes if i == index else {})} for i, scribble in enumerate(GOOD)]


BAD = {
    "deep": ("[" * 100_000, "nested too deeply"),
    "digits": ('[{"class": 1' + "0" * 6000 + ', "points": [[1, 1]]}]', "not valid: Exceeds the limit"),
    "nan": ('[{"class": 1, "points": [[NaN, 1]]}]', "NaN is not a JSON number"),
    "infinity": ('[{"class": 1, "points": [[-Infinity, 1]]}]', "-Infinity is not a JSON number"),
    "twice": ('[{"class": 1, "class": 2, "points": [[1, 1]]}]', "duplicate key 'class'"),
    "beyond": (
        modified(0, points=[[10**400, 1]]),
        r"points must be a non-empty list of \[x, y\] pairs of numbers",
    ),
    "large": (modified(0, points=[[1e300, 1]]), "must be inside the image"),
    "texts": (modified(0, points=[["1", "2"]]), "pairs of numbers"),
    "true": (modified(0, points=[[True, False]]), "pairs of numbers"),
    "ragged": (modified(0, points=[[1, 2], [3]]), "pairs of numbers"),
    "solid": (modified(0, points=[[[1, 2]]]), "pairs of numbers"),
    "none": (modified(0, points=[]), "pairs of numbers"),
    "wide": (modified(1, width=10**9), "width must be an integer from 1 to 1024 px, got width=1000000000"),
    "thin": (modified(1, width=0), "width=0"),
    "half": (modified(1, width=2.5), r"width=2\.5"),
    "page": (modified(1, page=10**18), "got 1000000000000000000"),
    "negative": (modified(1, page=-1), "page=-1"),
    "class": (modified(1, **{"class": -3}), "class=-3"),
    "object": ({"class": 1}, "must contain a list of strokes"),
    "number": (5, "must contain a list of strokes"),
    "html": ("<html></html>", "is not valid JSON: .* in line 1"),
    "empty": ("", "is not valid JSON"),
}


@cases("name", BAD)
def test_invalid_scribbles_raise(tmp_path, name):
    with pytest.raises(InputError, match=rf"s\.json.*{BAD[name][1]}") as caught:
        read_scribbles(tmp_path, BAD[name][0])
    assert len(str(caught.value)) < 500


def test_scribble_files_that_are_not_text_raise(tmp_path):
    for data in (b"\xff\xfe[\x00]\x00", b"\x80\x81", bytes(30)):
        (tmp_path / "s.json").write_bytes(data)
        with pytest.raises(InputError, match=r"s\.json (cannot be read as text|is not valid JSON)"):
            read_labels(tmp_path / "s.json", SHAPE)


def test_json_files_above_the_size_limit_raise(tmp_path, monkeypatch):
    monkeypatch.setattr("vispe.images.labels.json_files._JSON_BYTES", 50)
    with pytest.raises(InputError, match=r"s\.json must be at most 0 MB"):
        read_scribbles(tmp_path, GOOD)


@cases("width", [15, 16, 17, 18, 40, 101, 200])
def test_wide_scribbles_equal_a_disk_moved_along_the_line(tmp_path, width):
    h, w = 61, 83
    points = [[3, 50], [70, 9], [70, 58], [12, 12]]
    (tmp_path / "s.json").write_text(
        json.dumps(
            [{"class": 1, "width": width, "points": points}, {"class": 2, "points": [[0, 0], [82, 60]]}]
        )
    )
    middle = 0.0 if width % 2 else 0.5
    disk_offsets = np.stack(disk((middle, middle), width / 2))
    expected = np.zeros((h, w), int)
    for (x0, y0), (x1, y1) in pairwise(points):
        for y, x in zip(*line(y0, x0, y1, x1), strict=True):
            rows, columns = disk_offsets + np.array([[y], [x]])
            is_inside = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
            expected[rows[is_inside], columns[is_inside]] = 1
    expected[line(0, 0, 60, 82)] = 2
    actual = read_labels(tmp_path / "s.json", (1, h, w))
    np.testing.assert_array_equal(actual.values[0], expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
SCRIBBLES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "class": st.integers(-1, 4) | JSON,
            "width": st.integers(-1, 30) | JSON,
            "points": st.lists(
                st.lists(st.integers(-2, 18) | st.floats(-1, 20), min_size=1, max_size=3), max_size=4
            )
            | JSON,
            "page": st.integers(-1, 1) | JSON,
            "pages": JSON,
        },
    )
    | JSON,
    max_size=4,
)
SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def check_labels(path):
    """Check that any file gives valid labels or raises VispeError."""
    try:
        actual = read_labels(path, SHAPE)
    except VispeError:
        return
    assert actual.values.shape == SHAPE
    assert actual.values.dtype == np.int32
    assert 0 <= actual.values.min() <= actual.values.max() <= len(actual.names)
    assert len(np.unique(actual.values[actual.values > 0])) >= 2


@settings(max_examples=40, derandomize=True, **SETTINGS)
@given(content=SCRIBBLES | JSON)
def test_random_json_is_valid_scribbles_or_raises(tmp_path, content):
    (tmp_path / "s.json").write_text(json.dumps(content))
    check_labels(tmp_path / "s.json")


@pytest.mark.slow
@settings(max_examples=1000, **SETTINGS)
@given(content=SCRIBBLES | JSON)
def test_random_json_is_valid_scribbles_or_raises_1000_examples(tmp_path, content):
    (tmp_path / "s.json").write_text(json.dumps(content))
    check_labels(tmp_path / "s.json")


def check_legend(path, content):
    """Check that any legend gives valid class names or raises VispeError."""
    path.write_text(json.dumps(content))
    try:
        naming = read_names(None, path)
    except VispeError:
        return
    assert all(isinstance(n, str) and n.strip() and "\n" not in n for n in naming.names)
    assert len(set(naming.names)) == len(naming.names) > 0


KEYS = st.text(max_size=3) | st.integers(0, 300).map(str) | st.sampled_from(["#ff0000", "#00FF00", "#12"])


@settings(max_examples=40, derandomize=True, **SETTINGS)
@given(
    content=st.dictionaries(KEYS, JSON, max_size=4) | st.lists(st.text(max_size=4) | JSON, max_size=4) | JSON
)
def test_random_json_is_a_valid_legend_or_raises(tmp_path, content):
    check_legend(tmp_path / "l.json", content)


@pytest.mark.slow
@settings(max_examples=1000, **SETTINGS)
@given(
    content=st.dictionaries(KEYS, JSON, max_size=4) | st.lists(st.text(max_size=4) | JSON, max_size=4) | JSON
)
def test_random_json_is_a_valid_legend_or_raises_1000_examples(tmp_path, content):
    check_legend(tmp_path / "l.json", content)


@cases(
    ("text", "reason"),
    [
        ('{"1": "a", "1": "b"}', "duplicate key '1'"),
        ('{"' + "9" * 5000 + '": "a"}', "keys must be numbers or colours"),
        ('{"²": "a"}', "keys must be numbers or colours"),
        ('["a", "b\\u001b[2J"]', r"must not contain control characters, got 'b\\x1b\[2J'"),
        ('["a", "b\\nc"]', r"must not contain control characters, got 'b\\nc'"),
        ('["a", "\\ud800"]', r"must not contain control characters, got '\\ud800'"),
        ('["a", "a"]', "class names must be unique, got 'a' twice"),
        ('["a", 1]', "class names must be non-empty texts"),
        ("[]", "class names must be non-empty texts"),
    ],
)
def test_invalid_legends_raise(tmp_path, text, reason):
    (tmp_path / "l.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=rf"l\.json.*{reason}"):
        read_names(None, tmp_path / "l.json")


def test_unicode_class_names_are_preserved(tmp_path):
    names = ["Ferrit δ", "空隙", "μ-Phase №2", "a\u00a0b", "זווית"]
    (tmp_path / "l.json").write_text(json.dumps(names))
    assert read_names(None, tmp_path / "l.json").names == tuple(names)


@cases(
    ("values", "reason"),
    [
        (
            np.array([[2**63 + 5, 1]], np.uint64),
            r"label values must be at most 2\^53, got 9\.22337e\+18",
        ),
        (np.array([[1e300, 1]]), r"label values must be at most 2\^53, got 1e\+300"),
        (np.array([[0.5, 1]]), "label values must be integers, got fractions or NaN"),
        (np.array([[np.nan, 1]]), "label values must be integers, got fractions or NaN"),
        (np.array([[-1, 1]], np.int8), "label values must be 0 or more, got -1"),
        (np.array([[1j, 1]]), "values must be real numbers, got complex128"),
    ],
)
def test_label_images_with_invalid_values_raise(tmp_path, values, reason):
    tifffile.imwrite(tmp_path / "l.tif", values)
    for read in (lambda p: read_labels(p, (1, 1, 2)), lambda p: read_truth(p, (1, 1, 2))):
        with pytest.raises(InputError, match=rf"l\.tif: {reason}"):
            read(tmp_path / "l.tif")


@cases("kind", ["bool", "uint8", "int16", "uint32", "int64", "uint64", "float16", "float64"])
def test_label_images_of_any_dtype_are_read_exactly(tmp_path, kind):
    values = np.array([[0, 1, 1], [1, 0, 1]]) if kind == "bool" else np.array([[0, 1, 2], [2, 0, 1]])
    tifffile.imwrite(tmp_path / "l.tif", values.astype(kind), photometric="minisblack")
    if kind == "bool":
        actual = read_labels(tmp_path / "l.tif", (1, 2, 3), dense=True).values[0]
        np.testing.assert_array_equal(actual, values + 1)
    else:
        np.testing.assert_array_equal(read_labels(tmp_path / "l.tif", (1, 2, 3)).values[0], values)


def test_damaged_label_files_raise_or_are_read_exactly(tmp_path):
    labels = np.zeros(SHAPE[1:], np.uint8)
    labels[2, :9], labels[8, :9] = 1, 2
    Image.fromarray(labels).save(tmp_path / "l.png")
    data = (tmp_path / "l.png").read_bytes()
    for damage, corrupted in corpus.damaged(data, 25, seed=1):
        (tmp_path / "l.png").write_bytes(corrupted)
        try:
            actual = read_labels(tmp_path / "l.png", SHAPE)
        except InputError:
            continue
        np.testing.assert_array_equal(actual.values[0], labels, err_msg=damage)
        assert actual.notes or corrupted == data
