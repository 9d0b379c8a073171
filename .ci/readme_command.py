"""Print a command of README, so that CI runs exactly what a reader would: `readme_command.py NUMBER [OUT]`."""

import re
import sys
from pathlib import Path

readme = Path(__file__).parent.parent / "README.md"
blocks = re.findall(r"```bash\n(.*?)```", readme.read_text(), re.DOTALL)
command = blocks[int(sys.argv[1]) - 1].strip()
if len(sys.argv) > 2:
    command = command.replace("-o vispe-demo", f"-o {sys.argv[2]}")
print(command)  # noqa: T201
