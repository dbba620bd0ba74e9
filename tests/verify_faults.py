"""How far one wrong matrix in one slot moves what `hotset verify` measures: `python -m tests.verify_faults MODEL`.

Arguments: a model, and numbers of uploads to get wrong. Prints the largest divergence of a row that was not routed
otherwise, and its limit, for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from daemon.native import locate
from hotset_tools.bench.models import use_native_build
from hotset_tools.stand_in import rpc_server
from tests.rpc_proxy import other_expert, proxy


def verify(model: str, port: int) -> dict[str, Any]:
    """What the command finds, in a child."""
    command = [sys.executable, "-m", "hotset_tools.cli", "verify", model, "--threads", "1", "--json"]
    device = f"rpc:127.0.0.1:{port}"
    result = subprocess.run([*command, "--device", device], stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def main(model: str, numbers: list[int]) -> None:
    use_native_build()
    with rpc_server(Path(os.environ[locate.OVERRIDE])) as server:
        for number in numbers:
            with proxy(server.port, other_expert(number)) as device:
                found = verify(model, device.port)
            cases = [case for case in found["cases"] if case["name"] in ("half", "changing")]
            kl, limit = max(case["kl"] for case in cases), cases[0]["kl_limit"]
            verdict = "within tolerance" if found["ok"] else "found out"
            print(f"upload {number:4}: KL {kl:.2g}, limit {limit:.2g}, {verdict}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(number) for number in sys.argv[2:]])
