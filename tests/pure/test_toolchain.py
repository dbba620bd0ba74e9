"""What is missing is said with the packages that bring it."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.errors import HotsetError
from hotset_tools import toolchain
from hotset_tools.plan import Request, ToolsMissing, choose_backends, gfx_name, make_plan
from hotset_tools.toolchain import NEEDS, Toolchain

BASE = frozenset({"cxx", "cc", "cmake", "ninja"})
VULKAN = frozenset({"glslc", "vulkan headers", "vulkan loader", "spirv headers"})
PATHS = {name: f"/usr/bin/{name}" for name in ("cxx", "cc", "cmake", "ninja", "glslc", "nvcc", "hipcc")}


def tools(*has: str, nvidia: bool = False) -> Toolchain:
    return Toolchain(PATHS, BASE | set(has), nvidia, "c++ 12")


def test_auto_takes_what_is_there_and_tells_what_is_not() -> None:
    chosen, notes = choose_backends("auto", tools(*VULKAN))
    assert chosen == ["cpu", "vulkan"]
    assert [note.split(",")[0] for note in notes] == ["Without hip", "Without cuda"]


def test_auto_leaves_cuda_out_without_a_card_and_says_so() -> None:
    chosen, notes = choose_backends("auto", tools("nvcc"))
    assert chosen == ["cpu"]
    assert "no NVIDIA card; `--backend cuda` builds it all the same" in notes[-1]
    assert choose_backends("auto", tools("nvcc", nvidia=True))[0] == ["cpu", "cuda"]


def test_cuda_is_built_without_a_card_when_it_is_asked_for() -> None:
    assert choose_backends("cuda", tools("nvcc")) == (["cpu", "cuda"], [])


def test_a_named_backend_lists_everything_that_it_lacks() -> None:
    with pytest.raises(ToolsMissing) as error:
        choose_backends("vulkan", Toolchain({}, BASE - {"ninja"} | {"spirv headers"}))
    for name in ("ninja", "glslc", "vulkan headers", "vulkan loader"):
        assert NEEDS[name].what in error.value.message
    assert NEEDS["spirv headers"].what not in error.value.message


def test_auto_without_a_compiler_is_an_error() -> None:
    with pytest.raises(ToolsMissing, match=r"The cpu backend cannot be built, missing: a C\+\+ compiler"):
        choose_backends("auto", Toolchain({}, BASE - {"cxx"}))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(HotsetError, match="no backend 'metal'; choose auto, cpu, vulkan, hip, cuda"):
        choose_backends("metal", tools())


@pytest.mark.parametrize(
    ("family", "command"),
    [
        ("debian", "Install with: sudo apt-get install glslc libvulkan-dev"),
        ("fedora", "Install with: sudo dnf install glslc vulkan-headers vulkan-loader-devel"),
        ("arch", "Install with: sudo pacman -S shaderc vulkan-headers vulkan-icd-loader"),
    ],
)
def test_packages_of_a_known_distribution(family: str, command: str) -> None:
    assert toolchain.install_command(["glslc", "vulkan headers", "vulkan loader"], family) == command


def test_an_unknown_distribution_gets_all_that_are_known() -> None:
    text = toolchain.install_command(["cxx"], "slackware")
    assert "apt-get install g++" in text
    assert "dnf install gcc-c++" in text
    assert "pacman -S gcc" in text


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("ID=debian\n", "debian"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', "debian"),
        ("ID=fedora\n", "fedora"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "fedora"),
        ("ID=manjaro\nID_LIKE=arch\n", "arch"),
        ("ID=slackware\n", ""),
    ],
)
def test_the_distribution_is_read_from_os_release(tmp_path: Path, text: str, family: str) -> None:
    (tmp_path / "os-release").write_text(text)
    assert toolchain.distribution(tmp_path / "os-release") == family
    assert toolchain.distribution(tmp_path / "none") == ""


@pytest.mark.parametrize(("version", "name"), [(120001, "gfx1201"), (90010, "gfx90a"), (110000, "gfx1100")])
def test_gfx_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def key(**changes: object) -> str:
    values = {"tools": tools(), "announced": frozenset[str](), "x86": False, "peer": False, **changes}
    chain = values["tools"]
    assert isinstance(chain, Toolchain)
    assert isinstance(values["announced"], frozenset)
    plan = make_plan(Request("cpu"), chain, values["announced"], x86=bool(values["x86"]), peer=bool(values["peer"]))
    return plan.key


def test_the_key_names_release_series_and_backends() -> None:
    assert key().startswith("hotset-0.3.36-")
    assert "-cpu+rpc-" in key()
    assert "-unpatched-cpu+rpc-" in key(peer=True)


def test_another_compiler_is_another_key() -> None:
    assert key() == key()
    assert key(tools=Toolchain(PATHS, BASE, False, "c++ 13")) != key()


def test_a_tool_elsewhere_is_the_same_key() -> None:
    moved = {name: path.replace("/usr", "/opt") for name, path in PATHS.items()} | {"ccache": "/opt/bin/ccache"}
    assert key(tools=Toolchain(moved, BASE, False, "c++ 12")) == key()
