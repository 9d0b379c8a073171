"""Run the tutorial notebooks and store their outputs, which the site shows without running them.

python eval/notebooks.py [docs/tutorials/NAME.ipynb ...]

Needs the dependencies of the site: pip install -e '.[docs,train,vlm]'.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
LARGEST = 300_000  # bytes of a notebook with its figures


def small(figure: str) -> str:
    """Return a PNG in base64 with 256 colours, about a third of its size."""
    image = Image.open(io.BytesIO(base64.b64decode(figure))).convert("RGB")
    image.quantize(256, method=Image.Quantize.FASTOCTREE).save(
        raw := io.BytesIO(), format="PNG", optimize=True
    )
    return base64.b64encode(raw.getvalue()).decode()


def stored(path: Path) -> None:
    """Run a notebook from its first cell in an empty folder, and write it with its outputs."""
    import nbformat  # both come with the extra docs
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    # differences between runs and machines are not informative
    notebook.metadata = {"language_info": {"name": "python"}, "kernelspec": notebook.metadata["kernelspec"]}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            # progress on stderr is not a result; text/plain of a figure is only its size
            retained = [o for o in cell.outputs if o.get("name") != "stderr"]
            cell.outputs = []
            for output in retained:  # lines printed one after another are one text
                if output.output_type == "stream" and cell.outputs and "text" in cell.outputs[-1]:
                    cell.outputs[-1].text += output.text
                else:
                    cell.outputs.append(output)
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output["data"] = {"image/png": small(output["data"]["image/png"])}
    text = nbformat.writes(notebook, indent=1) + "\n"
    if len(text) > LARGEST:
        raise SystemExit(
            f"{path.name} would have {len(text)} bytes, more than {LARGEST}; draw smaller figures."
        )
    path.write_text(text)
    print(path.name, f"{len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ.pop("MPLBACKEND", None)  # the kernel draws into the notebook
    arguments = [Path(name) for name in sys.argv[1:]]
    for each in arguments or sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        stored(each)
