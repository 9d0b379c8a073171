"""Write the generated tables of README and of pages of the documentation, from the registry and committed results.

python eval/tables.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import checkout  # noqa: F401  (finds vispe)

import vispe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "eval" / "results"
_BLOCKS = "a product of 8 x 8 blocks with every query and key in every layer (`bmm`)"
_MASKS = (
    "learned tables are expanded to a mask in every layer and call (`masked_fill_`, `index_select`, `copy_`)"
)
REASONS = {  # of speeds below 0.8
    "comrope_ap": _BLOCKS + "; `comrope_ap(form=folded)` has none",
    "comrope_ld": _BLOCKS + "; `comrope_ld(form=folded)` has none",
    "liere": _BLOCKS,
    "irpe.ctx_product_50_shared_qkv": "attention weights must be materialised for the values, and content is looked up "
    "three times (`gather`, `add`, `bmm`)",
    "lightnet": "queries and keys twice as wide as values, for which SDPA has no fused CPU kernel (`bmm`, `softmax`)",
    "hope_hyperbolic": "a separate score for every pair of channels, one after the other (`mul`, `add`, `exp`)",
    "cope": "counts over keys sorted by distance, for every query (`gather`, `copy_`, `where`)",
    "dape": "a small network over all pairs and heads (`mm`, `bmm`, `add`)",
    "tapa": "two products for every pair, and a cosine of one of them (`bmm`, `masked_fill_`, `cos`)",
    "tra": "keys that are removed and counted for every query (`masked_fill_`, `any`, `bmm`)",
    "shaw": "products with every offset, and a gather of n x n (`bmm`, `gather`)",
    "tpe2d": "two attentions (`_scaled_dot_product_flash_attention_for_cpu`)",
    "gpsa": "two attentions (`_scaled_dot_product_flash_attention_for_cpu`), one with a mask computed in every layer",
    "deberta": "two projected tables and their products in every layer (`mm`, `bmm`, `add`)",
    **dict.fromkeys(["bam", "bam_ssmax", "fire", "kerple", "t5"], _MASKS),
    "seqpe": "a projection of the position vectors to queries and keys in every layer (`addmm`, `add`, `copy_`)",
}


def encodings() -> str:
    rows = [
        "| name | what it does | kind | axes | new sizes | fused | cases of the authors' code | paper |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in vispe.list_encodings():
        info = vispe.encoding_info(name)
        title, _, link = info.paper.rpartition(", ")
        cells = [
            f"[`{name}`](../gallery/{name}.png)",
            info.summary,
            ", ".join(info.kinds) or "none",
            ", ".join(map(str, info.ndim)),
            "unchanged" if info.extrapolates else "resampled",
            "yes" if info.fused or "bias" not in info.kinds else "no",
            golden(name),
            f"[{title}]({link}), {info.year}" if link else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def golden(name: str) -> str:
    """Return how many cases of the reference implementation pass, or '' if there are none (see eval/golden.py)."""
    cases = json.loads((RESULTS / "golden.json").read_text()).values()
    mine = [c["status"] == "PASS" for c in cases if c["authors"] and name in c["encodings"]]
    return f"{sum(mine)} of {len(mine)}" if mine else ""


def summary() -> str:
    """Return the summary table of README; missed targets are in bold."""
    cases = [c["status"] == "PASS" for c in read("golden").values() if c["authors"]]
    rows = {(r["pos_embed"], r["dtype"], r["batch"]): r for r in _at(518, "vit_cpu", "learned_cpu")}
    speed = {key: f"{row['relative_speed']:.2f}" for key, row in rows.items()}
    gain = read("segment_micro")["summary"]["logistic, both"]["gain"]
    objects = read("objects")["summary"]
    largest = [r for r in read("segment_speed")["rows"] if r["classifier"] == "ensemble"][-1]
    low, high = objects["vispe, split"]["interval"]
    table = [
        [
            "encodings and schemes that reproduce their authors' code",
            f"{sum(cases)} of {len(cases)} cases, gradients too",
        ],
        [
            "speed of a ViT-S/14 with `alibi2d` at 518 px on a CPU, relative to the learned table",
            f"{speed['alibi2d', 'float32', 1]} (fp32), {speed['alibi2d', 'bfloat16', 1]} (bf16)",
        ],
        [
            "the same with the learned biases `rpb` and `irpe` (target 0.90), fp32 and bf16",
            f"{speed['rpb', 'float32', 1]}, {speed['rpb', 'bfloat16', 1]}; "
            f"**{speed['irpe', 'float32', 1]}, {speed['irpe', 'bfloat16', 1]}**",
        ],
        [
            "attention with distances on an H200: 64 x 64 tokens, 2 images, 12 heads, bfloat16; "
            "forward, and with backward ([all sizes](docs/explanation/attention-speed.md#on-a-gpu))",
            _on_a_gpu(),
        ],
        _larger_grids(),
        *_retrofit(),
        [
            "mIoU gain of vispe_micro over filters alone, few scribbles on real micrographs",
            f"{gain['all']:+.3f} ({gain['interval'][0]:.3f} to {gain['interval'][1]:.3f}, {gain['images']} images)",
        ],
        [
            "objects: average precision at IoU 0.5; Otsu's threshold with a watershed",
            f"{objects['vispe, split']['ap50']:.2f} ({low:.2f} to {high:.2f}), "
            f"{objects['otsu + watershed']['ap50']:.2f}; {objects['vispe, split']['images']} images",
        ],
        [
            f"`vispe segment` on {largest['megapixels']:g} Mpixel, two CPU cores",
            f"{largest['median_s']:.0f} s, {largest['peak_memory_gib']:.1f} GiB",
        ],
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in table)])


def _on_a_gpu() -> str:
    """Return milliseconds and memory of the fused kernels and of SDPA with a dense mask."""
    rows = {
        (r["mode"], r["contender"]): r for r in read("attention_nvidia_h200")["rows"] if r["tokens"] == 4096
    }
    cells: list[str] = []
    for contender in ("vispe", "sdpa cudnn, dense bias cached", "sdpa cudnn, dense bias built"):
        forward, both = rows["forward", contender], rows["frozen", contender]
        cells.append(f"{forward['ms']:.2f}, {both['ms']:.2f} ms ({both['extra_mib']:,.0f} MiB)")
    return "{}; SDPA with a cached dense mask {}, with one computed in each call {}".format(*cells)


def _larger_grids() -> list[str]:
    """Return the row about grids of 4.57 times the training size: means and ranges over seeds."""
    rows = read("extrapolation_large")["rows"]
    values = {
        name: [r["accuracy"]["4.57x"]["distance"] for r in rows if r["encoding"] == name]
        for name in ("fire", "rope_axial")
    }
    cells = [f"{sum(v) / len(v):.2f} ({min(v):.2f} to {max(v):.2f})" for v in values.values()]
    return [
        "nearest of three markers on grids of 4.57 times the training size: small ViTs with `fire` and `rope_axial` "
        "([task](docs/how-to/models/choosing.md#trained-on-one-grid-evaluated-on-others))",
        ", ".join(cells),
    ]


def _retrofit() -> list[list[str]]:
    """Return the rows about the retrofit of a DINOv2."""
    result = read("dinov2/alibi2d")
    kinds = ("noise", "textures", "micrographs")
    look = {r["kind"]: r["r2"] for r in result["rows"] if r.get("size") == 518 and "r2" in r}
    before = ", ".join(f"{look[kind]['before']['lr+ud']:.2f}" for kind in kinds)
    targets = {t["key"]: t["value"] for t in result["targets"]}
    after = ", ".join(f"{targets[f'r2 {kind} 518']:.2f}" for kind in kinds).replace("-", "\N{MINUS SIGN}")
    rank = [value for key, value in targets.items() if key.startswith("rank before")]
    return [
        [
            "R² of patch position probed from DINOv2 features (noise, textures, micrographs at 518 px), "
            "before → after a retrofit",
            f"{before} → {after}",
        ],
        [
            "effective rank of these features after the retrofit, relative to the original (target 0.6)",
            f"**{min(rank):.2f} to {max(rank):.2f}**",
        ],
    ]


def read(name: str) -> dict:
    """Return a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def _at(size: int, *files: str) -> list[dict]:
    rows = [row for file in files for row in read(file)["rows"]]
    return [row for row in rows if row["size"] == size and row["model"] == "ViT-S/14"]


def speeds() -> str:
    return "\n\n".join(text for text in (vit(), every()) if text)


def sets() -> str:
    return "\n\n".join((segmentation(), speed()))


def vit() -> str:
    rows = json.loads((RESULTS / "vit_cpu.json").read_text())["rows"]
    lines = [
        "ViT-S forward on a CPU, speed relative to the same model with its learned table (higher is faster):",
        "",
    ]
    lines += ["| encoding | model | pixels | fp32, batch 1 | fp32, batch 8 | bf16, batch 1 | bf16, batch 8 |"]
    lines += ["|---|---|---|---|---|---|---|"]
    keys = [("float32", 1), ("float32", 8), ("bfloat16", 1), ("bfloat16", 8)]
    for spec, model, size in dict.fromkeys((r["pos_embed"], r["model"], r["size"]) for r in rows):
        result = {
            (r["dtype"], r["batch"]): r["relative_speed"]
            for r in rows
            if (r["pos_embed"], r["model"], r["size"]) == (spec, model, size)
        }
        lines.append(f"| `{spec}` | {model} | {size} | {' | '.join(f'{result[k]:.2f}' for k in keys)} |")
    return "\n".join(lines)


def every() -> str:
    """Return the speed of every encoding in one ViT, with the cause for slow ones."""
    path = RESULTS / "encodings_cpu.json"
    if not path.exists():
        return ""
    rows = json.loads(path.read_text())["rows"]
    lines = [
        "ViT-S/16 at 224 px in fp32 on a CPU with each encoding, relative to stock `learn`. For values below 0.8 the",
        "last column gives the cause, from the profile in `eval/results/encodings_cpu.json`:",
        "",
        "| encoding | batch 1 | batch 8 | where the time goes |",
        "|---|---|---|---|",
    ]
    speeds = {(r["pos_embed"], r["batch"]): r["relative_speed"] for r in rows}
    for name in dict.fromkeys(r["pos_embed"] for r in rows):
        both = [speeds.get((name, b)) for b in (1, 8)]
        slow = any(s is not None and s < 0.8 for s in both)
        cells = ["" if s is None else f"{s:.2f}" for s in both]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {REASONS[name] if slow else ''} |")
    return "\n".join(lines)


def segmentation() -> str:
    result = json.loads((RESULTS / "segment_micro.json").read_text())
    rows = [r for r in result["rows"] if r["classifier"] == "logistic"]
    gain = result["summary"]["logistic, both"]["gain"]
    low, high = gain["interval"]
    lines = [
        "Segmentation of real micrographs from scribbles, with `--classifier logistic` and `--prior uniform`: mean IoU "
        "over images, 0.6 % of the pixels labelled all over the image (in brackets: only in one quarter of it). "
        f"`vispe_micro` adds {gain['all']:.3f} to filters (95 % interval {low:.3f} to {high:.3f}, {gain['images']} "
        "images):",
        "",
        "| set | images | filters | vispe_micro | both (default features) |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["set"] for r in rows):
        cells = []
        for kind in ("filters", "tokens", "both"):
            own = {layout: mean_iou(rows, name, kind, layout) for layout in ("spread", "corner")}
            cells.append(own["spread"] + (f" ({own['corner']})" if own["corner"] else ""))
        images = len({r["image"] for r in rows if r["set"] == name and r["scribbles"] == "spread"})
        lines.append(f"| {name.replace('_', ' ')} | {images} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_iou(rows: list[dict], name: str, kind: str, layout: str) -> str:
    """Return the mean IoU over the rows of a set, or '' if there are none."""
    own = [r["miou"] for r in rows if (r["set"], r["features"], r["scribbles"]) == (name, kind, layout)]
    return f"{sum(own) / len(own):.3f}" if own else ""


def speed() -> str:
    result = json.loads((RESULTS / "segment_speed.json").read_text())
    rows, commit = result["rows"], result["environment"]["commit"][:7]
    lines = [
        "`vispe segment` with its default features on two CPU cores, including the start of Python and training; the "
        f"median of {len(rows[0]['walls_s'])} runs on a shared machine, and the fastest (all runs, with the speed of "
        f"the machine before each: `eval/results/segment_speed.json`, commit {commit}). The machine was slow: a "
        f"process that only imports PyTorch and scikit-learn took {result['libraries_cpu_s']:.1f} s, 2.0 to 3.0 s on "
        "other days. The target of 1.5 Mpixel/s for 16 Mpixel is not reached: of 55 CPU seconds in a profile of one "
        "thread (py-spy), the trees take 36 %, the network 24 %, filters 10 % and imports 6 %.",
        "",
    ]
    lines += [
        "| classifier | Mpixel | seconds | fastest | Mpixel/s | peak memory, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        rate = round(r["megapixels"] / r["median_s"], 3)
        cells = (r["classifier"], r["megapixels"], r["median_s"], r["wall_s"], rate, r["peak_memory_gib"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", cpu(), "", peers(), "", interactive()])


def cpu() -> str:
    result = json.loads((RESULTS / "segment_cpu.json").read_text())
    lines = [
        "CPU seconds (user and system) of `vispe segment` on one thread, the least of "
        f"{len(result['rows'][0]['walls_s'])} runs on a shared machine (load average {result['load_average']:.0f}, "
        f"which slows down each run): `eval/results/segment_cpu.json`. A process that only imports PyTorch and "
        f"scikit-learn took {result['libraries_cpu_s']:.1f} s; the command collects less garbage. The targets of 3.5 s "
        "for 1 Mpixel and 1.5 s for the smallest image, which shows the start, are not reached: the imports alone "
        "exceed the second one.",
        "",
        "| classifier | Mpixel | CPU seconds |",
        "|---|---|---|",
    ]
    rows = sorted(result["rows"], key=lambda row: row["classifier"])
    return "\n".join(
        [*lines, *(f"| {r['classifier']} | {r['megapixels']:g} | {r['least_cpu_s']:.1f} |" for r in rows)]
    )


def peers() -> str:
    rows = json.loads((RESULTS / "segment_peers.json").read_text())["rows"]
    names = {
        "skimage_forest": "filters of scikit-image, forest of scikit-learn",
        "vispe_filters_forest": "`--features filters --classifier forest`",
        "vispe_default": "default features, `--classifier logistic`",
        "dinov2_s": "features of the size of DINOv2 S",
    }
    sizes = list(dict.fromkeys(r["megapixels"] for r in rows))
    lines = [
        "Comparison with other methods on the same images and scribbles, in seconds (peak memory in GiB):",
        "",
        f"| | {' | '.join(f'{size:g} Mpixel' for size in sizes)} |",
        f"|---|{'---|' * len(sizes)}",
    ]
    for key, name in names.items():
        own = {r["megapixels"]: r for r in rows if r["name"] == key}
        cells = [f"{own[size]['wall_s']:.1f} ({own[size]['peak_memory_gib']:.1f})" for size in sizes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interactive() -> str:
    result = json.loads((RESULTS / "interactive.json").read_text())
    rows = result["rows"]
    spent = " and ".join(f"{r['preview_ms']['cpu']:.0f} ms with {r['classes']} classes" for r in rows)
    final = " and ".join(f"{r['ensemble_ms']['cpu'] / 1000:.1f} s" for r in rows)
    again = " and ".join(f"{r['anew_ms']['cpu'] / 1000:.1f} s" for r in rows)
    return (
        "With cached features (paint, napari, `vispe.segment.live`), a changed scribble on 1 Mpixel costs "
        f"{spent} of CPU time until the preview (target 80 ms; user and system, {result['environment']['threads']} "
        f"thread(s)), class priors included, and {final} until the result of the ensemble; computing the preview again "
        f"from pixels costs {again}. The machine was shared (load average "
        f"{result['load_average']:.0f}), so wall-clock times are unreliable.\n\n{threads()}"
    )


def threads() -> str:
    result = json.loads((RESULTS / "segment_threads.json").read_text())
    load = max(r["load_average"] for r in result["rows"])
    names = {
        "default": "default features, logistic",
        "filters": "filters, logistic",
        "forest": "default features, forest",
    }
    cells = [
        f"| {names[r['mode']]} | {r['cpu_s']['1']:.1f} | {r['cpu_s']['2']:.1f} | {r['ratio']:.2f} |"
        for r in result["rows"]
    ]
    head = (
        "CPU time (user and system) of `vispe segment` on 1 Mpixel on a busy machine (two cores, load average "
        f"{load:.0f}), including the start of Python, in seconds; waiting threads do not spin:"
    )
    table = ["| features, classifier | one thread | two threads | ratio |", "|---|---|---|---|", *cells]
    return "\n".join([head, "", *table])


def descriptor() -> str:
    rows = {
        (r["strip"], r["columns"] if r["descriptor"] else None): r["per_score"]
        for r in read("strip_descriptor")["rows"]
        if r["tiles"][:2] == [64, 64]
    }
    cells = [
        f"| {name} | " + " | ".join(f"{rows[strip, columns]:.1f}" for columns in (None, 32, 64, 128)) + " |"
        for strip, name in (("fp16", "float16"), ("fp32", "float32"))
    ]
    head = "| strip | pointers | descriptor, grid of 32 columns | 64 columns | 128 columns |"
    return "\n".join(["", head, "|---|---|---|---|---|", *cells, ""])


def updated(text: str) -> str:
    """Return a page with its generated tables updated."""
    tables = {
        "encodings": encodings, "summary": summary, "speeds": speeds, "sets": sets, "descriptor": descriptor,
    }  # fmt: skip
    for name, make in tables.items():
        mark = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)"
        text = re.sub(mark, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, flags=re.DOTALL)
    return text


REFERENCE = ROOT / "docs" / "reference"
PAGES = (
    ROOT / "README.md",
    REFERENCE / "list.md",
    REFERENCE / "numbers.md",
    ROOT / "docs" / "explanation" / "attention-speed.md",
)

if __name__ == "__main__":
    for page in PAGES:
        new = updated(page.read_text())
        if "--check" in sys.argv and new != page.read_text():
            sys.exit(f"{page.name} is out of date; run python eval/tables.py")
        page.write_text(new)
