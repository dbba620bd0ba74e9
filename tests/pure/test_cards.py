"""What is read of a graphics card, from trees such as sysfs has them, and from hostile ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.messages import Card
from daemon.native import cards

PCI = "0000:03:00.0"
GIB = 1 << 30


class Tree:
    """The files of one card, where sysfs has them: behind a link."""

    def __init__(self, root: Path) -> None:
        self.real = root / "devices" / "pci0000:00" / PCI
        self.root = root / "bus"
        self.real.mkdir(parents=True)
        self.root.mkdir()
        (self.root / PCI).symlink_to(self.real)

    def write(self, **files: str | bytes) -> Tree:
        for name, content in files.items():
            (self.real / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return self

    def connector(self, name: str, status: str, card: str = "card1") -> Tree:
        directory = self.real / "drm" / card / name
        directory.mkdir(parents=True)
        (directory / "status").write_text(status)
        return self

    def read(self) -> Card | None:
        return cards.read(PCI, self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def amdgpu(tree: Tree, **changes: str | bytes) -> Tree:
    files: dict[str, str | bytes] = {
        "mem_info_vram_used": "1073741824\n",
        "mem_info_vram_total": "17163091968\n",
        "mem_info_gtt_used": "20971520\n",
        "mem_info_gtt_total": "33554432000\n",
    }
    return tree.write(**files | changes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0000:03:00.0", "0000:03:00.0"), ("0000:0A:1F.7", "0000:0a:1f.7"), ("00000000:01:00.0", "0000:01:00.0"),
        ("0000:01:00.0-v2", "0000:01:00.0"), ("", ""), ("03:00.0", ""), ("0000:03:00.8", ""), ("10000000:01:00.0", ""),
        ("../../../etc", ""), ("0000:03:00.0/../x", ""), ("0000:03:00.0\n/x", ""), ("0000:03:00.\u0660", ""),
        ("0000:03:00.0-v1/..", ""), ("GPU-1234", ""), ("\ufffd", ""),
    ],
)  # fmt: skip
def test_addresses(given: str, expected: str) -> None:
    assert cards.address(given) == expected


def test_a_card_of_amdgpu_with_a_screen(tree: Tree) -> None:
    amdgpu(tree).connector("card1-DP-1", "disconnected\n").connector("card1-HDMI-A-1", "connected\n")
    (tree.real / "drm" / "renderD128").mkdir()
    assert tree.read() == Card(
        display="connected", vram_used=GIB, vram_total=17163091968, gtt_used=20971520, gtt_total=33554432000
    )


def test_connectors_without_a_screen_are_none_although_the_firmware_used_the_card(tree: Tree) -> None:
    tree.write(boot_vga="1\n").connector("card0-DP-1", "disconnected\n", "card0")
    assert tree.read() == Card(display="none")


def test_without_connectors_the_card_of_the_firmware_may_have_the_screen(tree: Tree) -> None:
    assert tree.read() == Card(display="none")
    assert tree.write(boot_vga="0\n").read() == Card(display="none")
    assert tree.write(boot_vga="1\n").read() == Card(display="boot")
    (tree.real / "drm" / "card0" / "card0-DP-1").mkdir(parents=True)
    assert tree.read() == Card(display="boot"), "a connector without a status says nothing"


@pytest.mark.parametrize(
    "pci", ["", "0000:04:00.0", "..", "../bus/0000:03:00.0", "/", "0000:03:00.0/", "x" * 5000, "\0"]
)
def test_what_is_no_card_is_not_known(tree: Tree, pci: str) -> None:
    amdgpu(tree)
    assert cards.read(pci, tree.root) is None


def test_no_sysfs_at_all(tmp_path: Path) -> None:
    assert cards.read(PCI, tmp_path / "none") is None
    (tmp_path / "bus").mkdir()
    (tmp_path / "bus" / PCI).write_text("a file")
    assert cards.read(PCI, tmp_path / "bus") is None
    (tmp_path / "bus" / PCI).unlink()
    (tmp_path / "bus" / PCI).symlink_to(PCI)
    assert cards.read(PCI, tmp_path / "bus") is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mem_info_vram_used", ""), ("mem_info_vram_used", "many"), ("mem_info_vram_used", "-5"),
        ("mem_info_vram_used", "1e9"), ("mem_info_vram_used", b"\xff\xfe"), ("mem_info_vram_used", "\u0661"),
        ("mem_info_vram_used", "9" * 5000), ("mem_info_vram_used", "18446744073709551615"),
        ("mem_info_vram_used", "17163091969"), ("mem_info_vram_total", "0"), ("mem_info_vram_total", "1 2"),
    ],
)  # fmt: skip
def test_figures_that_cannot_be_true_are_none_and_the_others_stay(tree: Tree, name: str, content: str | bytes) -> None:
    found = amdgpu(tree, **{name: content}).read()
    assert found is not None
    assert (found.vram_used, found.vram_total) == (None, None)
    assert (found.gtt_used, found.gtt_total) == (20971520, 33554432000)


def test_one_figure_alone_is_none(tree: Tree) -> None:
    amdgpu(tree)
    (tree.real / "mem_info_gtt_total").unlink()
    found = tree.read()
    assert found is not None
    assert (found.gtt_used, found.gtt_total) == (None, None)
    assert found.vram_used == GIB


def test_what_is_no_regular_file_is_not_read(tree: Tree) -> None:
    """A pipe would wait for a writer, and a link may lead anywhere."""
    (tree.real / "elsewhere").write_text("1")
    os.mkfifo(tree.real / "mem_info_vram_used")
    (tree.real / "mem_info_vram_total").mkdir()
    (tree.real / "mem_info_gtt_used").symlink_to(tree.real / "elsewhere")
    (tree.real / "mem_info_gtt_total").symlink_to("/dev/zero")
    (tree.real / "boot_vga").symlink_to(tree.real / "elsewhere")
    assert tree.read() == Card(display="none")


def test_directories_that_are_links_or_have_other_names_are_left_alone(tree: Tree, tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "card1-DP-1"
    outside.mkdir(parents=True)
    (outside / "status").write_text("connected")
    tree.connector("card1-DP-1", "disconnected")
    drm = tree.real / "drm"
    (drm / "card2").symlink_to(outside.parent)
    (drm / "card1" / "card1-DP-2").symlink_to(outside)
    tree.connector("card1-DP 3", "connected").connector("eDP-1", "connected").connector("card1-x", "connected", "card")
    assert tree.read() == Card(display="none")
    tree.connector("card1-DP-4", "connected")
    assert tree.read() == Card(display="connected")


def test_a_drm_that_is_a_file_says_nothing(tree: Tree) -> None:
    assert tree.write(drm="card0").read() == Card(display="none")
