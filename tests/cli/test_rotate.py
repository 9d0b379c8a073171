import json

import numpy as np
import pytest
import torch
from PIL import Image

from vispe.backbones.user_callables import D4Segmenter
from vispe.cli.main import main
from vispe.errors import InputError, OptionError, ShapeError, UnknownName
from vispe.evaluate.evaluated import EvaluatedModel, load_evaluated_model
from vispe.evaluate.image_sources import load_sources
from vispe.evaluate.rotation import VisionModel
from vispe.images.sequences import FileImages, FileMasks
from vispe.images.symmetry import D4Features
from vispe.images.textures import random_field
from vispe.images.textures.texture_images import TextureImages

PLUGIN = """
import numpy as np, torch

def blocks(images):
    return torch.nn.functional.avg_pool2d(images, 8)

class Leaning:
    names = ("dark", "bright")

    def probabilities(self, image):
        ramp = torch.linspace(0, 1, image.shape[-1])
        share = (image[0] - ramp + 1) / 2
        return torch.stack([1 - share, share]).numpy()

    def __call__(self, image):
        return self.probabilities(image).argmax(0) + 1

leaning = Leaning()

def bright(image):
    return (image[0] > 0.5).numpy().astype(np.int64) + 1

number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with two micrographs and their masks, a Python file and a saved segmentation model."""
    from vispe.segment.features.feature_config import FeatureConfig
    from vispe.segment.pipeline import segment

    path = tmp_path_factory.mktemp("rotate")
    (path / "images").mkdir()
    (path / "masks").mkdir()
    for k, size in enumerate([(60, 64), (65, 63)]):
        image, classes = random_field(k, wavelength=20.0).render(size)
        grey = (image[0].clamp(0, 1) * 255).byte().numpy()
        Image.fromarray(grey).save(path / "images" / f"a{k}.png")
        Image.fromarray((classes * 255).byte().numpy()).save(path / "masks" / f"a{k}_mask.png")
    (path / "my.py").write_text(PLUGIN)
    segment([path / "images" / "a0.png"], path / "seg", cluster=2, features=FeatureConfig("filters"))
    return path


@pytest.fixture(autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_models_are_evaluated_on_images_with_masks(folder, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["rotate", "test_vit", str(folder / "images"), "--masks", str(folder / "masks"), "-o", str(out)]
    words += ["--weights", "random", "--quick", "--angles", "0", "--classes", "dark,bright"]
    words += ["--metrics", "d4,fingerprint,poses"]
    assert main(words) == 0
    output = capsys.readouterr()
    assert output.out.startswith(
        "test_vit (random weights), 2 images\nfeatures under rotation and reflection: strong"
    )
    assert "The patch kernel breaks the symmetry" in output.out
    assert "rotated by quarter turns and mirrored" in output.out
    assert "area of bright, largest minus smallest" in output.out
    assert "Fixed pattern" in output.out
    assert "note: Images of 65 x 63 px" in output.out
    report = json.loads((out / "report.json").read_text())
    assert report["images"] == ["a0.png", "a1.png"]
    assert report["classes"] == ["dark", "bright"]
    assert report["settings"]["angles"] == [0.0]
    assert all(len(row["values"]) == 2 for row in report["rows"])
    page = (out / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "data:image/png;base64," in page
    assert "http:" not in page.replace("https:", "http:").split("<body>")[0]
    assert main(words) == 2
    assert "exist; add --force" in capsys.readouterr().err


def test_equivariance_options_change_the_model(folder, capsys):
    words = [
        "rotate",
        "test_vit",
        str(folder / "images" / "a0.png"),
        "--weights",
        "random",
        "--metrics",
        "d4",
    ]
    words += ["--crop", "64", "--json"]

    def error(*options):
        assert main([*words, *options]) == 0
        actual = json.loads(capsys.readouterr().out)
        (row,) = [
            r for r in actual["rows"] if (r["transform"], r["metric"], r["part"]) == ("D4", "error", "full")
        ]
        return row["values"][0], actual

    plain, _ = error()
    exact, actual = error("--pos-embed", "alibi2d", "--symmetrize")
    averaged, _ = error("--d4")
    early, _ = error("--layer", "0")
    assert plain > 0.3
    assert exact < 1e-5
    assert averaged < 1e-5
    assert early != plain
    assert actual["subject"] == "test_vit + alibi2d (random weights, symmetric patch kernel)"
    assert actual["settings"]["pos_embed"] == "alibi2d"


@pytest.mark.slow
def test_saved_segmentation_models_are_evaluated(folder, capsys):
    words = ["rotate", str(folder / "seg" / "model.vispe"), str(folder / "images" / "a0.png")]
    words += ["--angles", "90", "--crop", "48", "--json"]
    assert main([*words, "--masks", str(folder / "masks" / "a0_mask.png")]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {(r["transform"], r["metric"]): r for r in report["rows"] if not r["control"]}
    assert rows["D4", "miou"]["summary"]["mean"] > 0.97  # filters have no direction
    assert rows["all poses", "accuracy_mean"]["summary"]["mean"] > 0.8
    assert report["fingerprint"] is None
    assert main([*words, "--d4", "--metrics", "segmentation", "--textures", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {(r["transform"], r["metric"]): r["values"] for r in report["rows"]}
    assert rows["D4", "miou"][0] == 1
    assert report["images"][1] == "texture 0, random field"
    assert "masks of the textures were ignored" in " ".join(report["notes"])


def test_python_callables_are_evaluated(folder, capsys):
    file = f"{folder / 'my.py'}"
    words = ["--textures", "1", "--crop", "64", "--json", "--metrics"]
    assert main(["rotate", f"{file}:blocks", *words, "d4,quadrant"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["patch"] == 8
    assert report["classes"] == ["phase 0", "phase 1"]
    assert {r["metric"] for r in report["rows"]} >= {"error", "quadrant_gap"}
    for more, agree in ((["--d4"], 1.0), ([], 0.9)):
        words = ["rotate", f"{file}:leaning", str(folder / "images"), "--kind", "segmenter"]
        assert (
            main([*words, *more, "--metrics", "segmentation", "--angles", "0", "--crop", "32", "--json"]) == 0
        )
        report = json.loads(capsys.readouterr().out)
        values = [r["values"] for r in report["rows"] if (r["transform"], r["metric"]) == ("D4", "miou")]
        assert (np.array(values) >= agree).all() == bool(more)
        assert report["classes"] == ["dark", "bright"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["test_vit"], "rotate: needs images, got none. Pass image files, or --textures N."),
        (["test_vitt", "IMAGES", "--weights", "random"], "timm has no model 'test_vitt'. Did you mean"),
        (["my.py:nothing", "IMAGES"], "my.py:nothing: the file my.py does not exist"),
        (
            ["no_such_module:f", "IMAGES"],
            "the Python module 'no_such_module' cannot be imported",
        ),
        (["FILE:bloks", "IMAGES"], "has no 'bloks'. Did you mean 'blocks'?"),
        (["FILE:number", "IMAGES"], "must be a function of images or a callable object, got a int"),
        (["FILE:Leaning", "IMAGES"], "must be a function of images or a callable object, got a class"),
        (["FILE:blocks", "IMAGES", "--symmetrize"], "has no effect on"),
        (
            ["FILE:blocks", "IMAGES", "--weights", "random"],
            "which is loaded as a Python callable. Omit it.",
        ),
        (["FILE:bright", "IMAGES", "--kind", "segmenter", "--d4"], "averages class probabilities"),
        (
            ["FILE:bright", "IMAGES", "--kind", "segmenter"],
            "segmenter is unknown, got neither names nor truths. Pass --classes, one per class, or --masks.",
        ),
        (["MODEL", "IMAGES", "--pos-embed", "alibi2d"], "has no effect on"),
        (
            ["MODEL", "IMAGES", "--classes", "a,b,c"],
            "--classes must have 2 entries (cluster 1, cluster 2), got 3. Omit --classes.",
        ),
        (["nothing.vispe", "IMAGES"], "nothing.vispe does not exist"),
        (["test_vit", "--textures", "1", "--masks", "MASKS"], "--masks needs images, got none"),
        (
            ["test_vit", "IMAGES", "--patch-size", "4"],
            "has no effect on test_vit, which is loaded as a timm model",
        ),
        (["open_clip:ViT-B-33", "IMAGES"], "open_clip has no model 'ViT-B-33'. Did you mean"),
        (["open_clip:ViT-B-32", "IMAGES"], "open_clip:ViT-B-32 needs one source of weights, got none"),
        (
            ["FILE:blocks", "IMAGES", "--metrics", "angels"],
            "unknown metric, got 'angels'. Did you mean 'angles'?",
        ),
        (
            ["FILE:blocks", "IMAGES", "--metrics", "quadrant"],
            "metric 'quadrant' is not applicable: it needs masks.",
        ),
        (
            ["FILE:blocks", "IMAGES", "--masks", "MASK", "--metrics", "quadrant"],
            "a1.png has no mask, got 1 mask file",
        ),
    ],
)
def test_invalid_arguments_raise_a_one_line_error(folder, capsys, words, text):
    names = {"IMAGES": folder / "images", "MASKS": folder / "masks", "MASK": folder / "masks" / "a0_mask.png"}
    names["MODEL"] = folder / "seg" / "model.vispe"
    words = [str(names.get(w, w)).replace("FILE", str(folder / "my.py")) for w in words]
    assert main(["rotate", *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_help_explains_the_numbers(capsys):
    assert main(["rotate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no change, unrelated features give about 1.41, and there is no upper limit" in text
    assert "vispe rotate seg/model.vispe images/ --masks masks/ -o out" in text


def test_evaluated_models_prepare_images():
    subject = load_evaluated_model("test_vit", weights="random", d4=True, layer=1)
    assert isinstance(subject.features, D4Features)
    assert isinstance(subject.features.features, VisionModel)
    assert subject.features.features.layer == 1
    assert (subject.patch_size, subject.size, subject.exact) == (16, 160, False)
    assert subject.title == "test_vit (random weights, block 1, averaged over eight poses)"
    page = np.linspace(0, 1, 32 * 48, dtype=np.float32).reshape(32, 48, 1)
    image = subject.tensor(page)
    assert image.shape == (3, 32, 48)
    np.testing.assert_allclose(subject.picture(image), page.repeat(3, 2), atol=1e-6)
    assert subject.features(image[None]).shape == (1, 64, 2, 3)
    with pytest.raises(ShapeError, match=r"images must have 3 channels, got \(32, 48, 2\)"):
        subject.tensor(page.repeat(2, 2))
    fixed = load_evaluated_model("test_vit", weights="random", img_size=64)
    assert fixed.size == 64


def test_probabilities_averaged_over_poses_rotate_with_the_image():
    rng = np.random.default_rng(0)
    weight = rng.random((2, 8, 8))
    segmenter = D4Segmenter(lambda image: weight * image[0].numpy() + weight[::-1])
    image = torch.from_numpy(rng.random((1, 8, 8)))
    np.testing.assert_array_equal(np.rot90(segmenter(image)), segmenter(torch.rot90(image, 1, (1, 2))))
    assert (D4Segmenter(lambda image: np.zeros((2, 8, 8)))(image) == 0).all()


def test_masks_are_matched_by_name_or_order_and_validated(folder, tmp_path):
    subject = EvaluatedModel("f", lambda x: x)
    paths = [folder / "images" / f"a{k}.png" for k in (0, 1)]
    images = FileImages(paths, subject.tensor)
    assert [images[k].shape for k in range(2)] == [(3, 60, 64), (3, 65, 63)]
    masks = [folder / "masks" / f"a{k}_mask.png" for k in (1, 0)]
    actual = FileMasks(images, masks)
    assert actual.n_classes == 2
    assert "The masks contain the grey levels 0, 255" in " ".join(actual.notes)
    expected = random_field(0, wavelength=20.0).render((60, 64))[1].numpy() + 1
    np.testing.assert_array_equal(actual[0], expected)
    assert actual[1].shape == (65, 63)
    for k in (0, 1):
        Image.open(folder / "masks" / f"a{k}_mask.png").save(tmp_path / f"truth{k}.png")
    ordered = FileMasks(images, [tmp_path / "truth0.png", tmp_path / "truth1.png"])
    np.testing.assert_array_equal(ordered[0], expected)
    assert "matched to images by order" in ordered.notes[0]
    with pytest.raises(InputError, match=r"truth1.png.*65.*63"):
        FileMasks(FileImages(paths[:1], subject.tensor), [tmp_path / "truth1.png"], n_classes=2)[0]
    with pytest.raises(InputError, match="two masks match"):
        FileMasks(images, [*masks, paths[0]])


def test_pages_of_a_stack_are_images(tmp_path):
    import tifffile

    pages = np.random.default_rng(0).integers(0, 255, (3, 20, 24), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "s.tif", pages, photometric="minisblack")
    images = FileImages([tmp_path / "s.tif"], EvaluatedModel("f", lambda x: x).tensor, "none")
    assert images.names == ("s.tif page 0", "s.tif page 1", "s.tif page 2")
    assert len(images) == 3
    np.testing.assert_allclose(images[2][0].numpy(), pages[2] / 255, atol=1e-6)


def test_texture_images_have_exact_masks():
    textures = TextureImages(3, EvaluatedModel("f", lambda x: x).tensor, side=96, seed=2)
    assert textures.names == ("texture 0, random field", "texture 1, discs", "texture 2, grains")
    for image, mask in zip(textures, textures.masks, strict=True):
        assert image.shape == (3, 96, 96)
        assert mask.shape == (96, 96)
        assert set(np.unique(mask)) <= {1, 2}
        assert image[0][torch.from_numpy(mask == 2)].mean() > image[0][torch.from_numpy(mask == 1)].mean()
    with pytest.raises(OptionError, match="`textures` must be 1 or more"):
        TextureImages(0, lambda page: page)


def test_images_without_masks_alongside_textures(folder):
    subject = EvaluatedModel("f", lambda x: x)
    paths = [folder / "images" / "a0.png"]
    actual = load_sources(subject, paths, textures=2)
    assert actual.truths is None
    assert len(actual.images) == len(actual.names) == 3
    assert "were ignored as well" in " ".join(actual.notes)
    with_masks = load_sources(subject, paths, [folder / "masks" / "a0_mask.png"], textures=2)
    assert len(with_masks.truths) == 3
    assert with_masks.truths[2].shape == (320, 320)
    with pytest.raises(UnknownName, match="has no 'f'"):
        load_evaluated_model("json:f")
