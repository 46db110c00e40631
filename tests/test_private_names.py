"""Each private name of torch and triton is listed here, used in one file, and exists in the installed torch.

``torch._foreach_*`` are not counted, because torch has no other interface to operations on many tensors."""

import ast
import importlib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "triton")
USED = {
    "opendit/data/loader.py": {"torch.UntypedStorage._new_shared"},
    "opendit/kernels/fp8.py": {
        "torch._C._disabled_torch_function_impl",
        "torch.Tensor._make_wrapper_subclass",
        "torch._scaled_mm",
    },
    "opendit/kernels/linear.py": {"torch._addmm_activation"},
    "opendit/kernels/operators.py": {"torch.utils._python_dispatch.is_in_torch_dispatch_mode"},
    "opendit/models/layers.py": {"torch.utils._python_dispatch._disable_current_modes"},
    "opendit/parallel/colossal/plugins.py": {"torch.distributed._coalescing_manager"},
    "opendit/parallel/sequence/ulysses.py": {
        "torch.ops.aten._scaled_dot_product_flash_attention",
        "torch.ops.aten._scaled_dot_product_flash_attention_backward",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "opendit/parallel/sequence/peer_memory.py": {
        "torch.distributed._symmetric_memory",
        "torch.distributed._symmetric_memory.empty",
        "torch.distributed._symmetric_memory.rendezvous",
    },
    "opendit/kernels/recording.py": {"torch._C", "torch._C._cuda_endAllocateToPool"},
}
CUDA_ONLY = {"torch._C._cuda_endAllocateToPool"}  # not in a torch without CUDA


def is_private(name: str) -> bool:
    parts = name.split(".")
    hidden = [p for p in parts if p.startswith("_") and not p.startswith(("__", "_foreach_"))]
    return parts[0] in LIBRARIES and bool(hidden)


def private_names(source: str) -> set[str]:
    """Return the private names in LIBRARIES that a file imports or reaches through its imports."""
    tree, names, found = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add(alias.name)
                name = alias.name.split(".")[0]
                names[alias.asname or name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if parts and isinstance(node, ast.Name) and node.id in names:
            found.add(".".join([names[node.id], *parts]))
    return {name for name in found if is_private(name)}


def test_private_names_are_those_listed():
    found = {str(f.relative_to(ROOT)): private_names(f.read_text()) for f in (ROOT / "opendit").rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == USED


def test_a_private_name_is_used_in_one_file():
    files = defaultdict(list)
    for file, names in USED.items():
        for name in names:
            files[name].append(file)
    assert all(len(where) == 1 for where in files.values()), files


def test_private_names_are_there():
    import torch

    for name in set().union(*USED.values()):
        if name in CUDA_ONLY and not torch.cuda.is_available():
            continue
        parts = name.split(".")
        found, rest = importlib.import_module(parts[0]), parts[1:]
        for at, part in enumerate(rest, start=2):
            if not hasattr(found, part):  # a module that was not imported yet
                importlib.import_module(".".join(parts[:at]))
            found = getattr(found, part)


def test_what_is_private_is_seen():
    assert private_names("import torch\ntorch._C._x(1)") == {"torch._C", "torch._C._x"}
    assert private_names("from torch.nn import _reduction as r") == {"torch.nn._reduction"}
    assert private_names("import torch.distributed as d\nd._y.z") == {"torch.distributed._y", "torch.distributed._y.z"}
    assert private_names("import torch\ntorch._foreach_add_(a, b); torch.__version__; x._z") == set()
