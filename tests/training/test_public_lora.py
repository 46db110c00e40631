"""LoRA on public models, from a pipeline's folder to weights that diffusers can add to its own."""

import json
import re
import shutil

import diffusers
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import opendit
from opendit.checkpoint.foreign import open_published
from opendit.checkpoint.pretrained import load_pretrained
from opendit.export.__main__ import main as export
from opendit.models.families import FAMILIES as KNOWN
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs
from tests.training.test_public_training import Runs, folders, losses, run, sizes  # noqa: F401 (fixtures)

# Captions have the folders' own length, because FLUX.1 and Wan attend to their padding.
LORA = "--lora 2 --lora_alpha 12 --lr 3e-2 --ema_decay 0.1 --no_ema_warmup --max_text_tokens 512 --batch_size 8".split()


FAMILIES = ("flux", "z_image", "wan", "flux2_klein")


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):  # noqa: F811
    """Return the --lora run of every family."""
    return Runs(lambda name: run(folders, name, tmp_path_factory.mktemp(f"{name}-lora"), *LORA))


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "transformer/diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
def test_diffusers_adds_what_we_merge(folders, trained, name, tmp_path):  # noqa: F811
    """Diffusers' network with our LoRA file has the weights of the folder that we export. The file's layers may differ
    from ours: q, k and v are separate, as are attention and MLP."""
    file, merged = tmp_path / "style.safetensors", tmp_path / "merged"
    export(["lora", "--ckpt", str(trained[name]), "--output", str(file)])
    export(["diffusers", "--ckpt", str(trained[name]), "--base", str(folders / name), "--output", str(merged)])
    network = getattr(diffusers, KNOWN[name].network).from_pretrained(folders / name / "transformer")
    network.load_lora_adapter(load_file(file), prefix="transformer")
    network.fuse_lora()
    state = network.state_dict()
    found = {key.replace(".base_layer", ""): value for key, value in state.items() if ".lora_" not in key}
    before, after = weights_of(folders / name), weights_of(merged)
    assert found.keys() == after.keys() == before.keys()
    assert all((found[key] - after[key]).abs().max() <= 1e-6 for key in after)
    changed = {key for key in after if not torch.equal(before[key], after[key])}
    with safe_open(file, "pt") as opened:
        layers = {key.split(".lora_")[0].removeprefix("transformer.") for key in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    assert changed == {f"{layer}.weight" for layer in layers} and len(changed) > 10
    assert (metadata["base"], metadata["trained_rank"], metadata["trained_alpha"]) == (name, "2", "12")
    ours, opened = load_pretrained(folders / name, lora=[(file, 1.0)])[0], open_published(merged, KNOWN).tensors()
    assert all((part - opened.read(key)).abs().max() <= 1e-6 for key, part in ours.named_parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_drawn_with_a_lora_is_drawn_from_the_merged_folder(folders, trained, name, tmp_path):  # noqa: F811
    merged = tmp_path / name
    export(["diffusers", "--ckpt", str(trained[name]), "--base", str(folders / name), "--output", str(merged)])

    def drawn(path, **more) -> np.ndarray:
        clips = {"frames": 5} if name == "wan" else {}
        found = opendit.load(path, **more)(["seven"], seed=0, steps=2, size=64, **clips)[0]
        return np.stack([np.asarray(frame) for frame in getattr(found, "frames", [found])]).astype(int)

    plain, added = drawn(folders / name), drawn(folders / name, lora=trained[name])
    assert np.abs(added - drawn(merged)).max() <= 1 < np.abs(added - plain).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_of_lora_resumes_bit_for_bit(folders, trained, name, tmp_path):  # noqa: F811
    half = run(folders, name, tmp_path, *LORA, steps=2)
    run(folders, name, tmp_path, *LORA[4:], "--load", str(half), load=True)  # the run knows its LoRA and base
    assert losses(half) == losses(trained[name])
    for file in ("model", "ema", "optimizer_000"):
        one, other = (load_file(each / f"checkpoints/latest/{file}.safetensors") for each in (trained[name], half))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), file


def test_a_run_resumes_from_its_renamed_folder(folders, trained, tmp_path, capsys):  # noqa: F811
    half, moved = run(folders, "flux", tmp_path, *LORA, steps=2), tmp_path / "renamed"
    shutil.copytree(folders / "flux", moved)
    flags = [*LORA, "--pretrained", str(moved)]
    assert run(folders, "flux", tmp_path, *flags, "--load", "latest", "--max_steps", "1") != half
    assert f"starting afresh; to resume {half}" in capsys.readouterr().out
    run(folders, "flux", tmp_path, *flags, "--load", str(half))
    assert losses(half) == losses(trained["flux"])
    file = moved / "transformer/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"guidance_embeds": False}))
    weights = file.with_name("diffusion_pytorch_model.safetensors")
    save_file({name: value for name, value in load_file(weights).items() if "guidance" not in name}, weights)
    with pytest.raises(SystemExit):
        run(folders, "flux", tmp_path, *flags, "--load", str(half))
    assert f"--pretrained {moved}: is another network than that of --load" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("file.safetensors", "does not hold a DiT.* give the folder of its pipeline"),
        ("lora.safetensors", "holds a LoRA; give the folder of its base model"),
        ("bare", "--vae: .*bare has no folder vae; give the VAE of flux/bare's pipeline, as FOLDER/vae"),
    ],
)
def test_a_part_of_a_pipeline_is_refused(folders, trained, tmp_path, capsys, path, error):  # noqa: F811
    if path == "bare":
        shutil.copytree(folders / "flux", tmp_path / path, ignore=shutil.ignore_patterns("vae"))
    elif path == "lora.safetensors":
        export(["lora", "--ckpt", str(trained["flux"]), "--output", str(tmp_path / path)])
    else:
        shutil.copy(folders / "flux/transformer/diffusion_pytorch_model.safetensors", tmp_path / path)
    with pytest.raises(SystemExit):
        run(folders, "flux", tmp_path, *LORA, "--pretrained", str(tmp_path / path))
    assert re.search(error, capsys.readouterr().err)
    if path != "bare":
        with pytest.raises(ValueError, match=error):
            opendit.load(tmp_path / path)


def on_ranks(mesh, folders, outputs, ways) -> None:  # noqa: F811
    several_programs()
    for name, plugin in ways:
        run(folders, name, outputs / f"{name} {plugin}", *LORA[:-1], "4", "--plugin", plugin)


@pytest.mark.parametrize(
    "ways",
    [
        [("flux", "fsdp"), ("wan", "zero2")],
        [("flux", "zero2"), ("z_image", "zero2"), ("z_image", "fsdp"), ("wan", "fsdp")],
    ],
    ids=["two", "others"],
)
def test_two_ranks_have_the_curve_of_one(folders, trained, tmp_path, ways):  # noqa: F811
    run_ranks(2, on_ranks, folders, tmp_path, ways)
    for name, plugin in ways:
        (found,) = (tmp_path / f"{name} {plugin}").glob("0*")
        assert off_by(losses(found), losses(trained[name])) < 2e-5, (name, plugin)


def test_the_recipe_fits_a_run_to_this_machine(folders, tmp_path, capsys):  # noqa: F811
    """Without a GPU the recipe fits the run to host memory in fp32, and explicit flags stay."""
    found = run(folders, "z_image", tmp_path, "--recipe", "lora", "--batch_size", "2", steps=2)
    said = capsys.readouterr().out
    words = "--lora 16 --mixed_precision fp32 --recompute none --batch_size 2 --grad_accumulation 2 --plugin zero2"
    assert "reused: all" in said and "text_encoder" not in said.partition("recipe      lora")[2].partition("\n")[0]
    assert f"--card auto: {words}\n" in said and "GiB (host memory) by the estimate: states" in said
    flags = json.loads((found / "config.json").read_text())["flags"]
    assert (flags["lora"], flags["batch_size"], flags["grad_accumulation"], flags["card"]) == (16, 2, 2, "auto")
    assert len(losses(found)) == 2
