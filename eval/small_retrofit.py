"""Evaluation of retrofits of a small ViT: decodable position, similarity and segmentation of several students.

    python eval/small_retrofit.py [--pool ../shared/data/pretrain] [--seeds 0 1 2] [--runs runs/proof] [--draw]

A teacher with a learned absolute table is trained without labels (`models/masked.py`) on images that anyone can create:
synthetic micrographs and the images that scikit-image installs; with `--pool`, another one is also trained on a folder
of unlabelled images. Students are distilled from it by `vispe.train` with other encodings, one of them without the
teacher's weights. The seed of a student is that of its teacher. Micrographs (`--micrographs`) are used only for the
final evaluation. Metrics of similarity, position and segmentation: `small_retrofit_metrics.py`.

Adds a row for each model to eval/results/retrofit/proof.json as it is finished and draws
eval/results/retrofit/proof.png; finished models are skipped, and an interrupted training resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vispe
from vispe.train.data import Augment, ConcatSource, FolderSource, Source, SyntheticSource
from vispe.train.data.dataset import digest
from vispe.train.retrofit.config import LossWeights, Retrofit, Stage, Student, Target, Teacher, Window
from vispe.train.retrofit.config import Probe as ProbeConfig
from vispe.train.retrofit.distillation import retrofit

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).parent / "bench"))
sys.path.insert(0, str(Path(__file__).parent))
import masked
import small_retrofit_figure
import training_images
from small_retrofit_metrics import measured, readable
from small_retrofit_report import add, rounded, rows_of, summary, write
from timing import environment

ROOT = Path(__file__).parents[1]
OUT = Path(__file__).parent / "results" / "retrofit"
SHARED = ROOT.parent / "shared" / "data"
RECIPE = masked.Recipe(
    img_size=96, patch_size=8, dim=96, depth=4, num_heads=4, textures=300, steps=1200, batch_size=8, lr=1e-3,
    hidden=0.6, shown=0.3,
    kernel_std=0.02, table="sincos", table_std=0.5,
)  # fmt: skip
TEACHERS = {
    "own": RECIPE,  # images that anyone can make
    "pool": RECIPE,  # and a folder of unlabelled ones
    "small table": replace(RECIPE, table="normal", table_std=0.02),  # as timm begins: does it become biased?
}
STUDENTS = {
    "alibi2d": Student("alibi2d"),
    "none": Student("none"),
    "rope_axial": Student("rope_axial"),
    "alibi2d, random weights": Student("alibi2d", init="random"),
}
ROWS = {"own": tuple(STUDENTS), "pool": ("alibi2d",), "small table": ()}
STAGES = (
    Stage(img_size=96, steps=400, batch_size=8, lr=1e-3, schedule="cosine", warmup_steps=20),
    Stage(img_size=192, steps=50, batch_size=4, lr=3e-4, schedule="cosine", warmup_steps=5),
)
BLANKED = 4  # of 96 channels
OUTSIDE = (
    "skimage_data"  # folder of the pool that repeats images of scikit-image, one of them for evaluation only
)
PROBE = ProbeConfig(img_size=96)  # of the program itself; it chooses the channels


class Bytes(Source):
    """The images of a source, read once and cached in memory as 8 bits."""

    def __init__(self, source: Source) -> None:
        self.images = [(one[:1] if one.stride(0) == 0 else one).mul(255).round().byte() for one in source]
        self.source = source

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Tensor:
        return self.images[i].expand(3, -1, -1).float() / 255

    def shape(self, i: int) -> tuple[int, int]:
        """Return height and width of image i in pixels."""
        h, w = self.images[i].shape[1:]
        return h, w

    def describe(self) -> dict[str, Any]:
        """Return the description of the source, and that it was rounded."""
        return {**self.source.describe(), "bits": 8}

    def fingerprint(self) -> str:
        """Return a sha256 over that of the source, and the rounding."""
        return digest("8 bits", self.source.fingerprint())


def main() -> None:
    """Train and measure what is missing, then draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--teachers", nargs="+", default=list(TEACHERS), choices=TEACHERS)
    parser.add_argument("--pool", type=Path, help="folder of unlabelled images, one folder for each source")
    parser.add_argument("--micrographs", type=Path, default=SHARED / "microscopy", help="for evaluation")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "proof", help="where weights are stored")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--draw", action="store_true", help="train and measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        sources: dict[bool, Source] = {}
        for seed in args.seeds:
            for name in args.teachers:
                if name == "pool" and args.pool is None:
                    print("no --pool was given: the teacher that learns from one is omitted", flush=True)
                    continue
                if name == "small table" and seed != args.seeds[0]:
                    continue  # one is enough to see
                carry_out(name, seed, sources, args)
    file = args.out / "proof.json"
    report = json.loads(file.read_text())
    report["summary"] = summary(report["rows"])
    write(file, report)
    small_retrofit_figure.draw(report).savefig(args.out / "proof.png")
    for line in report["summary"]:
        print(json.dumps(line), flush=True)


def carry_out(name: str, seed: int, sources: dict[bool, Source], args: argparse.Namespace) -> None:
    """Train a teacher and its students, and measure them; rows that are there are left as they are."""
    requested = [(name, student, seed) for student in ("teacher", *ROWS[name])]
    retained = {(r["data"], r["student"], r["seed"]) for r in rows_of(args.out / "proof.json")}
    if retained.issuperset(requested):
        return
    pooled = name == "pool"
    if pooled not in sources:
        sources[pooled] = Bytes(load_images(args.pool if pooled else None, args.runs / "cache"))
    source, recipe = sources[pooled], replace(TEACHERS[name], seed=seed)
    folder = args.runs / f"{name} {seed}".replace(" ", "_")
    teacher_card = trained(recipe, source, folder)
    for student in ("teacher", *ROWS[name]):
        if (name, student, seed) in retained:
            continue
        start = time.process_time()
        row: dict[str, Any] = {"data": name, "student": student, "seed": seed}
        if student == "teacher":
            row |= {"card": teacher_card, "untrained": readable(masked.backbone("learn", recipe))}
            row |= {"trained": readable(model_of(recipe, folder))}
        else:
            out = folder / student.replace(", ", "_").replace(" ", "_")
            if not (out / "card.json").exists():
                config = recipe_of(folder, STUDENTS[student], out, source, seed)
                retrofit(config, source=source, on_step=follow(f"{name} {seed} {student}"))
            row |= {"train_cpu_s_of_the_last_start": round(time.process_time() - start, 1)} | measured(
                out, args.micrographs
            )
        row["cpu_s"] = round(time.process_time() - start, 1)
        add(args.out / "proof.json", row, common())
        numbers = row.get("criteria") or {key: row[key]["r2"] for key in ("untrained", "trained")}
        print(f"{name} {seed} {student}: {json.dumps(rounded(numbers))}", flush=True)


def load_images(pool: Path | None, cache: Path) -> Source:
    """Return the images to learn from.

    Args:
        pool: a folder of one's own with a folder for each source; None for what anyone can make.
        cache: folder for the synthetic ones, which take a few minutes.
    """
    import skimage

    folder = Path(skimage.__file__).parent / "data"
    parts: list[Source] = [
        SyntheticSource(RECIPE.textures, cache=cache),
        FolderSource(
            [folder / name for name in training_images.INSTALLED],
            licence="see the licence notes of scikit-image",
        ),
    ]
    if pool is not None:
        result = sorted(path for path in pool.iterdir() if path.is_dir() and path.name != OUTSIDE)
        parts += [FolderSource(path, licence=licence_of(pool, path.name)) for path in result]
    return ConcatSource(parts)


def licence_of(pool: Path, name: str) -> str:
    """Return the licence of a source, from the table in DATASETS.md of the pool."""
    for line in (pool / "DATASETS.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == name:
            return cells[-1]
    raise SystemExit(f"{pool / 'DATASETS.md'} names no licence for {name}; leave the folder out or add it.")


def trained(recipe: masked.Recipe, source: Bytes, folder: Path) -> dict[str, Any]:
    """Train a teacher unless its weights are there, and return its card."""
    folder.mkdir(parents=True, exist_ok=True)
    file, weights = folder / "card.json", folder / "weights.safetensors"
    if file.exists():
        return json.loads(file.read_text())
    pool = [one.expand(3, -1, -1) for one in source.images]

    def show(step: int, loss: float) -> None:
        if (step + 1) % 100 == 0:
            print(f"{folder.name}: step {step + 1} of {recipe.steps}, loss {loss:.3f}", flush=True)

    start = time.process_time()
    model, losses = masked.train("learn", recipe, pool, state=folder / "state.pt", on_step=show)
    save_file(model.state_dict(), weights)
    means = np.array(losses[: len(losses) // 50 * 50]).reshape(-1, 50).mean(1)
    more = {
        "pictures": source.describe(),
        "fingerprint": source.fingerprint(),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "cpu_s_of_the_last_start": round(time.process_time() - start, 1),
        "mean_loss_of_50_steps": [round(float(v), 4) for v in means],
    }
    write(file, masked.card("learn", recipe, losses, **more))
    return json.loads(file.read_text())


def model_of(recipe: masked.Recipe, folder: Path) -> nn.Module:
    """Return a trained teacher."""
    model = masked.backbone("learn", recipe)
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    return model


def recipe_of(folder: Path, student: Student, out: Path, source: Source, seed: int) -> Retrofit:
    """Return everything about a retrofit."""
    sizes = {"embed_dim": RECIPE.dim, "depth": RECIPE.depth, "num_heads": RECIPE.num_heads}
    options = {**sizes, "patch_size": RECIPE.patch_size, "class_token": False, "global_pool": ""}
    return Retrofit(
        teacher=Teacher(
            "vit_tiny_patch16_224", str(folder / "weights.safetensors"), RECIPE.img_size, options, [0.5] * 3, [0.25] * 3
        ),
        student=student,
        target=Target("auto", count=BLANKED),
        stages=list(STAGES),
        data=[source.describe()],
        out=str(out),
        loss=LossWeights(distill=1.0, d4=0.1),
        probe=PROBE,
        window=Window(resize="none", small="skip"),
        augment=Augment(pose=True),
        ema_decay=0.98,
        seed=seed,
        device="cpu",
        logging_steps=50,
        save_steps=100,
        tensorboard=False,
    )  # fmt: skip


def common() -> dict[str, Any]:
    """Return what all rows of the results have in common."""
    said = {
        "what": (__doc__ or "").splitlines()[0],
        "environment": environment("scikit-image", "scikit-learn"),
    }
    return said | {"teacher": asdict(RECIPE), "stages": [asdict(stage) for stage in STAGES]}


def follow(label: str) -> Any:
    """Return what is called after every update: it prints each line of the log."""

    def show(step: int, total: int, line: Any) -> None:
        if line is not None:
            print(f"{label}: step {step} of {total}, cosine {line['cosine']:.3f}", flush=True)

    return show


if __name__ == "__main__":
    print(f"vispe {vispe.__version__}")
    main()
