"""Images of data sets as `datasets` of Hugging Face gives them."""

import sys
import types

import pytest
import torch
from PIL import Image

from tests.train.image_files import COLOUR, DEEP, GREY, plain, stretched
from vispe.errors import InputError, MissingExtra
from vispe.train.data import FolderSource, HubSource


class _Feature:
    def __init__(self, decode=True):
        self.decode = decode


_Feature.__name__ = "Image"


class Table:
    """What `HubSource` uses of a data set of `datasets`: columns, features, decoded or as stored."""

    def __init__(self, rows, features, split="train", decode=True, content="abc"):
        self.rows, self.features, self.split, self.decode, self._fingerprint = (
            rows,
            features,
            split,
            decode,
            content,
        )
        self.info = types.SimpleNamespace(license="cc0-1.0")
        self.column_names = list(features)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]

    def cast_column(self, column, feature):
        assert isinstance(feature, _Feature)
        assert not feature.decode
        return Table(self.rows, {**self.features, column: feature}, self.split, False, "after the cast")


@pytest.fixture
def table(folder):
    def stored(name):
        return {"bytes": (folder / name).read_bytes(), "path": name}

    rows = [
        {"image": stored("img10.png"), "label": 3},
        {"image": {"bytes": None, "path": str(folder / "img2.PNG")}, "label": 4},
        {"image": stored("b/deep16.png"), "label": 5},
    ]
    return Table(rows, {"image": _Feature(), "label": "int"})


def test_hub_reads_stored_images_in_full_depth(table, folder):
    source = HubSource(table)
    assert source.column == "image"
    files = [folder / "img10.png", folder / "img2.PNG", folder / "b" / "deep16.png"]
    assert all(torch.equal(a, b) for a, b in zip(source, FolderSource(files), strict=True))
    assert source.describe() == {
        "kind": "hub", "count": 3, "where": "Table", "licence": "cc0-1.0", "split": "train", "column": "image",
        "normalize": "auto", "channel": None,
    }  # fmt: skip
    assert source.name(1) == "row 1 of hub=Table (train)"
    assert source.fingerprint() == HubSource({"train": table}).fingerprint()
    other = Table(table.rows, table.features, content="abd")
    assert source.fingerprint() != HubSource(other).fingerprint()


def test_hub_takes_pillow_and_arrays(folder):
    images = [Image.open(folder / "img10.png"), Image.open(folder / "rgba.png"), Image.open(folder / "img2.PNG"),
              Image.open(folder / "b" / "deep16.png"), COLOUR, GREY, GREY > 99]  # fmt: skip
    source = HubSource(Table([{"x": image} for image in images], {"x": "list"}), column="x")
    colour, grey = plain(COLOUR).permute(2, 0, 1), plain(GREY).expand(3, -1, -1)
    deep = stretched(DEEP).expand(3, -1, -1)
    black = torch.from_numpy(GREY > 99).float().expand(3, -1, -1)
    for actual, expected in zip(source, [colour, colour, grey, deep, colour, grey, black], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-7)


def test_hub_by_name(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(
        MissingExtra, match=r"hub='user/set' needs the package 'datasets'.* pip install datasets"
    ):
        HubSource("user/set")
    requested = []

    def load_dataset(name, split=None):
        requested.append((name, split))
        if name == "none":
            raise FileNotFoundError("Dataset 'none' doesn't exist on the Hub\nmore")
        return {"train": table, "test": table} if split is None else table

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    module.__spec__ = types.SimpleNamespace(name="datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    source = HubSource("user/set", split="train[:10%]", column="image")
    assert requested == [("user/set", "train[:10%]")]
    assert source.describe()["where"] == "user/set"
    assert source.describe()["split"] == "train[:10%]"
    with pytest.raises(InputError, match="hub=user/set: split must be one of train, test, got None"):
        HubSource("user/set")
    with pytest.raises(
        InputError, match=r"hub='none' cannot be loaded: Dataset 'none' doesn't exist on the Hub$"
    ):
        HubSource("none")


def test_errors_of_hub(table):
    with pytest.raises(
        InputError, match=r"hub=Table: column must be one of .*, got 'imag'. Did you mean 'image'"
    ):
        HubSource(table, column="imag")
    with pytest.raises(
        InputError, match=r"row 0 of hub=Table .train.: column 'label' must contain images, got int"
    ):
        HubSource(table, column="label")[0]
    with pytest.raises(InputError, match=r"hub=Table is a single split .train.*, got split='test'"):
        HubSource(table, split="test")
    with pytest.raises(
        InputError, match=r"hub=dict: split must be one of .*, got 'trian'. Did you mean 'train'"
    ):
        HubSource({"train": table, "test": table}, split="trian")
    with pytest.raises(InputError, match="has 0 image columns"):
        HubSource(Table([{"a": 1}], {"a": "int"}))
    with pytest.raises(InputError, match=r"does not support random access. Load it with streaming=False"):
        HubSource(iter([]))
    with pytest.raises(InputError, match="contains no readable image"):
        HubSource(Table([], {"image": _Feature()}))
