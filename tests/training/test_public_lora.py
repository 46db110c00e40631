"""LoRA of public models: from the folder of a pipeline to weights that diffusers adds to its own."""

import json

import diffusers
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import opendit
from opendit.checkpoint.pretrained import load_pretrained
from opendit.checkpoint.published import open_published
from opendit.export.__main__ import main as export
from opendit.models.families import FAMILIES as KNOWN
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs
from tests.training.test_public_training import FAMILIES, folders, losses, run, sizes  # noqa: F401 (fixtures)

# Captions as long as the folders' own: FLUX.1 and Wan attend to their padding.
LORA = "--lora 2 --lora_alpha 12 --lr 3e-2 --ema_decay 0.1 --no_ema_warmup --max_text_tokens 512 --batch_size 8".split()


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):  # noqa: F811
    """Return a run with --lora of every family."""
    return {name: run(folders, name, tmp_path_factory.mktemp(f"{name}-lora"), *LORA) for name in FAMILIES}


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "transformer/diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
def test_diffusers_adds_what_we_merge(folders, trained, name, tmp_path):  # noqa: F811
    """Every weight of diffusers' network with our LoRA file, and of the folder that we export; the file's products may
    belong to other layers than ours (q, k and v; attention and MLP side by side)."""
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
    ours, opened = load_pretrained(folders / name, lora=file)[0], open_published(merged, KNOWN).tensors()
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
    run(folders, name, tmp_path, *LORA[4:], "--load", str(half), load=True)  # it knows its LoRA and its base
    assert losses(half) == losses(trained[name])
    for file in ("model", "ema", "optimizer_000"):
        one, other = (load_file(each / f"checkpoints/latest/{file}.safetensors") for each in (trained[name], half))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), file


def on_ranks(mesh, folders, outputs) -> None:  # noqa: F811
    several_programs()
    for name in FAMILIES:
        for plugin in ("zero2", "fsdp"):
            run(folders, name, outputs / f"{name} {plugin}", *LORA[:-1], "4", "--plugin", plugin)


def test_two_ranks_have_the_curve_of_one(folders, trained, tmp_path):  # noqa: F811
    run_ranks(2, on_ranks, folders, tmp_path)
    for way in tmp_path.iterdir():
        (found,) = way.glob("0*")
        assert off_by(losses(found), losses(trained[way.name.split()[0]])) < 2e-5, way.name


def foreign(name: str, tokens: str) -> dict[str, torch.Tensor]:
    """Return a LoRA of all attention layers of a tiny network, drawn at random, in diffusers' names."""
    with torch.device("meta"):
        network = getattr(diffusers, KNOWN[name].network)(**json.loads(tokens))
    generator, found = torch.Generator().manual_seed(4), {}
    for layer, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and "att" in layer:
            found[f"{layer}.lora_A.weight"] = torch.randn(3, module.in_features, generator=generator)
            found[f"{layer}.lora_B.weight"] = torch.randn(module.out_features, 3, generator=generator) / 4
    return found


@pytest.mark.parametrize("form", ["diffusers", "peft", "kohya"])
@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_others_are_added_as_diffusers_adds_them(folders, name, form, tmp_path):  # noqa: F811
    """Every weight with a random LoRA file; alphas by their keys, by diffusers' metadata, and none."""
    config = (folders / name / "transformer/config.json").read_text()
    state, metadata = foreign(name, config), {}
    if form == "kohya":
        state = {key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): part for key, part in state.items()}
        state |= {key.split(".lora_")[0] + ".alpha": torch.tensor(6.0) for key in [*state]}
    prefix = {"diffusers": "transformer.", "peft": "base_model.model.", "kohya": "diffusion_model."}[form]
    if form == "peft":
        metadata = {"lora_adapter_metadata": json.dumps({"transformer.r": 3, "transformer.lora_alpha": 1.5})}
    save_file({prefix + key: part for key, part in state.items()}, file := tmp_path / "style.safetensors", metadata)
    model, _ = load_pretrained(folders / name, lora=file)
    network = getattr(diffusers, KNOWN[name].network).from_pretrained(folders / name / "transformer")
    scale = {"diffusers": 1.0, "peft": 0.5, "kohya": 2.0}[form]
    with torch.no_grad():
        for layer, part in foreign(name, config).items():
            if layer.endswith(".lora_B.weight"):
                a = foreign(name, config)[layer.replace("lora_B", "lora_A")]
                network.get_submodule(layer.removesuffix(".lora_B.weight")).weight.add_(scale * part @ a)
    opened = open_published(folders / name, KNOWN)
    wanted = opened.tensors(weights=network.state_dict())
    changed = 0
    for key, parameter in model.named_parameters():
        assert (parameter - wanted.read(key)).abs().max() <= 1e-6 * wanted.read(key).abs().max(), key
        changed += not torch.equal(parameter, opened.tensors().read(key))
    assert changed > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state | {"text_encoder.q.lora_A.weight": torch.ones(3, 4)},
            "text_encoder.q.lora_A.weight and",
        ),
        (lambda state: state | {"lora_unet_blocks_0.lora_down.weight": torch.ones(3, 4)}, "belong to no layer of"),
        (lambda state: {k: v for k, v in state.items() if "lora_B" not in k}, "has one matrix of a LoRA without the"),
        (lambda state: {k: v[:, :-1] for k, v in state.items()}, "which do not make"),
        (lambda state: state | {f"{next(iter(state))}_scale": torch.ones(1)}, "belong to no layer of"),
    ],
    ids=["text encoder", "another naming", "half", "another base", "unknown tensor"],
)
def test_files_that_fit_nothing_are_refused_in_one_line(folders, change, message, tmp_path):  # noqa: F811
    state = foreign("z_image", (folders / "z_image/transformer/config.json").read_text())
    save_file({key: part.contiguous() for key, part in change(state).items()}, file := tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=message) as raised:
        load_pretrained(folders / "z_image", lora=file)
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)
