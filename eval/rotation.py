"""Evaluate small ViTs that differ only in their positional encoding: rotation, translation, linear position.

    python eval/rotation.py [--models learned alibi2d ...] [--runs runs/rotation] [--images 4] [--draw]

Each model is trained from scratch without labels (`models/masked.py`: synthetic micrographs and images of
scikit-image; the same images, steps and seed for all), then measured on held-out micrographs and on synthetic ones
with other seeds. Public micrographs are read from `--micrographs`, one folder per material with `images` and `masks`,
the first `--images` of each by name. Writes eval/results/rotation/MODEL.json with the values of every image and
eval/results/rotation/summary.png; an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vispe
from vispe.evaluate.rotation import VisionModel, measure
from vispe.evaluate.rotation.figures.record_figures import plot_models
from vispe.images import textures

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).parent / "bench"))
import masked
import training_images
from timing import environment

ROOT = Path(__file__).parents[1]
OUT = Path(__file__).parent / "results" / "rotation"
MICROGRAPHS = ROOT.parent / "shared" / "data" / "microscopy"
MATERIALS = (
    "superalloy_nasa", "steel_spheroidite_ampis", "powder_sem_ampis", "nuclei_fluorescence_dsb2018",
    "nuclei_brightfield_dsb2018", "nuclei_histology_dsb2018",
)  # fmt: skip
MODELS = {
    "random weights": ("learn", replace(masked.Recipe(), steps=0)),
    "learned": ("learn", masked.Recipe()),
    "sincos2d": ("sincos2d", masked.Recipe()),
    "rope_axial": ("rope_axial", masked.Recipe()),
    "rope_mixed": ("rope_mixed", masked.Recipe()),
    "alibi2d": ("alibi2d", masked.Recipe()),
    "none": ("none", masked.Recipe()),
    "alibi2d, symmetric kernel": ("alibi2d", replace(masked.Recipe(), symmetric=True)),
}
GROUPS = ("d4", "angles", "shift", "position", "layers", "fingerprint", "quadrant", "poses")


def main() -> None:
    """Train and measure missing models, then draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "rotation", help="folder of the weights")
    parser.add_argument("--micrographs", type=Path, default=MICROGRAPHS)
    parser.add_argument(
        "--images", type=int, default=3, help="of each material; as many synthetic ones in all"
    )
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    for name in [] if args.draw else args.models:
        file = OUT / f"{slug(name)}.json"
        if file.exists():
            continue
        model = trained(name, args.runs)
        result = list(images(args.micrographs, args.images))
        report = measure(
            VisionModel(model),
            [image for _, image, _ in result],
            truths=[truth for _, _, truth in result],
            image_names=[label for label, _, _ in result],
            metrics=GROUPS,
            size=MODELS[name][1].side,
            subject=name,
            settings={"card": card(name, args.runs), "environment": environment()},
            progress=lambda what, share, name=name: print(f"{name}: {share:.0%} {what}", flush=True),
        )
        partial_file = file.with_suffix(".part")
        partial_file.write_text(json.dumps(rounded(report.to_dict()), separators=(",", ":")) + "\n")
        partial_file.replace(file)
        print(report.to_markdown(), flush=True)
    results = {
        name: json.loads(f.read_text()) for name in MODELS if (f := OUT / f"{slug(name)}.json").exists()
    }
    plot_models(results).savefig(OUT / "summary.png")


def trained(name: str, runs: Path) -> nn.Module:
    """Return a model in evaluation mode; train it unless its weights exist."""
    encoding, recipe = MODELS[name]
    model, folder = masked.backbone(encoding, recipe), runs / slug(name)
    if recipe.steps == 0:
        return model.eval()
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "weights.safetensors"
    if not weights.exists():
        pool = [*training_images.synthetic(recipe.textures), *training_images.installed()]

        def follow(step: int, loss: float) -> None:
            if (step + 1) % 50 == 0:
                print(f"{name}: step {step + 1} of {recipe.steps}, loss {loss:.3f}", flush=True)

        model, losses = masked.train(encoding, recipe, pool, state=folder / "state.pt", on_step=follow)
        made = masked.card(encoding, recipe, losses, pictures=len(pool))
        (folder / "card.json").write_text(json.dumps(made, indent=1) + "\n")
        save_file(model.state_dict(), weights)
    model.load_state_dict(load_file(weights))
    return model.eval()


def card(name: str, runs: Path) -> dict[str, object]:
    """Return the card of the weights of a model."""
    file = runs / slug(name) / "card.json"
    return json.loads(file.read_text()) if file.exists() else {"recipe": "untrained"}


def images(folder: Path, count: int) -> Iterator[tuple[str, Tensor, np.ndarray]]:
    """Yield name, image (3, H, W) as the models were trained on them, and truth (H, W) with classes from 1."""
    from vispe.images.normalize import normalize
    from vispe.images.read import read_image

    for material in MATERIALS:
        for path in sorted((folder / material / "images").glob("*.png"))[:count]:
            page = torch.from_numpy(normalize(read_image(path))[0][0]).permute(2, 0, 1)
            truth = read_image(folder / material / "masks" / path.name).pages[0][..., 0]
            yield f"{material}/{path.stem}", _as_trained(page.expand(3, -1, -1)), truth.astype(np.int64) + 1
    makers = (textures.random_field, textures.disc_packing, textures.voronoi)
    for i in range(count):
        maker = makers[i % len(makers)]
        image, truth = maker(10_000 + i).render(256)
        yield f"{maker.__name__} {10_000 + i}", _as_trained(image), np.asarray(truth, dtype=np.int64) + 1


def rounded(value: Any) -> Any:
    """Return JSON values with five digits of every number."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def slug(name: str) -> str:
    """Return the name as a file's name."""
    return name.replace(", ", "_").replace(" ", "_")


def _as_trained(image: Tensor) -> Tensor:
    return (image.float() - 0.5) * 4


if __name__ == "__main__":
    print(f"vispe {vispe.__version__}")
    main()
