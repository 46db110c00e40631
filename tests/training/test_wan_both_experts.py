"""--expert both trains the two networks of Wan 2.2 A14B in turn, in one run."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import opendit
import train
from opendit.checkpoint import save
from opendit.checkpoint.pretrained import read_config, read_newest
from opendit.checkpoint.run_folders import folder_name
from opendit.data.files import hash_files
from opendit.diffusion.objectives.flow import FlowObjective
from opendit.export.__main__ import main as export
from opendit.training import prepare
from opendit.training.fingerprint import CURVE
from opendit.training.memory import Setup, estimate, save_buffers
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs
from tests.training.test_train import log_of
from tests.training.test_wan_experts import (  # noqa: F401  (root and runs are fixtures)
    BOUNDARY,
    INSIDE,
    WEIGHTS,
    drawn,
    flags_of,
    near,
    root,
    runs,
    theirs,
)

STEPS = 6
NAMES = ("model.safetensors", "ema.safetensors", "optimizer_000.safetensors")
AT = {"high": "checkpoints/latest", "low": "low/checkpoints/latest"}


def trained(flags, outputs, *more):
    """Train, and return the run's folder. Later flags override earlier ones."""
    train.main([*flags, "--max_steps", str(STEPS), "--outputs", str(outputs), *more])
    (run,) = outputs.glob("0*")
    return run


def tensors_of(checkpoint):
    return {f"{name}: {key}": value for name in NAMES for key, value in load_file(checkpoint / name).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def fed(root, tmp_path_factory):  # noqa: F811
    """Return a run of both networks, and the micro-batches that each network was trained on."""
    found, given = {name: [] for name in INSIDE}, train.micro_batches

    def recorded(run):
        for batch in given(run):
            found[list(INSIDE)[run.network_of(run.done)]].append(batch.clone())
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "micro_batches", recorded)
        outputs = tmp_path_factory.mktemp("both")
        return trained(flags_of(root, outputs, "both", "--ema_decay", "0.7"), outputs), found


def test_each_network_is_that_of_a_run_that_is_fed_its_steps_alone(root, fed, tmp_path, monkeypatch):  # noqa: F811
    run, batches = fed
    assert min(map(len, batches.values())) > 1, "both take turns"
    for expert, own in batches.items():
        for batch in own:
            assert ((batch.t >= BOUNDARY) == (expert == "high")).all()
        with monkeypatch.context() as patch:
            steps = iter(own)
            patch.setattr(train, "micro_batches", lambda _, steps=steps: [next(steps)])
            flags = flags_of(root, tmp_path / expert, expert, "--ema_decay", "0.7")
            alone = trained(flags, tmp_path / expert, "--max_steps", str(len(own)))
        expected, found = tensors_of(alone / AT["high"]), tensors_of(run / AT[expert])
        assert same(expected, found), expert
        states = [json.loads((each / "state.json").read_text()) for each in (alone / AT["high"], run / AT[expert])]
        assert states[0]["optimizer_steps"] == states[1]["optimizer_steps"] == len(own)
        assert states[0]["ema"]["updates"] == states[1]["ema"]["updates"] == len(own)
        assert states[1]["step"] == STEPS


def test_a_run_resumes_exactly(root, fed, tmp_path):  # noqa: F811
    flags = flags_of(root, tmp_path, "both", "--ema_decay", "0.7", "--ckpt_every", "3", "--ckpt_keep", "1")
    run = trained(flags, tmp_path, "--max_steps", "4")
    assert [len(list((run / at).parent.glob("step_*"))) for at in AT.values()] == [1, 2]
    alone = [each for each in flags if each not in ("--pretrained", f"{root}/wan", "--expert", "both")]
    around = ["--vae", f"{root}/wan/vae", "--text_encoder", f"{root}/wan"]
    trained([*alone, *around], tmp_path, "--load", str(run))  # the run's folder tells which networks it has
    for at in AT.values():
        assert same(tensors_of(fed[0] / at), tensors_of(run / at))


def programs(mesh, root, folder, runs):  # noqa: F811
    several_programs()
    for name, how in runs.items():
        trained(flags_of(root, folder / name, "both"), folder / name, *how.split())


PLUGINS = ("ddp", "zero2", "fsdp")


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_trains_the_same_networks(root, tmp_path, ranks):  # noqa: F811
    how = f"--batch_size {4 // ranks} --plugin "
    flags = {plugin: how + plugin for plugin in PLUGINS}
    flags["lora"] = how + "fsdp --lora 2"
    if ranks == 2:
        flags["tensor"] = "--tensor_parallel_size 2 --batch_size 4"
        flags["sequence"] = "--sequence_parallel_size 2 --batch_size 4"
    run_ranks(ranks, programs, root, tmp_path, flags)
    one = {
        name: trained(flags_of(root, tmp_path / f"one-{name}", "both"), tmp_path / f"one-{name}", *more)
        for name, more in (("all", ()), ("lora", ("--lora", "2")))
    }
    for name in flags:
        (run,) = (tmp_path / name).glob("0*")
        expected = one.get(name, one["all"])
        losses = [[line["loss"] for line in log_of(each)] for each in (expected, run)]
        assert len(losses[1]) == STEPS and off_by(losses[1], losses[0]) < 1e-5, name
        for at in AT.values():
            weights = [read_newest(each / at).state for each in (expected, run)]
            assert set(weights[0]) == set(weights[1])
            one_by_one = [torch.cat([each[key].flatten() for key in sorted(each)]) for each in weights]
            assert (one_by_one[0] - one_by_one[1]).norm() < 1e-4 * one_by_one[0].norm(), (name, at)


def test_both_are_drawn_and_exported_from_one_run(root, fed, tmp_path):  # noqa: F811
    run, output = fed[0], tmp_path / "out"
    export(f"diffusers --ckpt {run} --base {root}/wan --output {output}".split())
    for expert, inside in INSIDE.items():
        weights = load_file(output / inside / WEIGHTS)
        assert torch.equal(
            weights["proj_out.weight"], load_file(run / AT[expert] / "ema.safetensors")["final_layer.linear.weight"]
        )
    around = dict(vae=str(root / "wan/vae"), text_encoder=str(root / "wan"))
    found = drawn(opendit.load(run, **around), sampler="unipc")
    assert near(found, theirs(output, found.shape[1:]))
    assert torch.equal(found, drawn(opendit.load(run / "checkpoints" / folder_name(STEPS), **around), sampler="unipc"))


def test_a_damaged_checkpoint_is_left_out_with_that_of_the_other_network(root, tmp_path, capfd):  # noqa: F811
    run = trained(flags_of(root, tmp_path, "both", "--ckpt_every", "3"), tmp_path)
    around = {"vae": root / "wan" / "vae", "text_encoder": root / "wan"}
    older = drawn(opendit.load(run / "checkpoints" / folder_name(3), **around))
    assert not torch.equal(older, drawn(opendit.load(run, **around)))
    file = run / "checkpoints" / folder_name(STEPS) / "ema.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    assert torch.equal(older, drawn(opendit.load(run, **around)))


def test_a_network_takes_the_share_of_steps_that_its_times_have():
    for mode in ("uniform", "logit_normal", "mode"):
        whole = FlowObjective(3.0, times_are=mode)
        part = (whole.times(0, 0, torch.arange(100_000)) >= 0.7).double().mean()
        high, low = FlowObjective(3.0, times_are=mode, least=0.7), FlowObjective(3.0, times_are=mode, most=0.7)
        assert math.isclose(high.share, part, abs_tol=0.01) and math.isclose(high.share + low.share, 1, abs_tol=1e-9)


def test_a_run_starts_from_both_networks_of_another(root, fed, tmp_path):  # noqa: F811
    around = ["--pretrained", str(fed[0]), "--vae", f"{root}/wan/vae", "--text_encoder", f"{root}/wan"]
    run = trained(flags_of(root, tmp_path, "both", *around, "--lr", "1e-12"), tmp_path)
    for at in AT.values():
        averages, weights = (load_file(each / at / name) for each, name in ((fed[0], NAMES[1]), (run, NAMES[0])))
        assert all(torch.allclose(weights[name], value, atol=1e-6) for name, value in averages.items())


def test_a_lora_of_both_is_drawn_and_exported(root, tmp_path):  # noqa: F811
    run = trained(flags_of(root, tmp_path, "both", "--lora", "2"), tmp_path)
    files = [tmp_path / f"{name}.safetensors" for name in INSIDE]
    for path, each in zip(files, (run, run / "low"), strict=True):
        export(f"lora --ckpt {each} --output {path}".split())
    found = drawn(opendit.load(root / "wan", lora=run))
    assert near(found, drawn(opendit.load(root / "wan", lora=files)))
    for alone in files:
        assert not near(found, drawn(opendit.load(root / "wan", lora=alone)))


def test_a_resume_tells_which_network_below_a_lora_is_another(root, tmp_path, monkeypatch, capsys):  # noqa: F811
    flags = flags_of(root, tmp_path, "both", "--lora", "2")
    run, others = trained(flags, tmp_path, "--max_steps", "1"), shutil.copytree(root / "wan", tmp_path / "others/wan")
    flags[flags.index("--pretrained") + 1] = str(others)

    def told(step):
        capsys.readouterr()
        trained(flags, tmp_path, "--max_steps", str(step), "--load", str(run))
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: resume: ")]
        return [line.removeprefix("note: resume: ") for line in notes]

    assert told(2) == []  # a copy of the same weights
    for step, (expert, called) in enumerate({"high": "--pretrained /", "low": "--pretrained, the low-noise "}.items()):
        file = others / INSIDE[expert] / WEIGHTS
        weights = load_file(file)
        weights["proj_out.bias"][0] += 1
        save_file(weights, file)
        (line,) = told(3 + step)
        assert line.startswith(called) and line.endswith(f": other weights: {CURVE}"), line
    # Earlier versions stored nothing for the low-noise network, and a hash that covers no file.
    known, old = prepare.fingerprint, {"pretrained": hash_files([str(root)])}
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "fingerprint", lambda run: without_low(known(run)) | old)
        told(5)
    assert told(6) == []


def without_low(entries):
    return {name: value for name, value in entries.items() if not name.startswith("pretrained_low")}


def test_no_checkpoint_is_of_one_network_alone(root, tmp_path, monkeypatch):  # noqa: F811
    written = save.tensor_set.write_manifest

    def fails(folder, *how, **more):
        if "low" in folder.parts and folder.name.endswith("4.incomplete"):
            raise OSError("the disk is full")
        return written(folder, *how, **more)

    monkeypatch.setattr(save.tensor_set, "write_manifest", fails)
    with pytest.raises(SystemExit):
        trained(flags_of(root, tmp_path, "both", "--ckpt_every", "2", "--ckpt_keep", "1"), tmp_path)
    (run,) = tmp_path.glob("0*")
    left = [{path.name for path in (run / at).parent.glob("step_*")} for at in AT.values()]
    assert left == [{folder_name(6)}, {folder_name(2), folder_name(6)}]  # step 2 is kept until step 6 is complete


def test_memory_counts_the_states_of_both(root):  # noqa: F811
    config = read_config(root / "wan/transformer/config.json")
    one, two = (estimate(config, Setup(networks=networks), 1) for networks in (1, 2))
    assert two.states == {name: 2 * size for name, size in one.states.items()} and two.peak == one.peak
    assert save_buffers(config, Setup(networks=2)) == 2 * save_buffers(config, Setup())


def test_what_does_not_work_with_both_is_refused_in_one_line(root, fed, runs, refusal, tmp_path):  # noqa: F811
    flags = flags_of(root, tmp_path, "both")
    for more, why in (
        ("--pipeline_parallel_size 2", "stages are of one network"),
        ("--plugin gemini --mixed_precision bf16", "chunks of one network"),
        ("--validate_share 0.5", "held-out losses"),
    ):
        assert why in refusal([*flags, *more.split()])
    flags = [each for each in flags if each not in ("--pretrained", f"{root}/wan")]
    flags += ["--vae", f"{root}/wan/vae", "--text_encoder", f"{root}/wan", "--load"]
    assert "of a run of both networks; give both" in refusal([*flags, str(fed[0]), "--expert", "high"])
    assert f"of one network of a run of both; load {fed[0]}" in refusal([*flags, f"{fed[0]}/low"])
    assert "is of a run of one network; give the one that it trains" in refusal([*flags, str(runs["low"])])
    shutil.copytree(fed[0], tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "low/checkpoints" / folder_name(STEPS))
    assert "low/checkpoints/step_0000006: no checkpoint there" in refusal([*flags, str(tmp_path / "run")])
