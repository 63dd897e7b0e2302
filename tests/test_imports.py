"""Imports go one way: the layers of docs/design.md, held by walking every file's syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import specdec

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"errors", "version", "machine"},
    {"costmodel", "kernels"},
    {"types"},
    {"sampling"},
    {"verifiers"},
    {"cache", "controllers", "workloads"},
    {"models"},
    {"drafters"},
    {"decoding"},
    {"measurement"},
    {"plots", "backends", "doctor"},
    {"distill", "testing"},
    {"audit"},
]
GROUND_FLOOR = {"__init__", "types", "errors", "version"}
MODEL_FREE = ("plots", "costmodel", *(f"measurement/{part}" for part in ("metrics", "results", "traces", "statistics")))
HEAVY = {"torch", "transformers", "accelerate", "datasets", "vllm"}


def modules() -> list[Path]:
    return sorted((ROOT / "specdec").rglob("*.py"))


def room(path: Path) -> str:
    """`specdec/models/hf.py` → models; the package's own door counts as none."""
    parts = path.relative_to(ROOT / "specdec").with_suffix("").parts
    return parts[0]


def model_free(path: Path) -> bool:
    return str(path.relative_to(ROOT / "specdec").with_suffix("")).startswith(MODEL_FREE)


def layer(name: str) -> int:
    return next(index for index, rooms in enumerate(LAYERS) if name in rooms)


def imports(path: Path, *, lazy: bool = True) -> set[str]:
    """Dotted names a file imports outside `if TYPE_CHECKING`; lazy: also inside functions."""
    tree = ast.parse(path.read_text())
    hidden: set[ast.AST] = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if typing_only or (not lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            hidden |= set(ast.walk(node)) - {node}
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_the_layers(path: Path) -> None:
    found = imports(path)
    outside = {name.split(".")[0] for name in found}
    assert not outside & {"hydra", "omegaconf", "experiments", "tests"}, "the library knows nothing of Hydra"
    if path.name == "__init__.py" and path.parent == ROOT / "specdec":
        return
    own = layer(room(path))
    for name in found:
        if name.startswith("specdec.") and name.split(".")[1] != room(path):
            assert layer(name.split(".")[1]) < own, f"{path.name} imports {name}, which is not below it"


@pytest.mark.parametrize("path", [path for path in modules() if model_free(path)], ids=lambda path: path.name)
def test_reading_results_needs_no_model(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & HEAVY


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    """transformers, datasets and accelerate take seconds to import; nobody who reads a name should pay that."""
    assert not {name.split(".")[0] for name in imports(path, lazy=False)} & (HEAVY - {"torch"})


def test_the_ground_floor_is_types_errors_and_version_alone() -> None:
    assert {path.stem for path in (ROOT / "specdec").glob("*.py")} == GROUND_FLOOR


def test_every_name_the_package_offers_is_there() -> None:
    assert {name for name in specdec.__all__ if getattr(specdec, name, None) is None} == set()
