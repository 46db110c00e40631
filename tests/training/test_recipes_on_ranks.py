"""The settings of docs/better_training.md have the same fp32 losses and averages on 1, 2 and 4 ranks.

For uncertainty weighting and Muon, tests/training/test_uncertainty.py and tests/parallel/test_muon.py test this.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Dinov2Config, Dinov2Model

import train
from opendit.models import initialization
from opendit.models.initialization import Constant, Normal
from opendit.parallel import layout
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs
from tests.training.test_train import TINY, log_of

SAMPLES = 16  # in a global batch
WIDTH = 128  # of DiT-Ti
FLAGS = [*TINY, *"--sample_every 0 --max_steps 3 --lr 1e-3 --mixed_precision fp32".split()]
RECIPES = {
    "base": "",
    "modern block": "--norm rms --mlp swiglu --positions rope --qk_norm",
    "tread": "--route 1:3:0.5",
    "sprint": "--route 1:3:0.5:sprint --route_drop 0.3",
    "x-prediction": "--flow_prediction x --patch_bottleneck 3",
    "contrast": "--flow_contrast 0.2",
    "min-SNR": "--flow_min_snr 5",
    "logit-normal": "--flow_times logit_normal --flow_mean 0.5",
    "meanflow": "--objective meanflow --meanflow_guidance 2",
    "repa": "--repa {teacher} --repa_block 2",
    "power": "--average power:0.05,0.20",
}


def draw_zeros() -> None:
    """Let parameters that begin at zero begin at random values, so that the loss depends on every parameter."""
    found = initialization.distribution_of

    def distribution_of(model, name):
        drawn = found(model, name)
        return Normal(0.05) if drawn == Constant(0) else drawn

    initialization.distribution_of = layout.distribution_of = distribution_of


def all_recipes(mesh, folder: Path, teacher: str) -> None:
    several_programs()
    draw_zeros()
    for name, recipe in RECIPES.items():
        objective = [] if "--objective" in recipe else ["--objective", "flow"]
        own = ["--batch_size", str(SAMPLES // mesh.world_size), "--outputs", str(folder / name)]
        train.main([*FLAGS, *objective, *recipe.format(teacher=teacher).split(), *own])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with a folder for each number of ranks, which holds a run of each recipe."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}
    Dinov2Model(Dinov2Config(**sizes, mlp_ratio=2)).save_pretrained(folder / "teacher")
    for ranks in (1, 2, 4):
        run_ranks(ranks, all_recipes, folder / str(ranks), str(folder / "teacher"))
    return folder


def found(folder: Path) -> tuple[list[float], list[float], dict]:
    """Return a run's losses, norms of gradients, and averages of weights by file and name."""
    (run,) = folder.iterdir()
    log, checkpoint = log_of(run), run / "checkpoints" / "latest"
    files = {path.name: load_file(path) for path in checkpoint.glob("ema*.safetensors")}
    averages = {(file, name): value for file, weights in files.items() for name, value in weights.items()}
    for name, value in averages.items():
        if name[1].endswith("attn.qkv.bias"):  # softmax ignores the keys' bias: its gradient is rounding only
            value[WIDTH : 2 * WIDTH] = 0
    return [line["loss"] for line in log], [line["grad_norm"] for line in log], averages


@pytest.mark.parametrize("recipe", RECIPES)
def test_curves_and_averages_are_the_same_on_1_2_and_4_ranks(runs, recipe):
    losses, norms, averages = found(runs / "1" / recipe)
    assert len(losses) == 3 and len(averages) > 40
    if recipe != "base":
        base, _, plain = found(runs / "1" / "base")
        if recipe == "power":
            assert losses == base and {file for file, _ in averages} == {"ema.safetensors", "ema_0.2.safetensors"}
        else:
            assert abs(losses[0] / base[0] - 1) > 1e-3
    for ranks in ("2", "4"):
        others = found(runs / ranks / recipe)
        assert off_by(others[0], losses) < 1e-5
        assert off_by(others[1], norms) < 1e-4  # on a CPU, torch's norm of REPA's largest matrix is wrong by 9e-5
        assert others[2].keys() == averages.keys()
        for name, value in averages.items():
            assert (others[2][name] - value).norm() < 1e-5 * value.norm(), name
