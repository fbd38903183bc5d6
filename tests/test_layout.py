"""python -m pytest tests/test_layout.py: what the project promises about its own files."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN_TIME = {"torch", "transformers", "safetensors", "requests", "numpy", "datasets"}
BROUGHT_ALONG = {"yaml", "triton"}  # by transformers, by torch's CUDA build
OPTIONAL = {"flash_attn", "cutlass", "trackio"}  # flash-attn-4, inside the functions that use it


def modules() -> list[Path]:
    return [*ROOT.glob("*.py"), *ROOT.glob("attention/*.py"), *ROOT.glob("tasks/*.py")]


def test_nothing_else_is_imported_at_run_time():
    own = {path.stem for path in modules()} | {"attention", "tasks", "tiny"}
    for path in modules():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                package = name.split(".")[0]
                allowed = RUN_TIME | BROUGHT_ALONG | own | set(sys.stdlib_module_names)
                allowed |= set() if node in tree.body else OPTIONAL
                assert package in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_importing_a_module_does_nothing():
    """Only definitions, constants and a guarded main at the top level."""
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            loop = isinstance(node, (ast.For, ast.While, ast.With))
            assert not called and not loop, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_the_file_tree_in_the_readme_is_complete():
    readme = (ROOT / "README.md").read_text()
    files = [*modules(), *ROOT.glob("tools/*.py"), *ROOT.glob("bench/*.py"), *ROOT.glob("runs/*.sh")]
    missing = [str(path.relative_to(ROOT)) for path in files if path.name not in readme]
    assert not missing


def test_every_module_has_its_test_file():
    """Or is named in the one that covers it."""
    elsewhere = "head_triton generate start engine __init__".split()
    elsewhere += "hopper tree meetings flash reference delta_kernels delta_convolution".split()
    for path in modules():
        if path.parent.name != "tasks" and path.stem not in elsewhere:
            assert (ROOT / f"tests/test_{path.stem}.py").is_file(), path.name
