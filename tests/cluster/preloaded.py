"""Run several studies one after the other, each in a fork of a process that has imported everything once.

    torchrun ... preloaded.py STUDIES.json

STUDIES.json: a list of {"home": folder, "arguments": [...], "port": int}. Imports are most of the time of a tiny
study. Each study leaves the file `status` in its home, with the exit status of each rank appended.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(path: str) -> int:
    """Run all studies; the number of those that failed."""
    # Nothing may have been computed before the forks: threads do not survive them.
    import lightning_tas.commands.fit
    import lightning_tas.commands.phases
    import lightning_tas.launch.strategies

    lightning_tas.launch.strategies.prepare_deepspeed(on_cpu=True)
    return sum(_run(**study) != 0 for study in json.loads(Path(path).read_text()))


def _run(home: str, arguments: list[str], port: int) -> int:
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with Path(home, "status").open("a") as file:
            file.write(f"{status}\n")
        return status
    status = 1
    try:
        os.chdir(home)
        # The store of torchrun's agent is for one run; this one gets its own.
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        sys.argv = ["lightning_tas.fit", *arguments]
        sys.orig_argv = [sys.executable, "-m", "lightning_tas.fit", *arguments]
        from lightning_tas.commands.entry import main as command

        status = command("fit")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
