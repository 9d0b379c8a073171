"""Programs under eval/ run from a plain checkout, without an installed vispe and without git."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import vispe

ROOT = Path(__file__).parents[1]
START = """
import json, os, runpy, sys
from pathlib import Path

sys.path.append(sys.argv[1])
plain = sys.path[1:]
import matplotlib.pyplot, skimage.feature, timm, torch  # once for all programs

programs = [p for p in sorted(Path("eval").rglob("*.py")) if '__name__ == "__main__"' in p.read_text()]
assert len(programs) > 15
for program in programs:
    child = os.fork()
    if not child:
        sys.path[:] = [str(program.parent.resolve()), *plain]  # as Python starts a program
        runpy.run_path(str(program), run_name="program")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, program
sys.path[:] = [str(Path("eval/bench").resolve()), *plain]
import timing, vispe
print(json.dumps({"environment": timing.environment("no-such-package"), "vispe": vispe.__file__}))
"""


@pytest.fixture
def checkout(tmp_path):
    """Return a copy of the working tree and a folder of installed packages without vispe."""
    for folder in ("vispe", "eval", "models", "tests"):
        left = shutil.ignore_patterns("results", "__pycache__", "vectors", "*.png")
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder, ignore=left)
    site = tmp_path / "site"
    site.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.suffix != ".pth" and "vispe" not in entry.name:
            (site / entry.name).symlink_to(entry)
    return tmp_path / "tree", site


def run_programs(checkout, *words):
    tree = checkout[0]
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PATH")}
    command = [sys.executable, "-S", *words]
    return subprocess.run(
        command,
        cwd=tree,
        env={**env, "PATH": "", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_programs_start_without_an_installed_vispe_and_without_git(checkout):
    process = run_programs(checkout, "-c", START, str(checkout[1]))
    assert process.returncode == 0, process.stderr[-2000:]
    result = json.loads(process.stdout.splitlines()[-1])
    assert Path(result["vispe"]).is_relative_to(checkout[0])
    environment = result["environment"]
    assert environment["versions"]["vispe"] == vispe.__version__
    assert environment["versions"]["no-such-package"] == "not installed"
    assert environment["versions"]["torch"]
    assert environment["commit"] == ""


@pytest.mark.slow
def test_doctor_reports_unknown_extras(checkout):
    start = "import sys; sys.path.append(sys.argv.pop()); sys.argv[0] = 'vispe'; sys.path.insert(0, '.');"
    process = run_programs(
        checkout,
        "-c",
        f"{start} from vispe.cli.main import main; sys.exit(main())",
        "doctor",
        "--json",
        str(checkout[1]),
    )
    assert process.returncode == 0, process.stderr[-2000:]
    report = json.loads(process.stdout)
    assert report["extras"] == {"all": "unknown: vispe is not installed, this is a source checkout"}
