"""What a person installs: the wheel's contents, the command it brings, its pins, and make's sentences."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("console", "engine", "kernels", "themes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def copy_sources(to: Path) -> Path:
    """The files an install needs, in a folder of their own: setuptools leaves build products beside what it builds."""
    to.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, to)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, to / package, ignore=shutil.ignore_patterns("__pycache__"))
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree with the build back end that is installed here."""
    directory = tmp_path_factory.mktemp("wheel")
    source = copy_sources(directory / "source")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(directory),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = directory.glob("footplate-*.whl")
    return path


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """A folder that the wheel is unpacked in, as an installer does with its packages."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return site


def footplate(*arguments: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run the installed entry point with `path` before everything else, as pip's script does."""
    entry = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}; from console.cli import main; sys.exit(main())"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-P", "-c", entry, *arguments], capture_output=True, text=True, env=environment, cwd=path[0]
    )


def test_the_wheel_holds_our_packages_whole_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        entry_points = file.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    packed = {name for name in names if ".dist-info/" not in name}
    ours = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".tcss", ".typed") and "__pycache__" not in path.parts
    }
    assert packed == ours
    assert "footplate = console.cli:main" in entry_points
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_installed_command_says_its_version(installed: Path) -> None:
    done = footplate("--version", path=[installed])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"footplate {PROJECT['version']}\n", "")


@pytest.mark.parametrize("name", ["kernels", "engine", "themes"])
def test_another_distribution_s_package_before_ours_is_named(installed: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "other" / name).mkdir(parents=True)
    (tmp_path / "other" / name / "__init__.py").write_text("raise SystemExit('the wrong package was imported')\n")
    done = footplate("--version", path=[tmp_path / "other", installed])
    assert done.returncode == 1
    assert re.fullmatch(
        rf"footplate: another distribution's package '{name}' \(.*\) hides footplate's own; install .*\n", done.stderr
    )


def test_another_distribution_s_kernels_written_over_ours_is_named(installed: Path) -> None:
    (installed / "kernels" / "__init__.py").write_text('"""Fetches compute kernels."""\n')
    done = footplate("--version", path=[installed])
    assert done.returncode == 1
    assert done.stderr.startswith("footplate: another distribution's package 'kernels'")
    assert done.stderr.count("\n") == 1


def test_the_command_line_is_read_without_torch_or_textual() -> None:
    code = (
        "import sys, console.cli as c; c.build_parser(); sys.exit(repr(sorted({'torch', 'textual', 'numpy'} & set(sys.modules))))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stderr == "[]\n"


def test_every_direct_dependency_is_pinned_inside_its_range() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#")
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    asked = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]]
    for requirement in asked:
        name = canonicalize_name(requirement.name)
        if name not in ("pip", "setuptools"):  # tools of the environment itself, not libraries whose behaviour we test
            assert pinned[name] in requirement.specifier, requirement
    assert pinned["torch"] == "2.13.0"


def test_the_version_and_the_shapes_named_in_help_are_the_engine_s() -> None:
    from console.cli import SHAPES
    from engine import __version__
    from engine.families.shapes import SHAPES as KNOWN

    assert PROJECT["version"] == __version__
    assert tuple(KNOWN) == SHAPES


def make(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-C", str(directory), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="make isn't installed")
class TestMake:
    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        return copy_sources(tmp_path / "tree")

    def fake_python(self, directory: Path, fails_on: str) -> Path:
        path = directory / "python"
        path.write_text(f'#!/bin/sh\ncase "$*" in -V) echo Python 3.9.2;; *{fails_on}*) exit 1;; esac\n')
        path.chmod(0o755)
        return path

    def test_an_old_python_is_named(self, tree: Path) -> None:
        done = make(tree, "run", f"PYTHON={self.fake_python(tree, 'version_info')}")
        assert done.returncode == 2
        assert "footplate needs Python 3.11 or newer" in done.stderr
        assert "is Python 3.9.2" in done.stderr

    def test_a_python_without_venv_is_named(self, tree: Path) -> None:
        done = make(tree, "test", f"PYTHON={self.fake_python(tree, 'ensurepip')}")
        assert done.returncode == 2
        assert "can't make virtual environments" in done.stderr
        assert "apt install python3-venv" in done.stderr

    def test_without_a_network_a_sentence_says_what_could_not_be_installed(self, tree: Path) -> None:
        done = make(tree, "run", f"PYTHON={sys.executable}", PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE="/dev/null")
        assert done.returncode == 2
        assert "footplate could not be installed: pip failed, see above. Check the network" in done.stderr
