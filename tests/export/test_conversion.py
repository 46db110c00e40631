"""Models converted to and from diffusers' and Meta's formats compute the same function."""

import io
import json
import pickle
from contextlib import redirect_stderr

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
from opendit.checkpoint.pretrained import METADATA_KEY, load_pretrained
from opendit.export import load_pipeline
from opendit.export.__main__ import main
from opendit.export.conversion import NULL_CLASS
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiT
from opendit.models.zoo import build_model, model_config
from tests.encoders.test_vae import small_vae
from tests.models.test_dit import randomised

NAMES = [f"class {i}" for i in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def vae(folder):
    small_vae().save_pretrained(folder / "vae")
    return str(folder / "vae")


def write(path, model, name, **info):
    content = {"model": name, "config": model.config.to_dict(), **info}
    save_file(model.state_dict(), path, metadata={METADATA_KEY: json.dumps(content)})
    return str(path)


@pytest.fixture(scope="module")
def ckpt(folder, vae):
    torch.manual_seed(0)
    model = randomised(DiT(model_config("DiT-Ti/2", input_size=(8, 8), in_channels=4, num_classes=7))).eval()
    return model, write(folder / "ours.safetensors", model, "DiT-Ti/2", class_names=NAMES, vae=vae, image_size=32)


def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 4, 8, 8, generator=generator)
    return x, torch.tensor([0, 7, 400, 999]), torch.tensor([0, 3, 6, 7])  # 7: the null class


def error(a, b) -> float:
    return ((a - b).norm() / b.norm()).item()


@torch.no_grad()
def test_diffusers_there_and_back(folder, ckpt, vae, capsys, no_ranks):
    from diffusers import DiTPipeline

    model, path = ckpt
    output = folder / "pipeline"
    main(["diffusers", "--ckpt", path, "--output", str(output), "--vae", vae])
    x, t, y = inputs()
    ours, theirs = model(x, t, y), torch.where(y == 7, NULL_CLASS, y)
    pipeline = load_pipeline(output)
    assert error(pipeline.transformer(x, t, theirs).sample, ours) < 1e-5
    stock = error(DiTPipeline.from_pretrained(output).transformer(x, t, theirs).sample, ours)
    assert stock > 1e-3  # the stock pipeline does differ
    assert "differs slightly from the trained model" in capsys.readouterr().out
    assert pipeline.get_label_ids(["class 3"]) == [3]
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline([2, 5], num_inference_steps=2, output_type="np").images.shape == (2, 32, 32, 3)

    argv = ["--class_labels", "2", "5", "--num_sampling_steps", "3", "--seed", "4", "--no_save_png"]
    drawn = []
    for which, more in ((path, ["--vae", vae]), (output, [])):  # a pipeline's folder has its VAE inside
        archive = f"{folder}/{len(drawn)}.npz"
        sample.main(["--ckpt", str(which), *argv, *more, "--output", str(folder / "drawn"), "--npz", archive])
        drawn.append(np.load(archive)["arr_0"])
    assert np.array_equal(*drawn) and drawn[0].shape == (2, 32, 32, 3) and drawn[0].std() > 1

    back = folder / "back.safetensors"
    main(["opendit", "--ckpt", str(output), "--output", str(back)])
    again, weights = load_pretrained(back)
    assert weights.info["class_names"] == NAMES and weights.config == model.config
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_meta_there_and_back(folder, ckpt):
    model, path = ckpt
    main(["meta", "--ckpt", path, "--output", str(folder / "meta.pt")])
    state = torch.load(folder / "meta.pt", weights_only=True)
    assert state["y_embedder.embedding_table.weight"].shape == (8, 128) and state["pos_embed"].shape == (1, 16, 128)
    back = folder / "from_meta.safetensors"
    main(["opendit", "--ckpt", str(folder / "meta.pt"), "--model", "DiT-Ti/2", "--output", str(back)])
    assert all(torch.equal(load_file(back)[name], tensor) for name, tensor in model.state_dict().items())


def refusal(*argv) -> str:
    """Return the one line that a refused conversion prints."""
    errors = io.StringIO()
    with pytest.raises(SystemExit) as stop, redirect_stderr(errors):
        main([str(word) for word in argv])
    assert stop.value.code == 2 and errors.getvalue().count("\n") == 1
    return errors.getvalue()


def test_what_the_others_can_not_express_is_refused(folder, ckpt, vae):
    def other(file, name, /, **changes):
        sizes = {"input_size": (8, 8), "in_channels": 4, "num_classes": 7, **changes}
        return write(folder / file, build_model(model_config(name, **sizes)), name, vae=vae)

    text = other("text.safetensors", "DiT-Ti/2", num_classes=None, text=TextConfig("bytes", 64, 16, False))
    video = other("video.safetensors", "vDiT-Ti/222", frames=4)
    oblong = other("oblong.safetensors", "DiT-Ti/2", input_size=(8, 4))
    experts = other("experts.safetensors", "EC-DiT-Ti/2")
    turned = other("turned.safetensors", "DiT-Ti/2", positions="rope")
    no_variance = other("no_variance.safetensors", "DiT-Ti/2", learn_sigma=False)
    velocity, shape = {"name": "ddpm", "prediction": "v"}, dict(input_size=(8, 8), in_channels=4, num_classes=7)
    model = build_model(model_config("DiT-Ti/2", **shape))
    of_v = write(folder / "v.safetensors", model, "DiT-Ti/2", vae=vae, objective=velocity)
    many = other("many.safetensors", "DiT-Ti/2", num_classes=1001)
    for to in ("diffusers", "meta"):
        output = folder / f"never-{to}"
        assert "conditioned on captions" in refusal(to, "--ckpt", text, "--output", output)
        assert "no video DiT" in refusal(to, "--ckpt", video, "--output", output)
        assert "square latents" in refusal(to, "--ckpt", oblong, "--output", output)
        assert "no ecdit model" in refusal(to, "--ckpt", experts, "--output", output)
        assert "other --positions than sincos" in refusal(to, "--ckpt", turned, "--output", output)
        assert "has no variance" in refusal(to, "--ckpt", no_variance, "--output", output)
        assert "--objective ddpm --prediction v" in refusal(to, "--ckpt", of_v, "--output", output)
        assert not output.exists()
    assert "1001 classes" in refusal("diffusers", "--ckpt", many, "--output", folder / "never")
    assert "trained on pixels" in refusal("diffusers", "--ckpt", ckpt[1], "--vae", "none", "--output", folder / "never")
    (folder / "no.pt").touch()
    assert "--model" in refusal("opendit", "--ckpt", folder / "no.pt", "--output", folder / "never.safetensors")


class Evil:
    def __reduce__(self):
        return (open, ("evil-was-here", "w"))


def test_a_malicious_pickle_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "evil.pt").write_bytes(pickle.dumps({"pos_embed": Evil()}))
    torch.save({"pos_embed": Evil()}, folder / "evil2.pt")
    never = folder / "never.safetensors"
    for name in ("evil.pt", "evil2.pt"):
        message = refusal("opendit", "--ckpt", folder / name, "--model", "DiT-Ti/2", "--output", never)
        assert "would run code" in message or "is no .pt file of weights" in message
    assert not (folder / "evil-was-here").exists() and not never.exists()


def test_what_can_be_seen_at_once_is_said_before_weights_are_read(folder, ckpt, monkeypatch):
    monkeypatch.setattr("opendit.checkpoint.pretrained.load_pretrained", lambda *_: pytest.fail("read weights"))
    (folder / "full").mkdir()
    (folder / "full" / "else.txt").touch()
    from_ckpt = ("--ckpt", ckpt[1], "--output")
    assert "its folder does not exist" in refusal("meta", *from_ckpt, folder / "no" / "m.pt")
    assert "is a folder" in refusal("meta", *from_ckpt, folder)
    assert "is what --ckpt names" in refusal("opendit", *from_ckpt, ckpt[1])
    assert "a .safetensors file" in refusal("opendit", *from_ckpt, folder / "weights.bin")
    assert "folder of something else" in refusal("diffusers", *from_ckpt, folder / "full")
    assert "can't write there" in refusal("diffusers", *from_ckpt, folder / "full" / "else.txt")
    assert "doesn't exist" in refusal("meta", "--ckpt", folder / "nowhere", "--output", folder / "m.pt")
    assert "--vae: does nothing" in refusal("meta", *from_ckpt, folder / "m.pt", "--vae", "ema")
    assert "--output '': empty; give a name" in refusal("meta", *from_ckpt, "")
    assert "did you mean DiT-XL/2" in refusal("meta", *from_ckpt, folder / "m.pt", "--model", "DiT-XXL/2")


def test_what_is_replaced_is_said(folder, ckpt, capsys):
    target = folder / "again.pt"
    for said in (False, True):
        main(["meta", "--ckpt", ckpt[1], "--output", str(target)])
        assert (f"{target} is there already and will be replaced" in capsys.readouterr().out) == said
