"""The commit of `/v1/version`: what the build writes into a wheel, and what the broker reads."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from penstock import __version__
from penstock.server.build import read_commit

ROOT = Path(__file__).parents[2]
PLACE = "penstock/server/commit.txt"
BUILT_FROM = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small copy of the project: the build's own files, and a package with a version."""
    root = tmp_path / "sources"
    package = root / "src" / "penstock"
    (package / "server").mkdir(parents=True)
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, root)
    shutil.copy(ROOT / "src/penstock/__init__.py", package)
    shutil.copy(ROOT / "src/penstock/server/build.py", package / "server")
    return root


@pytest.fixture
def checkout(sources: Path) -> Path:
    git(sources, "init", "--quiet")
    git(sources, "add", ".")
    git(sources, "commit", "--quiet", "--message", "All files")
    return sources


@needs_git
def test_a_wheel_of_a_checkout_has_its_commit_and_the_version_of_the_package(checkout: Path):
    wheel = build(checkout, "wheel")
    assert wheel.name == f"penstock-{__version__}-py3-none-any.whl"
    assert commit_in(wheel) == git(checkout, "rev-parse", "HEAD")


@needs_git
def test_a_wheel_of_a_checkout_with_changes_says_dirty(checkout: Path):
    with (checkout / "README.md").open("a") as readme:
        readme.write("changed\n")
    assert commit_in(build(checkout, "wheel")) == git(checkout, "rev-parse", "HEAD") + "-dirty"


@needs_git
def test_a_source_archive_carries_the_commit_to_its_wheel(checkout: Path, tmp_path: Path):
    with tarfile.open(build(checkout, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    wheel = build(tmp_path / "unpacked" / f"penstock-{__version__}", "wheel")
    assert commit_in(wheel) == git(checkout, "rev-parse", "HEAD")


@needs_git
def test_an_editable_install_has_no_commit(checkout: Path):
    assert commit_in(build(checkout, "wheel:editable")) is None


@needs_git
def test_a_folder_inside_another_checkout_has_no_commit(checkout: Path):
    inner = checkout / "inner"
    shutil.copytree(checkout, inner, ignore=shutil.ignore_patterns(".git", "inner", "dist"))
    assert commit_in(build(inner, "wheel")) is None


def test_a_wheel_without_a_checkout_has_no_commit(sources: Path):
    assert commit_in(build(sources, "wheel")) is None


def test_the_broker_reads_the_commit_or_says_unknown(tmp_path: Path):
    file = tmp_path / "commit.txt"
    assert read_commit(file) == "unknown"
    file.write_text("0123abc\n")
    assert read_commit(file) == "0123abc"


def build(root: Path, target: str) -> Path:
    """Builds with the hatchling of this environment, which needs no network."""
    folder = root.parent / f"built-{target.replace(':', '-')}-{root.name}"
    command = [sys.executable, "-m", "hatchling", "build", "--target", target]
    subprocess.run([*command, "--directory", str(folder)], cwd=root, check=True, text=True)
    (built,) = folder.iterdir()
    return built


def commit_in(wheel: Path) -> str | None:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(PLACE).decode().strip() if PLACE in archive.namelist() else None


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    command = ["git", "-C", str(root), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
