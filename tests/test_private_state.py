"""Tests go in by the public door: how often a file of tests reaches for a private name is counted, and only falls."""

import ast
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
PUBLIC = ("_replace", "_repr_html_")  # of named tuples and of notebooks: documented, with an underscore all the same
LIBRARIES = ("torch.", "sys.", "os.", "tl.", "interpreter.", "ast.")
# File below tests/ -> how often it names a private attribute of something that is not its own.
KNOWN = {
    "data/energon/make_fixtures.py": 1,
    "data/test_broken_clips.py": 1,
    "data/test_loader.py": 3,
    "data/test_torchvision_sets.py": 2,
    "diffusion/test_ddpm.py": 1,
    "encoders/test_folder.py": 2,
    "gpu/test_cublaslt_gpu.py": 4,
    "gpu/test_pipeline_gpu.py": 1,
    "inference/page/test_drawing_queue.py": 1,
    "inference/tape.py": 1,
    "inference/test_approximations.py": 5,
    "inference/test_fused_steps.py": 1,
    "inference/test_parts.py": 2,
    "inference/test_server.py": 2,
    "kernels/test_attention.py": 1,
    "kernels/test_cublaslt.py": 1,
    "kernels/test_fp8_fsdp.py": 2,
    "kernels/test_recompute.py": 1,
    "kernels/test_varlen.py": 5,
    "parallel/engines/test_fsdp.py": 1,
    "parallel/test_colossal.py": 4,
    "parallel/test_host_memory.py": 1,
    "parallel/test_loss_scale.py": 4,
    "parallel/test_sequence_parts.py": 1,
    "ranks.py": 1,
    "state/test_shard_damage.py": 2,
    "training/test_memory_fsdp.py": 1,
}


def private_names(source: str) -> list[str]:
    """The private names that a file reaches for: ``x._y`` but of self or a library, ``from opendit... import _y``,
    and ``monkeypatch.setattr`` of one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("opendit"):
            found += [alias.name for alias in node.names if _private(alias.name)]
        elif isinstance(node, ast.Attribute) and _private(node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and not f"{owner}.".startswith(LIBRARIES):
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr":
            names = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            found += [name for name in names if isinstance(name, str) and _private(name.rpartition(".")[2])]
    return found


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def test_no_test_reaches_for_more_private_state():
    counted = {path.relative_to(HERE).as_posix(): private_names(path.read_text()) for path in HERE.rglob("*.py")}
    more = {name: found for name, found in counted.items() if len(found) > KNOWN.get(name, 0)}
    assert not more, f"give what you test a public name: {more}"
    fewer = {name: len(counted.get(name, [])) for name, most in KNOWN.items() if len(counted.get(name, [])) < most}
    assert not fewer, f"lower KNOWN: {fewer}"


def test_it_counts():
    source = "from opendit.x import _a, b\nb._c()\nself._d\ntorch._e\nmonkeypatch.setattr(b, '_f', 1)\n"
    source += "x.__g__\nx._replace(y=1)\n"
    assert Counter(private_names(source)) == Counter(["_a", "b._c", "_f"])
