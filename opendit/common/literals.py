"""Modules that are known without being imported, so that flags can be checked without torch: by the names of their
files, and by the constants in them that are literals."""

import ast
from pathlib import Path
from typing import Any


def module_files(folder: Path, *others: str) -> dict[str, Path]:
    """The modules of a package's folder, name -> file, in alphabetical order, but for ``others`` and private ones."""
    files = {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}
    return {name: path for name, path in files.items() if name not in others}


def literals_of(path: Path, *names: str) -> dict[str, Any]:
    """The values that a Python file gives to these names at its top level. The file is read and not run.

    Raises ValueError, which names the file, if one of them is missing or anything but a literal.
    """
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id in names and node.value is not None:
            try:
                found[target.id] = ast.literal_eval(node.value)
            except ValueError as error:
                raise ValueError(
                    f"{path}: {target.id} is read without running the file and must be a literal"
                ) from error
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{path}: has no {', '.join(missing)}")
    return found
