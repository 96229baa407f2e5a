"""What a user installs: the wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# An environment that has none of the extras: importing one of these fails.
BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

OPTIONAL = {"torchrl", "tensordict", "matplotlib", "fastapi", "uvicorn", "prometheus_client",
            "xgrammar", "llama_cpp", "vllm", "sglang", "peft", "scipy", "pytest"}
sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])
import hasten
assert hasten.__file__.startswith(sys.argv[1]), hasten.__file__
for name in hasten.__all__:
    getattr(hasten, name)
import hasten.cli
print("imported", hasten.__version__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    copy = tmp_path_factory.mktemp("source")
    # Built from a copy, so that no build folder is left in the checkout.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(copy)], check=True, capture_output=True, text=True)
    return next(out.glob("*.whl"))


def test_wheel_carries_the_type_marker_the_licence_and_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "hasten/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    source = ROOT / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert modules <= names
    package = source / "hasten"
    data = [*package.glob("bench/suites/*.jsonl"), *package.glob("native/*.[ch]*")]
    assert {path.relative_to(source).as_posix() for path in data} <= names


def test_unpacked_wheel_imports_without_any_extra(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-I", "-c", BARE, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported ")


def test_import_of_the_package_alone_does_not_load_torch() -> None:
    code = "import sys, hasten; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
