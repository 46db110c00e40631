"""Every collective in opendit/ names its group, because the default group may contain too many ranks."""

import ast
import inspect
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

PACKAGE = Path(__file__).parents[2] / "opendit"
MODULES = {module.__name__: module for module in (dist, functional, differentiable, dist.distributed_c10d)}
NO_COLLECTIVES = ("get_", "destroy_", "new_", "set_", "shrink_")  # functions that take a group but are not collectives
PASSED_TO = "P2POp"  # takes a send or receive function and its group


def group_position(module: str, name: str) -> int | None:
    """Return the position of the group among the arguments of ``module.name``, or None if it is not a collective."""
    function = getattr(MODULES[module], name, None)
    if name.startswith(NO_COLLECTIVES) or not callable(function):
        return None
    try:
        parameters = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return None
    return parameters.index("group") if "group" in parameters else None


def without_group(source: str) -> list[str]:
    """List collectives without a group, and collectives used without a call, as ``line: name``."""
    tree, modules, functions = ast.parse(source), {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in MODULES:
                    modules[alias.asname or alias.name] = alias.name
                modules.setdefault("torch.distributed", "torch.distributed")
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (whole := f"{node.module}.{alias.name}") in MODULES:
                    modules[alias.asname or alias.name] = whole
                elif node.module in MODULES:
                    functions[alias.asname or alias.name] = (node.module, alias.name)

    def collective(node: ast.AST) -> tuple[str, int] | None:
        """Return the name and group position if the expression is a collective."""
        if isinstance(node, ast.Name) and node.id in functions:
            module, name = functions[node.id]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            module, name = modules[ast.unparse(node.value)], node.attr
        else:
            return None
        position = group_position(module, name)
        return None if position is None else (name, position)

    found, fine = [], set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = collective(node.func)
        if called is None:
            continue
        name, position = called
        fine.add(id(node.func))
        given = [*node.args[position : position + 1], *(k.value for k in node.keywords if k.arg == "group")]
        if not given or any(isinstance(value, ast.Constant) and value.value is None for value in given):
            found.append(f"{node.lineno}: {name}")
        if name == PASSED_TO:
            fine.update(map(id, node.args))
    handed_on = (node for node in ast.walk(tree) if isinstance(node, ast.expr) and id(node) not in fine)
    return found + [f"{node.lineno}: {ast.unparse(node)} is not called" for node in handed_on if collective(node)]


def test_every_collective_names_its_group():
    found = {str(file.relative_to(PACKAGE)): without_group(file.read_text()) for file in PACKAGE.rglob("*.py")}
    assert found and not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    "call,found",
    [
        ("dist.all_reduce(x)", True),
        ("dist.all_reduce(x, group=None)", True),
        ("dist.all_reduce(x, dist.ReduceOp.MAX, None)", True),
        ("dist.all_reduce(x, dist.ReduceOp.MAX)", True),
        ("dist.all_reduce(x, dist.ReduceOp.MAX, g)", False),
        ("dist.all_reduce(x, group=g)", False),
        ("dist.barrier(device_ids=[0])", True),
        ("dist.barrier(mesh.group('world'))", False),
        ("torch.distributed.broadcast_object_list(box, 0)", True),
        ("dist.broadcast(x, 0, async_op=True)", True),
        ("all_gather_into_tensor(x, y)", True),
        ("c10d.reduce_scatter_tensor(x, y, async_op=True)", True),
        ("functional.all_to_all_single(x, None, None, g)", False),
        ("functional.all_gather_tensor(x, 0)", True),
        ("gather(x)", True),
        ("f = dist.all_gather_object", True),
        ("dist.P2POp(dist.isend, x, group=g, group_peer=1)", False),
        ("dist.P2POp(dist.isend, x, 1)", True),
        ("with dist._coalescing_manager(): pass", True),
        ("x.gather(0, i); reduce(sum, x); mesh.barrier(); dist.get_rank()", False),
    ],
)
def test_what_names_no_group_is_found(call, found):
    imports = """
import torch.distributed
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_gather_into_tensor, distributed_c10d as c10d
from torch.distributed.nn.functional import gather
from functools import reduce
"""
    assert bool(without_group(imports + call)) == found
