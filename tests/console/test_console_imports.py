"""The console opens before torch is imported, so nothing it imports may import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


def imported_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("statement", ["import console.app", "import engine", "from engine import Engine"])
def test_torch_is_not_imported(statement: str) -> None:
    assert not imported_by(statement) & {"torch", "triton", "numpy", "transformers"}


def test_the_engine_imports_no_console() -> None:
    assert not imported_by("from engine import Engine; import engine.loop") & {"textual", "console", "rich"}
