"""The survey of headers with the real compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotset_tools import toolchain


def make_headers(directory: Path, text: str) -> str:
    (directory / "vulkan").mkdir(parents=True)
    (directory / "vulkan" / "vulkan.hpp").write_text("")
    (directory / "vulkan" / "vulkan_core.h").write_text(text)
    return str(directory)


@pytest.mark.parametrize(
    ("text", "found", "settings"),
    [
        ("#define VK_HEADER_VERSION 204\n", False, False),
        ("#define VK_HEADER_VERSION 239\n", True, False),
        ("#define VK_HEADER_VERSION 309\n#define VK_EXT_layer_settings 1\n", True, True),
    ],
)
def test_the_age_of_the_vulkan_headers_decides(tmp_path: Path, text: str, found: bool, settings: bool) -> None:
    tools = toolchain.survey(vulkan_include=make_headers(tmp_path / "include", text))
    assert ("vulkan headers" in tools.has, toolchain.LAYER_SETTINGS in tools.has) == (found, settings)


def test_the_systems_headers_are_found_as_the_compiler_finds_them() -> None:
    tools = toolchain.survey()
    if not Path("/usr/include/vulkan/vulkan_core.h").exists():
        assert "vulkan headers" not in tools.has
        return
    text = Path("/usr/include/vulkan/vulkan_core.h").read_text()
    version = int(text.split("#define VK_HEADER_VERSION ")[1].split()[0])
    assert ("vulkan headers" in tools.has) == (version >= 239)


def test_the_compiler_of_the_survey_has_a_name() -> None:
    tools = toolchain.survey()
    assert {"cxx", "cc", "cmake", "ninja"} <= tools.has
    assert tools.compiler
    assert toolchain.accepts(tools.tools["cxx"], ["-O2"])
    assert not toolchain.accepts(tools.tools["cxx"], ["-mno-such-instructions"])
