"""train.py --uncertainty_weighting: on any number of ranks, with packs, resumed, and sampled from."""

import pytest
import torch

import opendit
import train
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from tests.ranks import run_ranks
from tests.training.test_train import TINY, log_of, start

FLAGS = [*TINY, *"--objective flow --positions rope --lr 3e-3 --sample_every 0 --uncertainty_weighting".split()]


def test_the_curve_is_the_same_on_any_number_of_ranks_in_packs_and_after_a_resume(tmp_path, no_ranks):
    def of(folder):
        return [line["loss"] for line in log_of(tmp_path / folder / "000-DiT-Ti-2")]

    def words(folder, batch, steps=4):
        return ["--batch_size", str(batch), "--max_steps", str(steps), "--outputs", str(tmp_path / folder)]

    train.main([*FLAGS, *words("1", 16)])
    for ranks in (2, 4):
        run_ranks(ranks, start, [*FLAGS, *words(str(ranks), 16 // ranks), "--no_save"])
    run_ranks(2, start, [*FLAGS, *words("shared", 16), "--no_save", "--sequence_parallel_size", "2"])
    packs = [*FLAGS, "--no_save", "--pack_tokens", "64"]  # samples have 16 tokens
    train.main([*packs, *words("packs", 4)])
    run_ranks(2, start, [*packs, *words("packs of 2", 2)])
    for steps in (2, 4):
        train.main([*FLAGS, *words("parts", 16, steps), "--load", "latest"])
    for one, other in (("1", "2"), ("1", "4"), ("1", "shared"), ("packs", "packs of 2")):
        torch.testing.assert_close(of(other), of(one), rtol=2e-5, atol=0)
    assert of("parts") == of("1")
    train.main([*FLAGS[:-1], *words("plain", 16), "--pretrained", str(tmp_path / "1" / "000-DiT-Ti-2")])
    for run, learned in (("1", True), ("plain", False)):
        pipe = opendit.load(tmp_path / run / "000-DiT-Ti-2")
        assert pipe([1], steps=2, progress=False)[0].size == (8, 8) and pipe.config.uncertainty is learned


def test_it_begins_with_equal_weights_and_the_held_out_loss_does_without_it(tmp_path, no_ranks):
    found = []
    for name, flags in (("learned", FLAGS), ("plain", FLAGS[:-1])):
        how = f"--batch_size 16 --max_steps 1 --lr 1e-6 --no_save --outputs {tmp_path / name}"
        train.main([*flags, *how.split(), *"--validate_every 1 --validate_samples 16 --validate_share 0.05".split()])
        (line,) = log_of(tmp_path / name / "000-DiT-Ti-2")
        found.append((line["loss"], line["val_loss"]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "flags,said",
    [
        ("--pipeline_parallel_size 2", "--pipeline_parallel_size"),
        ("--parallel auto", "--parallel auto"),
        ("--objective meanflow", "two times"),
    ],
)
def test_what_it_does_not_work_with_is_named(flags, said):
    with pytest.raises(ValueError, match=said):
        parse(TrainConfig, ["--model", "DiT-Ti/2", "--uncertainty_weighting", *flags.split()]).resolve(2, has_gpu=True)
