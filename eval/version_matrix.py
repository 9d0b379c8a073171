"""Test the wheel of vispe with versions of Python and torch, installed by pip outside the checkout.

    python eval/version_matrix.py --pythons python3.11 python3.12 python3.13 python3.14 --torch 2.11.0 newest

For each pair: a ViT with an encoding by name, forward, backward and at another size, converted and restored exactly,
traced as one graph, its attention in two backends; then the command of README. If a Python is missing, pip reports
whether everything would install, and the row states that nothing was run. Finished rows are stored, so that an
interrupted run resumes; `--fresh` discards them. An environment takes 6 GB while it exists.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checkout import ROOT

from vispe.utils.files import atomic_path
from vispe.utils.version import __version__

RESULT = Path(__file__).parent / "results" / "version_matrix.json"
USE = """
import timm, torch, vispe

torch.manual_seed(0)
x = torch.randn(2, 3, 64, 64)
spec = "alibi2d(slopes=learned)+rope_axial"
model = timm.create_model("vit_tiny_patch16_224", pos_embed=spec, img_size=64, num_classes=3)
model(x).square().mean().backward()
assert all(p.grad is not None for p in model.parameters())

model = timm.create_model("vit_tiny_patch16_224", img_size=64, dynamic_img_size=True).eval()
with torch.no_grad():
    before = model(x)
    vispe.convert(model, "alibi2d.local")
    assert model(torch.randn(1, 3, 96, 48)).shape == (1, 1000)
    eager = model(x)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(whole, eager, rtol=1e-4, atol=1e-4)
    vispe.restore(model)
    assert torch.equal(model(x), before)
    found = {}
    for backend in ("reference", "sdpa"):
        with vispe.use_backend(backend):
            attn = torch.manual_seed(1) and vispe.Attention(48, 3, "irpe")
            grid = vispe.Grid((5, 7), prefix=1)
            found[backend] = attn(torch.randn(2, grid.tokens, 48), grid.positions())
    torch.testing.assert_close(found["reference"], found["sdpa"], rtol=1e-4, atol=1e-4)
print(torch.__version__, timm.__version__, vispe.__version__)
"""
COMMAND = ("segment", "skimage:ihc", "--classes", "gland,stroma,lumen", "-o", "out")


def main() -> None:
    """Fill in the pairs that have no row yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pythons", nargs="+", default=["python3.11", "python3.12", "python3.13", "python3.14"]
    )
    parser.add_argument("--torch", nargs="+", default=["2.11.0", "newest"], help="versions, or newest")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--fresh", action="store_true", help="try everything again")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.result.exists() and not options.fresh:
        state = json.loads(options.result.read_text())
        rows = state["rows"] if state["vispe"] == __version__ else []
    done = {(row["asked_python"], row["asked_torch"]) for row in rows}
    with tempfile.TemporaryDirectory() as scratch:
        wheel = built(Path(scratch))
        for python in options.pythons:
            for torch in options.torch:
                name = Path(python).name
                if (name, torch) in done:
                    continue
                row = {"asked_python": name, "asked_torch": torch}
                result = shutil.which(python)
                row |= tried(result, torch, wheel, Path(scratch)) if result else requested(name, torch, wheel)
                rows.append(row)
                with atomic_path(options.result, force=True) as path:
                    path.write_text(
                        json.dumps(
                            {"what": __doc__.splitlines()[0], "vispe": __version__, "rows": rows}, indent=1
                        )
                    )
                print(*row.values(), sep=" | ", flush=True)


def built(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), ROOT])
    (wheel,) = folder.glob("*.whl")
    return wheel


def requirements(wheel: Path, torch: str) -> list[str]:
    """Return what pip is given."""
    return [f"{wheel}[cli]", "torch" if torch == "newest" else f"torch=={torch}"]


def tried(python: str, torch: str, wheel: Path, scratch: Path) -> dict[str, Any]:
    """Install and use; return what ran, or the last line of what went wrong."""
    folder = scratch / "environment"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run([python, "-m", "venv", str(folder / "venv")])
        inside = folder / "venv" / "bin" / "python"
        run([str(inside), "-m", "pip", "install", "-q", "--no-cache-dir", *requirements(wheel, torch)])
        words = run([str(inside), "-c", USE], folder).split()[-3:]
        strokes = Path(ROOT) / "data" / "demo" / "ihc_scribbles.json"
        run([str(inside), "-m", "vispe", *COMMAND, "--labels", str(strokes)], folder)
        assert (folder / "out" / "ihc_seg.png").is_file()
        version = run([str(inside), "-c", "import platform; print(platform.python_version())"]).strip()
    except subprocess.CalledProcessError as error:
        return {"ran": False, "why": (error.output or "no output").strip().splitlines()[-1][:300]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"ran": True, "python": version, "torch": words[0], "timm": words[1]}


def requested(name: str, torch: str, wheel: Path) -> dict[str, Any]:
    """Ask pip whether all would install on a Python that is not here."""
    number = name.removeprefix("python")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--dry-run",
        "--ignore-installed",
        "--target",
        "unused",
    ]
    command += ["--only-binary=:all:", "--python-version", number, *requirements(wheel, torch)]
    try:
        run(command)
    except subprocess.CalledProcessError as error:
        return {"ran": None, "installs": False, "why": (error.output or "").strip().splitlines()[-1][:300]}
    return {"ran": None, "installs": True, "why": "there is no such interpreter on this machine"}


def run(command: list[str], folder: Path | None = None) -> str:
    """Run a command away from the checkout; raise with what it printed."""
    clean = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home()), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout


if __name__ == "__main__":
    main()
