"""Says as JSON what llama.cpp sees, for `hotset doctor`; run as a child, because a GPU driver may crash.

`python -m daemon.native.report DIRECTORY` prints {"backends": [...], "devices": [...], "build_info": {...},
"errors": [...]}; the errors are those that llama.cpp logged while its backends were loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from daemon.errors import HotsetError
from daemon.native import abi, backends, devices, library, locate


def report(directory: Path) -> dict[str, object]:
    """Load every backend and list the devices.

    Raises:
        HotsetError: the library cannot be used at all.
    """
    os.environ[locate.OVERRIDE] = str(directory)
    library.lib()  # from here on llama.cpp's log is kept
    names = backends.load(directory)
    try:
        info, problems = abi.bind(ctypes.CDLL(str(directory / "libllama.so"))).build_info, []
    except abi.AbiMismatch as error:
        info, problems = {}, [error.message]
    return {
        "backends": names,
        "devices": [device.model_dump() for device in devices.list_devices()],
        "build_info": info,
        "errors": [*problems, *library.recent_errors()],
    }


def main() -> int:
    """Report on the directory that is the only argument."""
    try:
        found = report(Path(sys.argv[1]))
    except HotsetError as error:
        print(error.message, file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
