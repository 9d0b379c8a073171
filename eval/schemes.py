"""Comparison of position schemes: small models that differ only in the scheme, on tasks that depend on position.

    python eval/schemes.py [--schemes rope1d mrope_i ...] [--seeds 3] [--steps 450]
    python eval/schemes.py draw

Each is a Qwen2-VL of two decoder layers and random weights, without any block in its vision tower, so that nothing but
the scheme provides the position of a patch. It learns the three tasks of `vispe.experimental.vlm.synthetic_tasks` at
once, packed by `vispe.train.vlm.packing`, and is then tested at lengths of training and beyond. Writes
eval/results/schemes.json after every model, and continues from it; `draw` makes docs/figures/schemes-tasks.png.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import torch

import vispe
from vispe.experimental.vlm.synthetic_tasks import TASKS, Words, draw
from vispe.train.vlm.lora import accuracy
from vispe.train.vlm.packing import Packing
from vispe.train.vlm.prompts import OrderedPrompt

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from timing import environment

ROOT = Path(__file__).parents[1]
OUT = ROOT / "eval" / "results" / "schemes.json"
STOCK = "mrope(after=side)"  # what Qwen2-VL computes
SCHEMES = ("rope1d", STOCK, "mrope_i", "vrope", "v2pe", "videorope", "hope_vlm")
SQUARES = ((2, 2), (3, 3), (4, 4), (2, 4), (4, 2), (3, 4), (4, 3))
LEARNT = {"picture": ((2,), (3,), (4,)), "place": SQUARES, "time": ((2,), (3,), (4,), (5,))}
ASKED = {
    "picture": {"training": LEARNT["picture"], "beyond": ((6,), (8,))},
    "place": {"training": LEARNT["place"], "beyond": ((6, 6), (8, 8), (5, 8), (8, 5))},
    "time": {"training": LEARNT["time"], "beyond": ((8,), (12,))},
}
WORDS = Words(image=40, video=41, start=42, end=43, width=12)
LENGTH, BATCH, POOL, TRIALS, RATE = 128, 32, 4096, 192, 3e-3


def model_of(scheme: str, seed: int) -> Any:
    """Return a random Qwen2-VL with a scheme."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 2, "vocab_size": 48, "rope_parameters": rope}
    text |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    tower = {"depth": 0, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 2}
    tower |= {"spatial_merge_size": 1, "temporal_patch_size": 1}
    marks = {"image_token_id": WORDS.image, "video_token_id": WORDS.video}
    marks |= {"vision_start_token_id": WORDS.start, "vision_end_token_id": WORDS.end}
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=tower, **marks))
    # wide enough for a model so narrow to learn: one in the square root of its width
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.mul_(25 if "embed_tokens" in name else 6)
    return vispe.convert(model, scheme)


def samples(sizes: dict[str, Any], each: int, seed: int) -> dict[str, list[OrderedPrompt]]:
    """Return samples of each task, over its sizes in turn."""
    generator = torch.Generator().manual_seed(seed)
    return {
        task: [draw(task, some[k % len(some)], WORDS, generator) for k in range(each)]
        for task, some in sizes.items()
    }


def measured(scheme: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one model, and return its accuracy by task and length."""
    began = time.process_time()
    model = model_of(scheme, seed).train()
    # the position task is the hardest to learn, so half of the samples are of them
    pool = [
        s for t, some in samples(LEARNT, POOL, seed).items() for s in some[: POOL // (1 + (t != "place"))]
    ]
    packing = Packing(model, LENGTH, training=True, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(pool), (BATCH,), generator=generator).tolist()
        loss = model(**packing([pool[k] for k in chosen]), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    model.eval()
    result: dict[str, Any] = {"loss": round(sum(losses[-50:]) / len(losses[-50:]), 4)}
    for when in ("training", "beyond"):
        requested = samples({task: some[when] for task, some in ASKED.items()}, TRIALS, 1_000_003 + seed)
        result[when] = {task: round(accuracy(model, some), 4) for task, some in requested.items()}
    return result | {"seconds": round(time.process_time() - began, 1)}


def run(schemes: list[str], seeds: int, steps: int, out: Path) -> None:
    """Measure missing rows, seed by seed."""
    retained = json.loads(out.read_text()) if out.is_file() else {}
    protocol = {"steps": steps, "batch": BATCH, "pool": 2 * POOL, "trials": TRIALS, "lr": RATE}
    protocol |= {"asked": ASKED, "model": "Qwen2-VL, random, 2 layers of width 64, vision tower of 0 blocks"}
    protocol = json.loads(json.dumps(protocol))
    if retained and retained["protocol"] != protocol:
        raise SystemExit(f"{out} is of another protocol; remove it to begin again.")
    retained = retained or {
        "protocol": protocol,
        "chance": {t: 1 / n for t, n in TASKS.items()},
        "models": {},
    }
    retained["environment"] = environment("transformers")
    for seed in range(seeds):
        for scheme in schemes:
            if str(seed) in (by_seed := retained["models"].setdefault(scheme, {})):
                continue
            by_seed[str(seed)] = result = measured(scheme, seed, steps)
            out.write_text(json.dumps(retained, indent=1) + "\n")
            print(scheme, seed, result, flush=True)


def draw_figure(out: Path) -> None:
    """Draw the accuracy by scheme and task, at training lengths and beyond."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    retained = json.loads(out.read_text())
    names, heads = (
        list(retained["models"]),
        {"picture": "which\nimage", "place": "where\nin it", "time": "when in\nvideo"},
    )
    marked = [f"{n}\n(Qwen2-VL)" if n == STOCK else n for n in names]
    figure, axes = pyplot.subplots(1, 2, figsize=(7.2, 0.62 * len(names) + 1.7), dpi=150, sharey=True)
    shown = None
    for ax, when in zip(axes, ("training", "beyond"), strict=True):
        values = [
            torch.tensor([[m[when][t] for t in TASKS] for m in retained["models"][n].values()]) for n in names
        ]
        # chance differs by task, so colour is the share of the way from chance level to all correct
        chance = torch.tensor([retained["chance"][t] for t in TASKS])
        colour = ((torch.stack([v.mean(0) for v in values]) - chance) / (1 - chance)).clamp(0, 1)
        shown = ax.imshow(colour, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for r in range(len(names)):
            for c in range(len(TASKS)):
                mean, low, high = (f(values[r][:, c]) for f in (torch.mean, torch.min, torch.max))
                ink = "white" if colour[r, c] > 0.6 else "black"
                ax.text(c, r - 0.13, f"{mean:.2f}", ha="center", va="center",
                        fontsize=13, color=ink)  # fmt: skip
                ax.text(
                    c, r + 0.27, f"{low:.2f} to {high:.2f}", ha="center", va="center", fontsize=7.5, color=ink
                )
        ax.set_xticks(range(len(TASKS)), [heads[t] for t in TASKS], fontsize=10)
        ax.set_yticks(range(len(names)), marked, fontsize=11)
        ax.tick_params(length=0)
        ax.set_title("training sizes" if when == "training" else "larger than in training", fontsize=12)
    bar = figure.colorbar(shown, ax=axes, fraction=0.03, pad=0.02, ticks=[0, 1])
    bar.ax.set_yticklabels(["chance level", "all correct"], fontsize=9)
    figure.savefig(ROOT / "docs" / "figures" / "schemes-tasks.png", bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["run", "draw"], default="run")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.schemes, arguments.seeds, arguments.steps, arguments.out)
    else:
        draw_figure(arguments.out)
