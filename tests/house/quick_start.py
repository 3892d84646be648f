"""Run the scripts of the quick start with the interpreter that runs this, which may have nothing but the package.

python tests/house/quick_start.py docs/quick_start.md FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

RANKS = {"train_fsdp2.py": 2, "train_hsdp.py": 4, "train_ddp.py": 2, "train_sharded.py": 4}


def main(page: str, folder: str) -> int:
    """Write the scripts into `folder` and launch each with torchrun; returns the first exit status that is not 0."""
    for name, text in re.findall(
        r"```python\n# file: (\S+)\n(.*?)```", Path(page).read_text(encoding="utf-8"), re.DOTALL
    ):
        (Path(folder) / name).write_text(text, encoding="utf-8")
    for script, ranks in RANKS.items():
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command = [*launch, "--nproc-per-node", str(ranks), script]
        status = subprocess.run(command, cwd=folder, check=False).returncode
        sys.stdout.write(f"{script} on {ranks} ranks: exit status {status}\n")
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
