"""Generate the pages of the encodings and the tables of the guide from the registry, while mkdocs builds the site.

mkdocs calls `on_config`, `on_files` and `on_page_markdown` (see `hooks` in mkdocs.yml); tests call `pages`.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from posixpath import dirname, normpath
from typing import Any

import vispe
from vispe.encodings.base import HOST_FACTS
from vispe.encodings.registry import encoding_class
from vispe.hosts.support_matrix import HOSTS, support_table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "eval"), str(ROOT / "docs" / "site")]
from commands import commands_page  # noqa: E402
from evidence import (  # noqa: E402
    against_table,
    audits_table,
    extrapolation_table,
    layers_table,
    measures_table,
    misleads_list,
    samplers_table,
    scores,
)
from formulas import mathml, shown  # noqa: E402
from gallery_page import gallery_page  # noqa: E402
from playground_page import playground_page  # noqa: E402
from tables import golden  # noqa: E402  (committed tables and those of the site agree)

FACTS = (
    "Shapes",
    "New resolution",
    "Cost",
    "Invariant to",
    "Raises",
    "Presets",
    "Differs from the reference",
)
_SECTION = re.compile(rf"(?:^|\n|\s{{2,}})({'|'.join(FACTS)}): ")


def pages() -> dict[str, str]:
    """Return the text of every generated page by its path in docs/."""
    made = {f"encodings/{name}.md": page(name) for name in vispe.list_encodings()}
    return {
        "encodings/index.md": gallery_page(),
        "playground.md": playground_page(),
        "reference/api.md": reference(),
        "reference/commands.md": commands_page(),
        **made,
    }


def reference() -> str:
    """Return the page of the public names."""
    parts = ["# Reference\n", "The public names of `import vispe`.\n"]
    parts += [f"::: vispe.{name}\n" for name in sorted(vispe.__all__, key=lambda n: (n[0].isupper(), n))]
    return "\n".join(parts)


def page(name: str) -> str:
    """Return the page of an encoding."""
    info, doc = vispe.encoding_info(name), sections(inspect.getdoc(encoding_class(name)) or "")
    title, _, link = info.paper.rpartition(", ")
    facts = {
        "kind": ", ".join(info.kinds) or "none",
        "axes": ", ".join(map(str, info.ndim)),
        "new sizes": "unchanged" if info.extrapolates else "resampled",
        "needs an n x n mask": "no" if info.fused or "bias" not in info.kinds else "yes",
        "paper": f"[{title}]({link}), {info.year}" if link else "none",
        "cases of the authors' code": golden(name) or "none; own tests only",
    }
    text = [f"# {name}\n", f"{escape(info.summary)}\n", f"![{name}](../gallery/{name}.png)\n", shown(name)]
    text += ["| | |\n|---|---|", *(f"| {k} | {v} |" for k, v in facts.items()), ""]
    text += [f"```python\n{example(name, info.ndim)}\n```\n"]
    text += [doc["maths"], *(f"{escape(p)}\n" for p in doc["notes"])]
    signature = inspect.signature(encoding_class(name)).parameters
    rows = [(o, v, doc["args"].get(o, "")) for o, v in info.options.items()]
    if rows:
        text += ["## Options\n", "| option | default | meaning |\n|---|---|---|"]
        text += [f"| `{o}` | `{_cell(repr(v))}` | {_cell(escape(words))} |" for o, v, words in rows]
        text.append("")
    if host := [f for f in HOST_FACTS if f in signature]:
        text += ["The model supplies:\n", *(f"- `{f}`: {escape(doc['args'].get(f, ''))}" for f in host), ""]
    if info.presets:
        text += ["## Presets\n", "| preset | options |\n|---|---|"]
        for preset, options in info.presets.items():
            words = ", ".join(f"{k}={v}" for k, v in options.items())
            text.append(f"| `{name}.{preset}` | `{_cell(words)}` |")
        text.append("")
    text.append("## Facts\n")
    text += [f"**{k}:** {escape(doc['facts'][k])}\n" for k in FACTS if k in doc["facts"]]
    return "\n".join(part for part in text if part is not None)


def example(name: str, ndim: tuple[int, ...]) -> str:
    """Return how to use an encoding."""
    if 2 in ndim:
        return f"model = timm.create_model('vit_small_patch16_224', pos_embed='{name}')"
    return f"vispe.Attention(384, 6, '{name}')(tokens, vispe.Grid({(8, 16, 16) if 3 in ndim else (196,)}))"


def sections(doc: str) -> dict[str, Any]:
    """Return the parts of a docstring: maths (a code block or ''), notes, args and facts."""
    body, _, rest = doc.partition("\n\n")[2].partition("Args:\n")
    if not rest:
        start = _SECTION.search(doc)
        body, rest = (
            doc[: start.start()].partition("\n\n")[2] if start else "",
            doc[start.start() :] if start else "",
        )
    args_text, facts_text = rest, ""
    if found := re.search(rf"^({'|'.join(FACTS)}): ", rest, re.MULTILINE):
        args_text, facts_text = rest[: found.start()], rest[found.start() :]
    paragraphs = [p.strip("\n") for p in re.split(r"\n\s*\n", body) if p.strip()]
    maths = ""
    if paragraphs and re.search(r" \+?= |: .*\[", paragraphs[0]):
        maths = f"```text\n{paragraphs.pop(0)}\n```\n"
    args: dict[str, str] = {}
    for match in re.finditer(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", args_text, re.MULTILINE):
        for one in match[1].split(", "):
            args[one] = " ".join(match[2].split())
    pieces = _SECTION.split("\n" + facts_text)[1:]
    facts = {k: " ".join(v.split()) for k, v in zip(pieces[::2], pieces[1::2], strict=True)}
    return {"maths": maths, "notes": [" ".join(p.split()) for p in paragraphs], "args": args, "facts": facts}


def escape(text: str) -> str:
    """Return docstring text as Markdown: escape markup outside of code, and make double backquotes single."""
    parts = re.split(r"(``?[^`]+``?)", text)
    return "".join(
        f"`{p.strip('`')}`" if i % 2 else re.sub(r"([*_<\[\]#])", r"\\\1", p) for i, p in enumerate(parts)
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


KINDS = {
    "additive": "Added to the tokens",
    "rotary": "Rotations of queries and keys",
    "bias": "Biases of the logits",
    "mixing": "Mixing of neighbouring tokens",
    "positions": "Samplers of coordinates",
}
MEANING = {  # short names of invariances, from weak to strong
    (): "nothing",
    ("translation",): "shifts",
    ("translation", "reflection"): "shifts and mirror images",
    ("translation", "quarter_turns", "reflection"): "shifts, quarter turns, mirror images",
    ("translation", "quarter_turns", "reflection", "rotation"): "shifts, all rotations, mirror images",
}


def families_map() -> str:
    """Return encodings inside attention by what they know (rows) and their invariances (columns)."""
    cells: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name in vispe.list_encodings():
        info = vispe.encoding_info(name)
        if not {"rotary", "bias"} & set(info.kinds):
            continue
        cells.setdefault((info.encodes, info.invariant), []).append(f"[`{name}`](encodings/{name}.md)")
        for preset in info.presets:
            other = vispe.encoding_info(f"{name}.{preset}").invariant
            if other != info.invariant:
                link = f"[`{name}.{preset}`](encodings/{name}.md)"
                # an encoding invariant to every rotation encodes no direction
                encodes = tuple(k for k in info.encodes if k != "direction" or "rotation" not in other)
                cells.setdefault((encodes, other), []).append(link)
    columns = [c for c in MEANING if any(c == column for _, column in cells)]
    rows = sorted({row for row, _ in cells}, key=lambda row: ("content" in row, len(row), row))
    lines = [f"| encodes | {' | '.join(MEANING[c] for c in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        words = [", ".join(cells.get((row, column), [])) for column in columns]
        lines.append(f"| **{', '.join(row) or 'no position'}** | {' | '.join(words)} |")
    return "\n".join(lines)


def families_table() -> str:
    """Return one table for each kind: what encodings know, their invariances, costs, and behaviour on other grids."""
    text = []
    for kind, title in KINDS.items():
        text += [f"## {title}\n", "| encoding | axes | encodes | the same under | new sizes | cost |"]
        text.append("|---|---|---|---|---|---|")
        for name in vispe.list_encodings(kind=kind):
            info = vispe.encoding_info(name)
            facts = sections(inspect.getdoc(encoding_class(name)) or "")["facts"]
            cells = [
                f"[`{name}`](encodings/{name}.md)",
                ", ".join(map(str, info.ndim)),
                ", ".join(info.encodes),
                MEANING[info.invariant],
                "unchanged" if info.extrapolates else "resampled",
                _cell(escape(facts["Cost"])),
            ]
            text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def hosts_table() -> str:
    """Return which encoding works in which host, with the reasons for those that do not."""
    reasons: dict[str, int] = {}
    rows = [f"| encoding | {' | '.join(HOSTS)} |", "|---" * (len(HOSTS) + 1) + "|"]
    for name, row in support_table():
        cells = ["yes" if r is None else str(reasons.setdefault(r, len(reasons) + 1)) for r in row.values()]
        rows.append(f"| [`{name}`](encodings/{name}.md) | {' | '.join(cells)} |")
    hosts = [f"`{host}` is {words}" for host, words in HOSTS.items()]
    listed = [f"{i}. {escape(reason[0].upper() + reason[1:])}." for reason, i in reasons.items()]
    return "\n".join([*rows, "", "; ".join(hosts) + ".", "", *listed])


SAME = {
    "rotation": "all rotations",
    "quarter_turns": "quarter turns",
    "reflection": "mirror images",
    "translation": "shifts",
}


def comparison_table() -> str:
    """Return one row for each encoding of images: its kind, its invariances, and its measurements."""
    found = scores()
    heads = ["encoding", "kind", "the same under", "distance", "direction", "three cells", "speed"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|--:|--:|--:|--:|"]
    for name in vispe.list_encodings(ndim=2, exclude=vispe.list_encodings(kind="positions")):
        info, row = vispe.encoding_info(name), found.get(name, {})
        numbers = [f"{row[key]:.2f}" if key in row else "" for key in heads[3:]]
        # each of these invariances implies those below it
        same = next((words for fact, words in SAME.items() if fact in info.invariant), "nothing")
        cells = [f"[`{name}`](encodings/{name}.md)", ", ".join(info.kinds), same, *numbers]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {
    "layers": layers_table,
    "measures": measures_table,
    "misleads": misleads_list,
    "audits": audits_table,
    "against": against_table,
    "samplers": samplers_table,
    "map": families_map,
    "families": families_table,
    "hosts": hosts_table,
    "extrapolation": extrapolation_table,
    "comparison": comparison_table,
}


def filled(markdown: str, path: str) -> str:
    """Return a page of the guide, by its path in docs/, with its tables in place of `<!-- table: NAME -->`."""
    # links of tables are written from docs/
    up = "../" * path.count("/")
    return re.sub(
        r"<!-- table: (\w+) -->",
        lambda m: re.sub(r"\]\((?!http|#)", f"]({up}", TABLES[m[1]]()),
        markdown,
    )


def on_config(config: Any) -> Any:
    """Put the pages of the encodings into the navigation."""
    names = [{name: f"encodings/{name}.md"} for name in vispe.list_encodings()]
    for entry in config.nav:
        if "Encodings" in entry:
            entry["Encodings"] = ["encodings/index.md", *names]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the tables."""
    return filled(markdown, page.file.src_uri)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Convert formulas; in a notebook, resolve links and drop scripts, which load code from other servers."""
    if not page.file.src_uri.endswith(".ipynb"):
        return mathml(html)

    def linked(match: re.Match[str]) -> str:
        target = files.get_file_from_path(normpath(f"{dirname(page.file.src_uri)}/{match[1]}"))
        if target is None:
            raise ValueError(f"{page.file.src_uri} links to {match[1]}, which is not a page.")
        return f'href="{target.url_relative_to(page.file)}'

    return re.sub(
        r'href="([^":#]+\.(?:md|ipynb))', linked, re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    )
