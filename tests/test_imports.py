"""Packages import only packages below them and no heavy modules that most runs do not need, each can be imported first,
and no two classes have the same name."""

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From top to bottom. common is below all others.
ROOMS = "cli evaluation training sampling checkpoint data encoders diffusion parallel kernels models config".split()
ROOMS += ["common"]

PROGRAMS = ("fused", "export")  # these, and every __main__.py, may import anything


MODULES = "data diffusion encoders fused kernels.attention models export.conversion".split()
MODULES += "training.model_plan training.build sampling.sample_output sampling.sampling_engine".split()
MODULES += "evaluation.program parallel.optimizer".split()
# Each import runs in a fork of a process that has imported torch, because importing torch takes longer than the rest.
PROBE = """
import importlib, os, sys, traceback, torch
before = set(sys.modules)
for module in sys.argv[1:]:
    if not (child := os.fork()):
        try:
            importlib.import_module(f"opendit.{module}")
            if module == "models":
                from opendit.models.zoo import model_shapes
                from opendit.models.zoo import empty_model, model_config
                config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=5)
                model_shapes(config), empty_model(config, parameters=False)
            if module == "parallel.optimizer":
                from opendit.parallel.optimizer import FusedAdamW
                FusedAdamW([torch.nn.Parameter(torch.zeros(2))])
            heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp"}
            if module.startswith("training."):
                heavy.add("pydantic")
            print(module, "imported", *sorted(heavy & set(sys.modules) - before), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_imported_first():
    """No import loads torch's compiler, which takes 2 s, or FSDP, which takes half a second. Decorators of the
    compiler, random numbers on the meta device and torch's optimizers would load the compiler. Training imports
    pydantic, which takes 0.1 s, only to read a JSON file."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROBE, *MODULES], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == [f"{module} imported" for module in MODULES], done.stdout + done.stderr


def imported(source: str, package: str) -> set[str]:
    """Return the full names that a module's source imports anywhere, also for type annotations.

    package: the package that contains the module. Names in the tables of ``import_when_used`` count, too."""
    names, waiting = set(), [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and called(node) in ("import_when_used", "import_module"):
            names |= {
                word.value for word in ast.walk(node) if isinstance(word, ast.Constant) and type(word.value) is str
            }
    return names


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def room_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "opendit" and len(parts) > 1 and parts[1] in ROOMS else None


def climbs(name: str, source: str, package: str) -> set[str]:
    """Return the packages above its own that module ``name`` imports."""
    floor = ROOMS.index(room_of(name))
    rooms = {room_of(imported_name) for imported_name in imported(source, package)} - {None}
    return {room for room in rooms if ROOMS.index(room) < floor}


def modules():
    """Yield (full name, source, package) for every module of these packages."""
    for path in sorted((ROOT / "opendit").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) < 3 or parts[1] in PROGRAMS or parts[-1] == "__main__":
            continue
        name = ".".join(parts).removesuffix(".__init__")
        yield name, path.read_text(), name if parts[-1] == "__init__" else ".".join(parts[:-1])


def test_colossalai_is_imported_in_its_own_package_alone():
    for name, source, package in modules():
        if "colossalai" in source and not name.startswith("opendit.parallel.colossal"):
            assert "colossalai" not in {each.partition(".")[0] for each in imported(source, package)}, name


def test_rooms_import_only_rooms_below_them():
    found = {(name, room) for name, source, package in modules() for room in climbs(name, source, package)}
    assert found == set(), "a room imports one above it"


def test_every_room_has_its_floor():
    found = {path.parent.name for path in (ROOT / "opendit").glob("*/__init__.py")}
    assert found - set(PROGRAMS) <= set(ROOMS) and len({name for name, *_ in modules()}) > 100
    assert not list((ROOT / "opendit").glob("[!_]*.py"))  # opendit/ contains only packages


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("opendit.models.dit", "import torch\nfrom opendit.common.utils import import_when_used", set()),
        ("opendit.models.dit", "from opendit.kernels.common import f", {"kernels"}),
        ("opendit.models.dit", "def f():\n    import opendit.checkpoint.ema as e", {"checkpoint"}),
        ("opendit.models.dit", "from opendit import training", {"training"}),
        ("opendit.models.dit", "from ..cli import flags", {"cli"}),
        ("opendit.models.dit", "from . import layers", set()),
        ("opendit.models.dit", "try:\n    x\nexcept ImportError:\n    from opendit.data.base import f", {"data"}),
        ("opendit.models.dit", "import_when_used(__name__, {'opendit.checkpoint.ema': 'EMA'})", {"checkpoint"}),
        ("opendit.models.dit", "if TYPE_CHECKING:\n    from opendit.checkpoint.ema import EMA", {"checkpoint"}),
        ("opendit.models.dit", "if typing.TYPE_CHECKING:\n    pass\nelse:\n    import opendit.cli", {"cli"}),
        ("opendit.training.build", "from opendit.checkpoint import ema\nfrom opendit.models import DiT", set()),
        ("opendit.common.utils", "from opendit.models import DiT", {"models"}),
        ("opendit.cli.command", "from opendit.training import prepare\nfrom opendit.common import utils", set()),
    ],
)
def test_a_climb_is_seen(name, source, expected):
    assert climbs(name, source, name.rpartition(".")[0]) == expected


def test_one_name_is_one_class():
    names = Counter()
    for path in (ROOT / "opendit").rglob("*.py"):
        names.update(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()
