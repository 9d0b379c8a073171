"""Write eval/results/golden.json: status, origin and encodings of every golden case.

python eval/golden.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.golden.case import Case  # noqa: E402  (tests are not installed)
from tests.golden.runner import run_case  # noqa: E402
from vispe.encodings.base import Encoding  # noqa: E402
from vispe.encodings.metadata import list_encodings  # noqa: E402

OUT = ROOT / "eval" / "results" / "golden.json"


def main() -> None:
    names, built = set(list_encodings()) - {"none"}, set[str]()
    stock = Encoding.__init__

    def recording(self: Encoding, **options: Any) -> None:
        built.add(type(self).name)
        stock(self, **options)

    Encoding.__init__ = recording
    cases = {}
    for path in sorted((ROOT / "tests" / "golden" / "vectors").glob("*.npz")):
        built.clear()
        status, of_authors = run_case(path).status, by_authors(Case(path).meta["source"])
        family = path.stem.partition("__")[0]
        cases[path.stem] = {
            "status": status,
            "authors": of_authors,
            "encodings": sorted((built | {family}) & names),
        }
    OUT.write_text(json.dumps(cases, indent=1) + "\n")
    print(f"{len(cases)} cases, {sum(c['status'] != 'PASS' for c in cases.values())} not passed")


def by_authors(source: dict[str, Any]) -> bool:
    """Return whether values were computed with released code, not by our evaluation of a formula."""
    formula = any(
        word.startswith(("own ", "formula")) or "own evaluation" in word for word in source["symbols"]
    )
    return source["commit"] not in (None, "none") and not formula


if __name__ == "__main__":
    main()
