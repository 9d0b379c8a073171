"""Copy trained weights of vispe_micro into the package, with model card and log.

python -m models.micro.export runs/micro [--folders images/]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from models import training_images as data
from models.micro.tasks import HELD
from models.micro.validate import validate
from vispe.backbones.micro import WEIGHTS

HERE = Path(__file__).parent


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, validate the weights, and write weights, card and log.

    Raises:
        SystemExit: sources.json has no entry for a folder.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="output folder of models.micro.train")
    parser.add_argument(
        "--folders", type=Path, nargs="*", default=[], help="folders of real images, as in training"
    )
    args = parser.parse_args(words)
    weights = args.run / "weights.safetensors"
    card = json.loads((args.run / "card.json").read_text())
    images = [p.numpy() for source in (data.installed(), data.folders(args.folders)) for p in source]
    sources = json.loads((HERE / "sources.json").read_text())
    unknown = sorted({f.name for f in args.folders} - set(sources["folders"]))
    if unknown:
        raise SystemExit(
            f"sources.json has no entry for {', '.join(unknown)}. Add a description and the licence."
        )
    card |= {
        "name": "vispe_micro",
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "data": {
            "always": sources["always"],
            "folders": {f.name: sources["folders"][f.name] for f in args.folders},
            "not used": sources["not used"],
        },
        "scribbles": validate(weights, images[::HELD]),
    }
    shutil.copyfile(weights, WEIGHTS)
    WEIGHTS.chmod(0o644)
    WEIGHTS.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n")
    shutil.copyfile(args.run / "log.jsonl", HERE / "log.jsonl")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
