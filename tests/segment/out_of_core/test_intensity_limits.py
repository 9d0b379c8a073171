import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.cases import cases
from tests.segment.out_of_core.stores import write_store
from vispe.errors import InputError
from vispe.images.normalize import normalize
from vispe.images.read import Micrograph
from vispe.segment.out_of_core.intensity_limits import find_limits, percentiles
from vispe.segment.out_of_core.source.open_image import open_image

DTYPES = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"]


@given(
    st.data(),
    st.sampled_from(DTYPES),
    st.tuples(st.floats(0, 100), st.floats(0, 100)).map(sorted),
)
@settings(max_examples=40, deadline=None)
def test_percentiles_are_bit_identical_to_numpy(data, dtype, clip):
    elements = hnp.from_dtype(np.dtype(dtype))
    if dtype[0] == "f":  # without the largest numbers, whose differences overflow in numpy as well
        bound = 2.0**120
        elements = st.floats(-bound, bound, width=8 * int(dtype[1]))
    values = data.draw(hnp.arrays(dtype, st.integers(1, 40), elements=elements))
    cuts, lowest, highest = percentiles(
        lambda first: iter([values[:7], values[7:]]), values.dtype, tuple(clip)
    )
    expected = np.percentile(values, clip)
    assert [float(c) for c in cuts] == [float(e) for e in expected]
    assert (lowest, highest) == (float(values.min()), float(values.max()))


@cases("dtype", DTYPES)
def test_percentiles_of_many_chunks_equal_numpy(dtype):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(50_001) * (30 if dtype[1] == "1" else 3000)).astype(dtype)
    parts = np.array_split(values, 13)
    cuts, *_ = percentiles(lambda first: iter(parts), values.dtype, (0.5, 37.3, 99.5))
    assert [float(c) for c in cuts] == [float(v) for v in np.percentile(values, (0.5, 37.3, 99.5))]


def test_percentiles_of_no_values_are_none():
    assert percentiles(lambda first: iter([np.zeros(0, np.float32)]), np.dtype("f4"), (1.0, 99.0)) is None


@cases(
    ("mode", "dtype"),
    [("stack", "u2"), ("stack", "f8"), ("image", "f4"), ("none", "u1"), ("none", "f2")],
)
def test_limits_and_lazy_pages_equal_normalize(tmp_path, mode, dtype):
    rng = np.random.default_rng(1)
    pages = (rng.random((3, 41, 57)) * (1 if dtype[0] == "f" else 200)).astype(dtype)
    if dtype[0] == "f":
        pages[1, 5:9, 7:30] = np.nan
        pages[2, 0, 0] = np.inf
    image = open_image(write_store(tmp_path / "a.zarr", pages, "zyx", chunk=20))
    limits, data, notes = find_limits(image, mode, (0.5, 99.5), 16, lambda share: None)
    m = Micrograph(image.path, pages[..., None])
    expected, expected_notes = normalize(m, mode, (0.5, 99.5))
    assert data == m.valid.sum()
    assert [n for n in notes if "NaN" not in n] == expected_notes

    from vispe.segment.out_of_core.lazy_page import LazyPage, LazyValid, PageWindow

    for z in range(3):
        window = PageWindow(image, z, limits[z])
        np.testing.assert_array_equal(LazyPage(window)[0:41, 0:57], expected[z])
        np.testing.assert_array_equal(LazyValid(window)[3:40, 50:99], m.valid[z, 3:40, 50:99])


def test_pages_without_contrast_or_data_are_noted(tmp_path):
    pages = np.zeros((3, 20, 30), np.float32)
    pages[0] = 7
    pages[1] = np.nan
    pages[2, 0, 0] = 9
    image = open_image(write_store(tmp_path / "a.zarr", pages, "zyx"))
    limits, _, notes = find_limits(image, "image", (0.5, 99.5), 16, lambda share: None)
    _, expected = normalize(Micrograph(image.path, pages[..., None]), "image", (0.5, 99.5))
    assert limits == [None, None, (0.0, 9.0)]
    assert notes[1:] == expected
    assert "600 pixels (33 %)" in notes[0]


def test_images_without_data_raise(tmp_path):
    image = open_image(write_store(tmp_path / "a.zarr", np.full((20, 30), np.nan, np.float32)))
    with pytest.raises(InputError, match="has no data: all 600 pixels"):
        find_limits(image, "stack", (0.5, 99.5), 16, lambda share: None)


def test_values_out_of_range_raise_without_normalisation(tmp_path):
    image = open_image(write_store(tmp_path / "a.zarr", np.full((20, 30), 2, np.float32)))
    with pytest.raises(InputError, match=r"normalize=none needs values from 0 to 1, got 2 to 2"):
        find_limits(image, "none", (0.5, 99.5), 16, lambda share: None)
