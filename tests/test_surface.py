"""The public package: imports are light, all names exist and have types, and training works from Python."""

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import opendit
from opendit.cli.command import as_given
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from tests.sampling.small import write

ROOT = Path(__file__).resolve().parents[1]
TINY = dict(
    model="DiT-Ti/4",
    data_path="digits",
    vae="none",
    image_size=8,
    batch_size=4,
    num_workers=0,
    max_steps=2,
    sample_every=0,
)


def test_importing_it_takes_nothing_else():
    code = "import sys; before = set(sys.modules); import opendit; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    others = {name.partition(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names) - {"opendit"}
    assert not others and "opendit.common.utils" in done.stdout and "opendit.cli" not in done.stdout


@pytest.mark.parametrize("name", ["opendit", *(f"opendit.{room}" for room in ("data", "export"))])
def test_every_name_is_there_and_type_checkers_see_the_same(name):
    package = importlib.import_module(name)
    assert sorted(package.__all__) == package.__all__
    declared = {}
    for node in ast.walk(ast.parse(Path(package.__file__).read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                declared |= {alias.asname: (line.module, alias.name) for alias in line.names}
    assert set(declared) == set(package.__all__)
    for public, (module, attribute) in declared.items():
        assert getattr(package, public) is getattr(importlib.import_module(module), attribute), public


def test_every_name_is_shown_and_told_of():
    assert set(opendit.__all__) <= set(dir(opendit))
    assert all(getattr(opendit, name).__doc__ for name in opendit.__all__)
    with pytest.raises(AttributeError, match="module 'opendit' has no attribute 'Nothing'"):
        opendit.Nothing  # noqa: B018


def test_pyright_has_nothing_to_say():
    """pyproject.toml includes the package and the benchmarks."""
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed: pip install basedpyright, or opendit[test]")
    words = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr


# Classes here inherit from Colossal-AI's, which has no types.
UNTYPED = "opendit.parallel.colossal."


def test_public_types_are_complete():
    """Every type in the public interface is known to a type checker, and so is every public name in the package."""
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed: pip install basedpyright, or opendit[test]")
    words = [sys.executable, "-m", "basedpyright", "--verifytypes", "opendit", "--ignoreexternal", "--outputjson"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    symbols = [each for each in json.loads(done.stdout)["typeCompleteness"]["symbols"] if each["isExported"]]
    assert {f"opendit.{name}" for name in opendit.__all__} <= {each["name"] for each in symbols if each["isTypeKnown"]}
    # For other names, the type of an attribute that only __init__ assigns may be inferred ("ambiguous").
    unknown = {each["name"] for each in symbols if not each["isTypeKnown"] and not each["isTypeAmbiguous"]}
    assert not [name for name in sorted(unknown) if not name.startswith(UNTYPED)], "annotate them"


# Make importing Colossal-AI fail, then use the command and the Python interface.
WITHOUT = """
import sys
sys.modules["colossalai"] = None
import opendit
from opendit.cli.command import main
assert main(sys.argv[1:] + ["--npz", "drawn.npz"]) == 0
assert main(["export", "meta", "--ckpt", sys.argv[3], "--output", "meta.pt"]) == 0
pipe = opendit.load(sys.argv[3], device="cpu")
import numpy
numpy.save("python.npy", numpy.stack([numpy.asarray(p) for p in pipe([0, 1], steps=2, progress=False)]))
main(["train", "--model", "DiT-Ti/2", "--data_path", "mock", "--vae", "none", "--image_size", "8"])
"""


def test_sampling_and_export_need_no_colossalai_and_training_says_so(tmp_path):
    ckpt = write(tmp_path / "w.safetensors")
    draw = f"sample --ckpt {ckpt} --num_sampling_steps 2 --class_labels 0 1".split()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *draw], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: training needs Colossal-AI") and "--no-deps colossalai==0.5.0" in last
    drawn = np.load(tmp_path / "drawn.npz")["arr_0"]
    assert np.array_equal(np.load(tmp_path / "python.npy"), drawn) and (tmp_path / "meta.pt").is_file()


# --------------------------------------------------------------------------------------------------- opendit.train


def test_a_configuration_is_what_its_command_line_says():
    assert as_given(TrainConfig(lr=1e-3, fp8=True)) == parse(TrainConfig, ["--lr", "1e-3", "--fp8"])
    with_recipe = parse(TrainConfig, ["--recipe", "digits", "--max_steps", "3"])
    assert as_given(TrainConfig(recipe="digits", max_steps=3)) == with_recipe != TrainConfig(max_steps=3)
    assert as_given(with_recipe) is with_recipe


def test_train_and_load(tmp_path, no_ranks):
    folder = opendit.train(opendit.TrainConfig(**TINY, outputs=str(tmp_path)))
    assert folder == tmp_path / "000-DiT-Ti-4" and (folder / "checkpoints" / "latest").exists()
    pictures = opendit.load(folder, device="cpu")(["7", 3], steps=2, progress=False)
    assert len(pictures) == 2 and pictures[0].mode == "RGB"


def test_what_can_not_be_trained_is_an_exception(tmp_path, no_ranks, capsys):
    with pytest.raises(ValueError, match="--lr -1: out of range; give a number above 0"):
        opendit.train(opendit.TrainConfig(lr=-1))
    with pytest.raises(ValueError, match="--plugin ddp.*|--num_classes"):
        opendit.train(opendit.TrainConfig(**TINY, num_classes=3, outputs=str(tmp_path)))
    assert not (tmp_path / "000-DiT-Ti-4").exists()
