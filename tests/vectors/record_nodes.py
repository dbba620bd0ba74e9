"""Records which nodes stock llama.cpp computes: `python -m tests.vectors.record_nodes > tests/vectors/nodes.json`.

The library of `hotset build --peer` (the same source, unpatched) with every mini model, its experts in memory and the
rest on a CPU behind the RPC backend.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from daemon.native import locate
from hotset_tools.stand_in import rpc_server
from tests.miniarch.table import MINIS
from tests.miniarch.writer import write_minis
from tests.node_lists import digests, in_processes


def main() -> None:
    build = locate.require_build().directory
    peer = locate.find_peer()
    if peer is None:
        sys.exit("there is no unpatched library; `hotset build --peer` makes one")
    os.environ[locate.OVERRIDE] = str(build)
    with tempfile.TemporaryDirectory() as directory, rpc_server(build) as server:
        paths = write_minis(Path(directory), MINIS, build)
        seen = in_processes(server.device, "none", list(paths.values()), peer.directory)
    print(json.dumps({name: digests(nodes) for name, nodes in seen.items()}, indent=1))


if __name__ == "__main__":
    main()
