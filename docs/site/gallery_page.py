"""Page of all encodings: a gallery of figures with filter buttons and a search field."""

from __future__ import annotations

import vispe

KINDS = {
    "bias": "bias",
    "rotary": "rotation",
    "additive": "added to tokens",
    "mixing": "mixing",
    "positions": "positions",
}
FACTS = {"any-size": "any size", "fused": "no n x n mask"}

SCRIPT = """
<script>
document.querySelectorAll(".wall-controls").forEach((controls) => {
  const cards = [...document.querySelectorAll(".wall > a")];
  const count = controls.querySelector("output");
  const narrow = () => {
    const words = controls.querySelector("input[type=search]").value.toLowerCase().split(/\\s+/).filter(Boolean);
    const wanted = [...controls.querySelectorAll("input:checked")].map((box) => box.value);
    let shown = 0;
    for (const card of cards) {
      const has = wanted.every((fact) => card.dataset.facts.split(" ").includes(fact));
      const fits = has && words.every((word) => card.textContent.toLowerCase().includes(word));
      card.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown} of ${cards.length}`;
  };
  controls.addEventListener("input", narrow);
  narrow();
});
</script>
"""


def gallery_page() -> str:
    """Return the page in Markdown and HTML."""
    names = vispe.list_encodings()
    return "\n".join(
        [
            "---\nhide: [toc]\n---\n\n# Encodings\n",
            f"{len(names)} encodings. Each figure shows the effect of the encoding on one token; click it for the "
            "formula, all options and the paper. The same as a [table](../reference/list.md).\n",
            _controls(),
            '<div class="wall">',
            *(_card(name) for name in names),
            "</div>",
            SCRIPT,
        ]
    )


def facts(name: str) -> list[str]:
    """Return the facts of an encoding that the buttons filter by."""
    info = vispe.encoding_info(name)
    found = [*info.kinds, *(f"axes-{n}" for n in info.ndim)]
    found += ["any-size"] if info.extrapolates else []
    found += ["fused"] if info.fused or "bias" not in info.kinds else []
    return found


def _controls() -> str:
    present = {fact for name in vispe.list_encodings() for fact in facts(name)}
    boxes = [(kind, words) for kind, words in KINDS.items() if kind in present]
    boxes += [(f"axes-{n}", f"{n} {'axis' if n == 1 else 'axes'}") for n in (1, 2, 3)]
    boxes += [(fact, words) for fact, words in FACTS.items() if fact in present]
    labels = "".join(f'<label><input type="checkbox" value="{v}"> {words}</label>' for v, words in boxes)
    field = '<input type="search" placeholder="search, for example distance" aria-label="search">'
    return f'<div class="wall-controls">{field}{labels}<output></output></div>\n'


def _card(name: str) -> str:
    info = vispe.encoding_info(name)
    summary = info.summary.replace("`", "").replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<a href="{name}/" data-facts="{" ".join(facts(name))}">'
        f'<img src="../gallery/{name}.png" alt="" loading="lazy"><b>{name}</b> <span>{summary}</span>'
        f"<i>{', '.join(KINDS.get(kind, kind) for kind in info.kinds) or 'nothing'}, {info.year}</i></a>"
    )
