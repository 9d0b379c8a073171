"""Train vispe_micro for segmentation from scribbles, on synthetic images, collages and real images.

    python -m models.micro.train --out runs/micro --steps 4000 [--folders images/] [--teacher weights.safetensors]

A restarted run resumes from its last checkpoint. The learning rate is constant and decays linearly to 0 over the last
fifth of the steps; `stable.pt` stores the state before the decay, from which a longer run can be continued. Writes
`weights.safetensors` (exponential moving average of the weights, float16), `log.jsonl` and `card.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import vispe
from models import training_images as data
from models.micro.trainer import SIZES, Recipe, Trainer
from vispe.backbones.micro.load import load_micro


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, train, validate and write the weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for checkpoints, weights, log and card"
    )
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="folders of real images")
    parser.add_argument("--teacher", type=Path, help="weights of a teacher for feature distillation")
    parser.add_argument(
        "--coarse-teacher", type=Path, help="folder of a retrofitted model for distillation into the trunk"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after this time; the run can be resumed"
    )
    parser.add_argument("--stop", type=int, default=10**9, help="stop at this step; the run can be resumed")
    parser.add_argument("--eval-steps", type=int, default=200, help="steps between validations")
    for field in fields(Recipe):
        choices = SIZES if field.name == "size" else None
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default, choices=choices)
    options = vars(parser.parse_args(words))
    out, folders, teacher, coarse, minutes, stop, eval_steps = (
        options.pop(k)
        for k in ("out", "folders", "teacher", "coarse_teacher", "minutes", "stop", "eval_steps")
    )
    recipe = Recipe(**options)
    out.mkdir(parents=True, exist_ok=True)
    images = [p.numpy() for source in (data.installed(), data.folders(folders)) for p in source]
    trainer = Trainer(recipe, images, out, load_micro(teacher) if teacher else None, coarse)
    trainer.load()
    facts = {"step": trainer.step, "recipe": asdict(recipe)}
    if teacher:
        facts["teacher"] = hashlib.sha256(teacher.read_bytes()).hexdigest()
    if coarse:
        facts["coarse_teacher"] = hashlib.sha256((coarse / "student.safetensors").read_bytes()).hexdigest()
    _log(out, facts)
    start, cpu = time.monotonic(), time.process_time()
    recent: list[dict[str, float]] = []
    while trainer.step < min(recipe.steps, stop) and time.monotonic() - start < 60 * minutes:
        if trainer.step == int(0.8 * recipe.steps):
            trainer.save("stable.pt")
        recent.append(trainer.train_step())
        if trainer.step % 20 == 0:
            mean = {k: round(float(np.mean([r[k] for r in recent])), 4) for k in recent[0]}
            _log(out, {"step": trainer.step, **mean, "cpu_s": round(time.process_time() - cpu, 1)})
            recent = []
        if trainer.step % 100 == 0:
            trainer.save()
        if trainer.step % eval_steps == 0 or trainer.step == recipe.steps:
            _log(out, {"step": trainer.step, "validation": trainer.validate()})
    trainer.save()
    weights = {k: v.half().contiguous() for k, v in trainer.average.state_dict().items()}
    save_file(weights, out / "weights.safetensors")
    card = {
        **{k: v for k, v in facts.items() if k != "step"}, "steps_done": trainer.step, "pictures": len(images),
        "folders": [f.name for f in folders], "validation": trainer.validate(400),
        "versions": {"vispe": vispe.__version__, "torch": torch.__version__, "numpy": np.__version__},
    }  # fmt: skip
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def _log(out: Path, row: dict[str, Any]) -> None:
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # denormal gradients slow training down threefold
    main()
