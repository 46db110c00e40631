"""Help and mistakes need no heavy imports, and the light tables that answer them match the heavy modules."""

import importlib
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "numpy", "transformers", "diffusers", "colossalai", "PIL", "gradio", "pydantic"}
# Run a program as __main__ with each word alone. The last line of stdout has the exit codes and the imported heavy
# packages.
PROBE = """
import runpy, sys
program, codes = sys.argv[1], []
for word in sys.argv[2:] or [None]:
    sys.argv = [program, *filter(None, [word])]
    try:
        if program.startswith("-m "):
            runpy.run_module(program[3:], run_name="__main__")
        else:
            runpy.run_path(program, None, "__main__")
    except SystemExit as end:
        codes.append(end.code or 0)
print(codes, *sorted({m.split(".")[0] for m in sys.modules} & set(%r)))
"""
MODULES = ("opendit", "opendit.evaluation", "opendit.export", "opendit.models", "opendit.sampling.page",
           "opendit.cli.links", "opendit.cli.completion")  # fmt: skip
PROGRAMS = ["train.py", "sample.py", "preprocess.py", *(f"-m {name}" for name in MODULES)]


def run(program: str, *words: str) -> tuple[str, str]:
    """Return the exit codes with the imported heavy packages, and stderr."""
    argv = [sys.executable, "-c", PROBE % sorted(HEAVY), program, *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()[-1], done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_a_wrong_flag_import_nothing_heavy(program):
    said, errors = run(program, "--help", "--no_such_flag")
    assert said == "[0, 2]" and errors.splitlines()[-1].startswith("error: ") and errors.count("error: ") == 1, errors


def test_the_probe_sees_what_is_imported():
    assert {"numpy", "torch"} < set(run("-m opendit.encoders.text")[0].split())


def test_the_light_tables_are_what_the_heavy_modules_have():
    from opendit.config import names
    from opendit.config.architectures import KINDS, module_of
    from opendit.config.names import SOURCES, TABLES, named_sources
    from opendit.diffusion.objectives import OBJECTIVES, ddpm, flow
    from opendit.diffusion.objectives.ddpm import PREDICTIONS
    from opendit.diffusion.samplers import SAMPLERS
    from opendit.kernels import attention
    from opendit.models.plan import BACKWARD
    from opendit.models.zoo import CLASSES
    from opendit.parallel import engines

    assert tuple(OBJECTIVES) == tuple(names.DESCRIPTIONS)
    for name, objective in OBJECTIVES.items():
        described = names.DESCRIPTIONS[name]
        assert objective.name == name and objective().samplers[0] == described.sampler
        without_flags = (
            "shift_growth shift_terminal shifted_end discrete_times least most empirical_tokens karras".split()
            if name == "flow"
            else []
        )
        assert list(asdict(objective())) == [*described.settings, *without_flags]
    assert flow.SETTINGS["times_are"].bounds["choices"] == tuple(flow.TIME_SAMPLING)
    assert ddpm.SETTINGS["prediction"].bounds["choices"] == PREDICTIONS
    assert tuple(SAMPLERS) == names.ALL_SAMPLERS
    assert names.TORCH_ATTENTION == tuple(attention.BACKENDS)
    assert names.RECOMPUTE == (*BACKWARD, names.BUT_ATTENTION)
    assert all(callable(importlib.import_module(f"opendit.data.{name}").open_source) for name in SOURCES)
    assert TABLES in SOURCES and set(named_sources()) == {"digits", "mock", "python"}
    assert set(KINDS) == set(CLASSES)
    for name, made in CLASSES.items():
        assert made.config.kind == module_of(name)
        known = {field.name: field.default for field in fields(made.config)}
        for setting in KINDS[name].settings:
            assert setting.flag in known and setting.default in (None, known[setting.flag])
    assert all(engines.engine_of(name).plugin == name for name in names.PLUGINS)
    files = {path.stem for path in (ROOT / "opendit" / "parallel" / "engines").glob("*.py")}
    assert set(names.PLUGINS) == files - {"__init__", "base"}
    assert set(names.PRECISIONS) == set(engines.PRECISIONS) == set(names.BYTES)


@pytest.mark.parametrize("package", ["data", "export"])
def test_every_name_of_a_lazy_package_is_there(package):
    module = importlib.import_module(f"opendit.{package}")
    assert module.__all__ and all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(module, "Nothing")  # noqa: B009
