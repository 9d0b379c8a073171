"""Tables of measurements, from the results committed in eval/results."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import mean

import vispe

RESULTS = Path(__file__).parents[2] / "eval" / "results"


def extrapolation_table(path: Path = RESULTS / "extrapolation.json") -> str:
    """Return mean accuracies over seeds per encoding, question and grid, or a sentence if there are no results."""
    if not path.exists():
        return "The experiment has not been run yet: `python eval/extrapolation.py`."
    found = json.loads(path.read_text())
    rows, shapes = found["rows"], found["shapes"]
    questions = list(rows[0]["accuracy"][next(iter(shapes))])
    seeds = Counter(r["encoding"] for r in rows)
    few = {e: f" ({n} of {max(seeds.values())} seeds)" for e, n in seeds.items() if n < max(seeds.values())}
    samplers = vispe.list_encodings(kind="positions")
    rows = [r for r in rows if not sampled(r["encoding"])]
    missing = [f"`{n}`" for n in vispe.list_encodings(ndim=2, exclude=samplers) if n not in seeds]
    text = [f"Not run yet: {', '.join(missing)}.\n"] if missing else []
    for question in questions:
        heads = [f"{name} ({'x'.join(map(str, shape))})" for name, shape in shapes.items()]
        text += [
            f"Question: {question}.\n",
            f"| encoding | {' | '.join(heads)} |",
            "|---" * (len(shapes) + 1) + "|",
        ]
        means = {
            e: [mean(r["accuracy"][s][question] for r in rows if r["encoding"] == e) for s in shapes]
            for e in dict.fromkeys(r["encoding"] for r in rows)
        }
        for encoding, values in sorted(means.items(), key=lambda item: -mean(item[1])):
            text.append(f"| `{encoding}`{few.get(encoding, '')} | {' | '.join(f'{v:.3f}' for v in values)} |")
        text.append("")
    return "\n".join(text)


def sampled(encoding: str) -> list[str]:
    """Return [sampler, rest] of a spec that begins with a sampler, or an empty list."""
    first, _, rest = encoding.partition("+")
    return [first, rest] if first.partition("(")[0] in vispe.list_encodings(kind="positions") else []


def samplers_table(path: Path = RESULTS / "extrapolation.json") -> str:
    """Return accuracies on the training grid and on others, with and without samplers: mean and range over seeds."""
    found = json.loads(path.read_text())
    pairs = [(*(sampled(r["encoding"]) or ("", r["encoding"])), r) for r in found["rows"]]
    bases = list(dict.fromkeys(base for sampler, base, _ in pairs if sampler))
    if not bases:
        return "The experiment has not been run yet: `python eval/extrapolation.py`."
    columns = ["", *dict.fromkeys(sampler for sampler, _, _ in pairs if sampler)]
    unseen = [name for name in found["shapes"] if name != "1x"]
    runs = Counter((sampler, base) for sampler, base, _ in pairs if sampler)
    least, most = min(runs.values()), max(runs.values())
    text = [f"Seeds with samplers: {least if least == most else f'{least} to {most}'}.\n"]
    for question in next(iter(found["rows"][0]["accuracy"].values())):
        for title, grids in (("the training grid", ["1x"]), ("the mean of all other grids", unseen)):
            text += [f"Question: {question}, on {title}.\n", f"| sampler | {' | '.join(bases)} |"]
            text.append("|---" * (len(bases) + 1) + "|")
            for sampler in [
                *columns,
                "none",
            ]:  # the last row has no positions at all, so its columns are equal
                cells = []
                for base in bases:
                    key = ("", "none") if sampler == "none" else (sampler, base)
                    own = [r for s, b, r in pairs if (s, b) == key]
                    each = [mean(r["accuracy"][g][question] for g in grids) for r in own]
                    cells.append(f"{mean(each):.3f} ({min(each):.2f} to {max(each):.2f})" if each else "")
                text.append(f"| {f'`{sampler}`' if sampler else 'no sampler'} | {' | '.join(cells)} |")
            text.append("")
    return "\n".join(text)


def measures_table() -> str:
    """Return one row for each measure of an audit, default measures first."""
    import vispe.experimental.measures  # noqa: F401  (adds its measures)
    from vispe.evaluate.audit.measures import all_measures

    rows = ["| name | family | question | number | compared with | limit |", "|---|---|---|---|---|--:|"]
    for m in sorted(all_measures().values(), key=lambda m: not m.default):
        compared = ", ".join(m.controls) or "a known value"
        kind = "experimental, " * m.__module__.startswith("vispe.experimental") + "on request"
        name = f"`{m.name}`" + ("" if m.default else f" ({kind})")
        rows.append(f"| {name} | {m.family} | {m.question} | {m.number} | {compared} | {m.limit} |")
    return "\n".join(rows)


def misleads_list() -> str:
    """Return when the number of each measure is misleading or harmless."""
    import vispe.experimental.measures  # noqa: F401  (adds its measures)
    from vispe.evaluate.audit.measures import all_measures

    return "\n".join(f"- `{m.name}`: {m.misleads}" for m in all_measures().values())


def audits_table(path: Path = RESULTS / "audit" / "small.json") -> str:
    """Return the audits of small models: a column for each encoding, a row for each measure."""
    found = json.loads(path.read_text())["rows"]
    names = list(next(iter(found.values()))["findings"])
    rows = [f"| | {' | '.join(f'`{e}`' for e in found)} |", f"|---|{'--:|' * len(found)}"]
    for name in names:
        cells = []
        for audit in found.values():
            entry = audit["findings"].get(name)
            shown = "-" if entry is None else f"{entry['value']:.2f}"
            cells.append(f"**{shown}**" if entry and entry["verdict"] == "yes" else shown)
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def against_table(path: Path = RESULTS / "audit" / "dinov2.json") -> str:
    """Return the audit of a pretrained model and of its retrofit, with paired differences."""
    from vispe.evaluate.audit.measures import all_measures

    report, measures = json.loads(path.read_text()), all_measures()
    after = {f["name"]: f for f in report["against"]["audit"]["findings"]}
    rows = ["| question | before | | after | | difference, 95 % |", "|---|--:|---|--:|---|--:|"]
    for f in report["findings"]:
        g, pair = after.get(f["name"]), report["against"]["differences"].get(f["name"])
        if g is None or pair is None:
            continue
        ends = pair["interval"]
        span = "" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})"
        cells = [f"{f['value']:.3f}", f["verdict"], f"{g['value']:.3f}", g["verdict"]]
        question = f"`{f['name']}`: {measures[f['name']].question}"
        rows.append(f"| {question} | {' | '.join(cells)} | {pair['difference']:.3f}{span} |")
    return "\n".join(rows)


def layers_table(path: Path = RESULTS / "dinov2" / "layers.json") -> str:
    """Return R² of position predicted after every block of a DINOv2."""
    found = json.loads(path.read_text())
    pairs = zip(found["noise"], found["textures"], strict=True)
    rows = [f"| {block} | {a:.2f} | {b:.2f} |" for block, (a, b) in enumerate(pairs, 1)]
    return "\n".join(["| after block | noise | textures |", "|--:|--:|--:|", *rows])


def scores(folder: Path = RESULTS) -> dict[str, dict[str, float]]:
    """Return the measurements of each encoding: accuracies from 0 to 1, and speed relative to a learned table.

    `distance` and `direction` are means over unseen grids, `three cells` over its questions.
    """
    found: dict[str, dict[str, list[float]]] = {}

    def note(name: str, what: str, value: float) -> None:
        found.setdefault(name, {}).setdefault(what, []).append(value)

    for row in json.loads((folder / "extrapolation.json").read_text())["rows"]:
        for question in ("distance", "direction"):
            unseen = [answers[question] for grid, answers in row["accuracy"].items() if grid != "1x"]
            note(row["encoding"], question, mean(unseen))
    for row in json.loads((folder / "three_cell.json").read_text())["rows"]:
        note(row["encoding"], "three cells", row["scores"]["average"] / 100)
    for row in json.loads((folder / "encodings_cpu.json").read_text())["rows"]:
        if row["batch"] == 8:
            note(row["pos_embed"], "speed", row["relative_speed"])
    return {name: {what: mean(values) for what, values in row.items()} for name, row in found.items()}
