"""The Vulkan backend's source, preprocessed with headers of two ages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def preprocess(tree: Path, stubs: Path, vulkan_header: str) -> str:
    """ggml-vulkan.cpp after the preprocessor, with `vulkan_header` in place of the real one."""
    for name, text in {
        "vulkan/vulkan.hpp": vulkan_header,
        "vulkan/vulkan_core.h": "",
        "spirv/unified1/spirv.hpp": "",
        "ggml-vulkan-shaders.hpp": "",
    }.items():
        (stubs / name).parent.mkdir(parents=True, exist_ok=True)
        (stubs / name).write_text(text)
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    ggml = tree / "ggml"
    include = [f"-I{path}" for path in (stubs, ggml / "include", ggml / "src")]
    command = [compiler, "-E", "-P", "-std=c++17", *include, str(ggml / "src" / "ggml-vulkan" / "ggml-vulkan.cpp")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


OLD = "#define VK_HEADER_VERSION 239\n"


def test_layer_settings_are_left_out_when_the_headers_lack_them(patched_tree: Path, tmp_path: Path) -> None:
    text = preprocess(patched_tree, tmp_path / "stubs", OLD)
    assert "vk::LayerSetting" not in text
    assert text.count("vk::createInstance(instance_create_info)") == 1


def test_layer_settings_are_used_when_the_headers_have_them(patched_tree: Path, tmp_path: Path) -> None:
    text = preprocess(patched_tree, tmp_path / "stubs", OLD + "#define VK_EXT_layer_settings 1\n")
    assert "vk::LayerSettingsCreateInfoEXT" in text
