"""Which architectures of a llama.cpp source have a graph with experts: those that call build_moe_ffn, or borrow one."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

_CALL = re.compile(r"\bbuild_moe_ffn\s*\(")
_CLASS = re.compile(r"^struct llama_model_(\w+) : public llama_model_(\w+) \{(.*?)^\};", re.M | re.S)
_BORROWED = re.compile(r"using graph = llama_model_(\w+)::graph\b")
_CREATED = re.compile(r"case LLM_ARCH_(\w+):\s*return new llama_model_(\w+)\(")
_NAME = re.compile(r"\{\s*LLM_ARCH_(\w+),\s*\"([^\"]+)\"")


def architectures_with_experts(sdist: Path, vendored: str) -> set[str]:
    """llama.cpp's names, read from the source in `sdist`.

    Raises:
        ValueError: the source is laid out in another way than this knows.
    """
    files = _read(sdist, f"{sdist.name.removesuffix('.tar.gz')}/{vendored}/src/")
    calling = {
        Path(name).stem.replace("-", "_") for name, text in files.items() if "models/" in name and _CALL.search(text)
    }
    calling = _with_borrowers(calling, files["models/models.h"])
    names = dict(_NAME.findall(files["llama-arch.cpp"]))
    created = {model: names[arch] for arch, model in _CREATED.findall(files["llama-model.cpp"])}
    if len(calling) < 20 or len(created) < 50:
        raise ValueError("the models of this llama.cpp are declared in another way; tests/miniarch/source_scan.py")
    return {created[model] for model in calling if model in created}


def _read(sdist: Path, prefix: str) -> dict[str, str]:
    with tarfile.open(sdist) as archive:
        files = (member for member in archive if member.isfile() and member.name.startswith(prefix))
        wanted = (member for member in files if member.name.endswith((".cpp", "models/models.h")))
        return {member.name.removeprefix(prefix): _text(archive, member) for member in wanted}


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = archive.extractfile(member)
    assert file is not None
    return file.read().decode()


def _with_borrowers(calling: set[str], declarations: str) -> set[str]:
    """Classes too that take the graph of another one, or inherit it because they declare none."""
    classes = _CLASS.findall(declarations)
    while True:
        more = {name for name, base, body in classes if _graph_of(base, body) in calling} - calling
        if not more:
            return calling
        calling = calling | more


def _graph_of(base: str, body: str) -> str | None:
    borrowed = _BORROWED.search(body)
    if borrowed:
        return borrowed[1]
    return None if "struct graph" in body else base
