"""Sources of images: reading of all file types, damaged files, and fingerprints."""

import json
import pickle
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from tests.train.image_files import COLOUR, DEEP, GREY, STACK, plain, stretched
from vispe.errors import InputError, MissingExtra, OptionError
from vispe.train.data import ConcatSource, FolderSource, Mixture, Source, SyntheticSource, from_config
from vispe.train.data import synthetic as formulas
from vispe.train.data.synthetic import synthetic_picture


def test_every_kind_of_image_in_natural_order(folder):
    source = FolderSource(folder)
    names = ["b/deep16.png", *(f"page {i} of b/deep.er/stack2.tif" for i in range(2)),
             *(f"page {i} of b/deep.er/stack.tif" for i in range(3)), "img2.PNG", "img10.png", "rgba.png"]  # fmt: skip
    assert [source.name(i).replace(f"{folder}/", "") for i in range(len(source))] == names
    floats = STACK[:2] / np.float32(255)
    expected = [
        stretched(DEEP),
        *stretched(floats),
        *map(plain, STACK),
        plain(GREY),
        plain(COLOUR),
        plain(COLOUR),
    ]
    actual = list(source)
    assert len(actual) == len(source) == len(expected)
    for i, (image, target) in enumerate(zip(actual, expected, strict=True)):
        target = target.permute(2, 0, 1) if target.ndim == 3 else target.expand(3, -1, -1)
        torch.testing.assert_close(image, target, rtol=0, atol=2e-7)
        assert image.dtype == torch.float32
        assert torch.equal(source[i - len(source)], image)
        assert source.shape(i) == tuple(target.shape[1:])
    with pytest.raises(IndexError, match="image index must be below 9, got 9"):
        source[9]
    backwards = [source[i] for i in reversed(range(len(source)))]  # pages of two stacks in another order
    assert all(torch.equal(a, b) for a, b in zip(actual, reversed(backwards), strict=True))


def test_folders_flat_several_and_single_files(folder):
    assert len(FolderSource(folder, recursive=False)) == 3
    both = FolderSource([folder / "b", folder / "img2.PNG"])
    assert [p.name for p in both.files] == ["deep16.png", "stack2.tif", "stack.tif", "img2.PNG"]
    assert both.describe() == {
        "kind": "folder", "count": 7, "where": [str(folder / "b"), str(folder / "img2.PNG")], "licence": "",
        "files": 4, "damaged": 0, "normalize": "auto", "channel": None,
    }  # fmt: skip
    (folder / "b" / "loop").symlink_to(folder)
    assert len(FolderSource(folder)) == 9


def test_normalize_and_channel_are_used(folder):
    by_type = FolderSource(folder / "b" / "deep16.png", normalize="none")[0]
    torch.testing.assert_close(by_type[0], torch.from_numpy(DEEP / np.float32(65535)))
    wide = FolderSource(folder / "img10.png", normalize="stack")[0]
    torch.testing.assert_close(wide.permute(1, 2, 0), stretched(COLOUR), rtol=0, atol=2e-7)
    red_channel = FolderSource(folder / "img10.png", channel=0)[0]
    assert torch.equal(red_channel, plain(COLOUR[..., 0]).expand(3, -1, -1))
    tifffile.imwrite(
        folder / "five.tif",
        np.zeros((5, 4, 4), np.uint8) + np.uint8(3),
        photometric="minisblack",
        metadata={"axes": "CYX"},
    )
    with pytest.raises(InputError, match=r"five.tif: images must have 1 or 3 channels, got 5. Set `channel`"):
        FolderSource(folder / "five.tif")[0]
    assert FolderSource(folder / "five.tif", channel="4,0,2")[0].shape == (3, 4, 4)
    with pytest.raises(
        OptionError, match=r"normalize must be one of auto, stack, image, none, got 'stak'. Did you mean"
    ):
        FolderSource(folder, normalize="stak")


def test_damaged_files_raise_or_are_skipped_with_one_warning(folder):
    folder_source = FolderSource(folder)
    data = (folder / "img10.png").read_bytes()
    (folder / "a_cut.png").write_bytes(data[: len(data) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    source = FolderSource(folder)
    bad = next(i for i in range(len(source)) if "a_cut" in source.name(i))
    with pytest.raises(
        InputError, match=r"a_cut.png is truncated .* or skip such files with skip_damaged=true"
    ):
        source[bad]
    with pytest.warns(UserWarning, match="2 damaged files are skipped: ") as warning:
        saved = FolderSource(folder, skip_damaged=True)
    assert len(warning) == 1
    assert all(
        name in str(warning[0].message) for name in ("a_cut.png", "empty.jpg", "is truncated or damaged")
    )
    assert [p.name for p in saved.damaged] == ["a_cut.png", "empty.jpg"]
    assert saved.describe()["damaged"] == 2
    assert saved.fingerprint() == folder_source.fingerprint()
    assert all(torch.equal(a, b) for a, b in zip(saved, folder_source, strict=True))
    (folder / "broken.tif").write_bytes((folder / "b" / "deep.er" / "stack.tif").read_bytes()[:40])
    with pytest.raises(InputError, match=r"broken.tif"):
        FolderSource(folder)
    with pytest.warns(UserWarning, match="3 damaged files"):
        assert len(FolderSource(folder, skip_damaged=True)) == len(folder_source)


def test_errors_of_folders(tmp_path):
    with pytest.raises(InputError, match=r"the folder .*nowhere does not exist"):
        FolderSource(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"contains no image with .png"):
        FolderSource(tmp_path)
    (tmp_path / "one.png").write_bytes(b"nothing")
    with (
        pytest.warns(UserWarning, match="1 damaged file is"),
        pytest.raises(InputError, match="contains no readable image"),
    ):
        FolderSource(tmp_path, skip_damaged=True)
    tifffile.imwrite(tmp_path / "two.tif", STACK, photometric="minisblack")
    (tmp_path / "two.tif").rename(tmp_path / "one.png")
    with pytest.raises(InputError, match=r"one.png: expected 1 page .*, got 3. Use the suffix .tif"):
        FolderSource(tmp_path)[0]


def test_fingerprints_differ_between_contents(folder):
    first = FolderSource(folder).fingerprint()
    assert first == FolderSource(str(folder)).fingerprint()
    assert len(first) == 64
    renamed = folder.rename(folder.parent / (folder.name + "_moved"))
    assert FolderSource(renamed).fingerprint() == first
    actual = {first, FolderSource(renamed, normalize="stack").fingerprint()}
    actual.add(FolderSource(renamed, recursive=False).fingerprint())
    actual.add(FolderSource(renamed, channel=0).fingerprint())
    Image.fromarray(GREY).save(renamed / "img10.png")
    actual.add(FolderSource(renamed).fingerprint())
    (renamed / "img10.png").rename(renamed / "img11.png")
    actual.add(FolderSource(renamed).fingerprint())
    assert len(actual) == 6


def test_synthetic_images_depend_on_seed_and_number_only(tmp_path, monkeypatch):
    first, second = SyntheticSource(4, seed=5, side=40), SyntheticSource(5, seed=5, side=40)
    images = {i: synthetic_picture(i, 5, 40) for i in (0, 3, 4)}
    stored = SyntheticSource(5, seed=5, side=40, cache=tmp_path / "cache")
    for i, image in images.items():
        for source in (second, stored, second):  # drawn, into the folder, from memory
            assert torch.equal(source[i], image)
        assert image.shape == (3, 40, 40)
        assert 0 <= image.min() < image.max() <= 1
        assert second.shape(i) == (40, 40)
    assert torch.equal(first[3], images[3])
    assert not torch.equal(SyntheticSource(1, seed=6, side=40)[0], images[0])
    prints = {
        s.fingerprint()
        for s in (first, second, SyntheticSource(4, seed=6, side=40), SyntheticSource(4, 5, 41))
    }
    assert len(prints) == 4
    assert stored.fingerprint() == second.fingerprint()
    assert len(list((tmp_path / "cache").iterdir())) == 3
    monkeypatch.setattr(formulas, "synthetic_picture", None)  # what is in the folder is not drawn again
    fresh = pickle.loads(pickle.dumps(stored))
    assert all(torch.equal(fresh[i], image) for i, image in images.items())
    (tmp_path / "file").touch()
    monkeypatch.setattr(formulas, "synthetic_picture", lambda *args: images[0])
    with pytest.raises(InputError, match=r"cannot be written .*. Set another `cache`"):
        SyntheticSource(1, cache=tmp_path / "file")[0]
    wrong = (
        ({"count": 0}, "synthetic needs an integer of 1 or more, got synthetic=0"),
        ({"count": 1, "seed": -1}, "seed needs an integer of 0 or more, got seed=-1"),
        ({"count": 2.5}, "synthetic needs an integer of 1 or more, got synthetic=2.5"),
    )
    for options, text in wrong:
        with pytest.raises(OptionError, match=text):
            SyntheticSource(**options)


def test_discs_without_room_are_skipped(monkeypatch):
    requested = []

    def packing(sizes, *, radius, coverage, room=0.35):
        requested.append(coverage)
        if coverage > room:
            raise OptionError("no room")
        return sizes, radius

    monkeypatch.setattr(formulas.textures, "disc_packing", packing)
    assert formulas._discs(7, 3.0, 0.4) == (7, 3.0)
    assert requested == pytest.approx([0.4, 0.36, 0.324])
    with pytest.raises(OptionError, match="no room"):
        formulas._discs(7, 3.0, 0.4, room=0.0)


def test_synthetic_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(formulas, "KEPT", 2)
    monkeypatch.setattr(
        formulas, "synthetic_picture", lambda i, seed, side: torch.full((3, side, side), float(i))
    )
    source = SyntheticSource(5, side=4)
    assert [p[0, 0, 0].item() for p in source] == [0, 1, 2, 3, 4]
    assert sorted(source._cache) == [0, 1]
    assert source[4][2, 1, 1] == 4


class Flat(SyntheticSource):
    """Plain images instead of synthetic ones, which take long."""

    def _load_or_render(self, i):
        return torch.full((1, self.side, self.side), (10 * self.seed + i) / 100)


def test_concat_and_mixture_find_their_images():
    parts = [Flat(n, seed=n, side=16) for n in (2, 1, 3)]
    for source in (ConcatSource(parts), Mixture(parts, [1, 2, 0.5])):
        assert [round(100 * p[2, 3, 4].item()) for p in source] == [20, 21, 10, 30, 31, 32]
        assert len(source) == 6
        assert torch.equal(source[-1], parts[2][2])
        assert source.name(2) == "synthetic image 0 of seed 1"
        assert source.shape(5) == (16, 16)
        description = json.loads(json.dumps(source.describe()))
        assert [p["seed"] for p in description["parts"]] == [2, 1, 3]
        with pytest.raises(IndexError):
            source[6]
    mixture = Mixture(parts, [1, 2, 0.5])
    assert mixture.rows == (2 * 37, 4 * 37, 37)
    assert mixture.describe()["weights"] == [1.0, 2.0, 0.5]
    sources = (ConcatSource(parts), mixture, Mixture(parts, [1, 2, 1]), ConcatSource(parts[::-1]))
    assert len({source.fingerprint() for source in sources}) == 4
    assert Mixture(parts, [2, 4, 1]).fingerprint() == mixture.fingerprint()
    assert Mixture(parts[:2], [0.1, 0.2]).rows == Mixture(parts[:2], [1, 2]).rows


@pytest.mark.parametrize(
    "weights", [[1], [1, 0], [1, -2], [1, float("nan")], [1, float("inf")], [1, True], [1, "x"]]
)
def test_weights_that_do_not_fit(weights):
    parts = [SyntheticSource(1, side=8), SyntheticSource(1, side=8)]
    with pytest.raises(OptionError, match=r"(must be a positive number|one entry per source .2., got 1)"):
        Mixture(parts, weights)


def test_mixtures_do_not_nest_and_need_round_weights():
    parts = [SyntheticSource(1, side=8), SyntheticSource(1, side=8)]
    with pytest.raises(OptionError, match="sources must not be mixtures"):
        ConcatSource([Mixture(parts, [1, 2]), parts[0]])
    with pytest.raises(OptionError, match=r"must have a common period .* Round them"):
        Mixture(parts, [0.333333333, 0.666666667001])
    with pytest.raises(OptionError, match="needs at least one source"):
        ConcatSource([])


def test_recipes_make_sources(folder):
    one = from_config([{"folder": str(folder), "recursive": False, "licence": "CC0"}])
    assert isinstance(one, FolderSource)
    assert (len(one), one.describe()["licence"]) == (3, "CC0")
    both = from_config([{"folder": str(folder)}, {"synthetic": 4, "seed": 2, "side": 8}])
    assert type(both) is ConcatSource
    assert len(both) == 13
    mixed = from_config([{"folder": str(folder), "weight": 3}, {"synthetic": 4, "side": 8, "weight": 1}])
    assert isinstance(mixed, Mixture)
    assert mixed.rows == (192, 64)
    assert isinstance(from_config([{"synthetic": 2, "weight": 5}]), SyntheticSource)
    assert isinstance(mixed, Source)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([], "data must be a list of sources.*, got .."),
        ({"synthetic": 3}, "must be a list of sources"),
        ("folder", "must be a list of sources"),
        (["folder"], r"data.0. must be a source.*, got 'folder'"),
        ([{"foldr": "x"}], "must contain exactly one of folder, tar, hub, synthetic, got none.*'folder'"),
        ([{"folder": "x", "tar": "y"}], "got folder and tar"),
        ([{"synthetic": 3, "sed": 1}], "options of synthetic are seed, side, cache, weight, got 'sed'. Did"),
        ([{"synthetic": 3, "weight": 1}, {"synthetic": 3}], r"data.1. has no weight, but others have"),
        ([{"synthetic": 3, "weight": 0}], "weight must be a positive number, got 0"),
        ([{"synthetic": "many"}], "data.0..synthetic needs an integer, got .*'many'"),
        ([{"folder": "/nowhere/at/all"}], "the folder /nowhere/at/all does not exist"),
        ([{"hub": "user/set"}], "needs the package 'datasets'"),
    ],
)  # fmt: skip
def test_invalid_recipes(entries, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises((OptionError, InputError, MissingExtra), match=text):
        from_config(entries)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"folder": 3}, "data[1].folder needs a string, or a path, or a list of strings, or paths"),
        ({"folder": None}, "data[1].folder needs a string"),
        ({"folder": []}, "data[1].folder must have at least one entry, got an empty list."),
        ({"folder": "a", "recursive": "no"}, "data[1].recursive is true or false"),
        ({"folder": "a", "skip_damaged": 1}, "data[1].skip_damaged is true or false"),
        ({"folder": "a", "licence": 3}, "data[1].licence needs a string"),
        ({"tar": None}, "data[1].tar needs a string"),
        ({"hub": None}, "data[1].hub needs a string"),
        ({"synthetic": 3, "seed": "a"}, "data[1].seed needs an integer, got data[1].seed='a'."),
        ({"synthetic": "3"}, "data[1].synthetic needs an integer"),
    ],
)
def test_values_of_another_type_raise_with_their_key(entry, text):
    with pytest.raises(OptionError) as error:
        from_config([{"synthetic": 1}, entry])
    assert str(error.value).startswith(text)


def test_importing_is_light_and_nothing_is_warned(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(FolderSource(folder, skip_damaged=True)) == 9
    assert Path(folder).is_dir()
