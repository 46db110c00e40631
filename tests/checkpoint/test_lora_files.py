"""LoRA files of diffusers, ComfyUI and kohya's trainers, exported and loaded, compared with diffusers' own readers."""

import contextlib
import inspect
import json
import math
import re
from dataclasses import replace

import peft
import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import lora_conversion_utils, lora_pipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import opendit
from opendit.checkpoint.pretrained import METADATA_KEY, load_pretrained
from opendit.config.checks import path_and_weight
from opendit.export.__main__ import main as export
from opendit.models.families.public_config import public_config
from opendit.models.finetuning import A, B, Lora
from opendit.models.zoo import build_model, model_config
from tests.models.families.oracles import ORACLES, inputs
from tests.sampling.small import write_lora

LOADERS = {
    "flux": "FluxLoraLoaderMixin",
    "z_image": "ZImageLoraLoaderMixin",
    "wan": "WanLoraLoaderMixin",
    "qwen_image": "QwenImageLoraLoaderMixin",
    "lumina2": "Lumina2LoraLoaderMixin",
    "flux2": "Flux2LoraLoaderMixin",
    "ltx": "LTXVideoLoraLoaderMixin",
    "sd3": "SD3LoraLoaderMixin",
    "cosmos2": None,  # the pipeline has no reader, but the network reads peft's names
}
FAMILIES = tuple(LOADERS)
ALPHA, RANK = 5.0, 2
LAYERS = ("qkv:3", "q", "kv:1", "proj", "fc1", "fc2:4", "adaLN_modulation.*")  # of runs on public models
# Layers under their authors' names, in the oracles' sizes: (rows, columns).
FLUX = {
    **{
        f"double_blocks.1.{stream}_{layer}": shape
        for stream in ("img", "txt")
        for layer, shape in {
            "attn.qkv": (72, 24), "attn.proj": (24, 24), "mlp.0": (96, 24), "mlp.2": (24, 96), "mod.lin": (144, 24)
        }.items()
    },
    "single_blocks.0.linear1": (168, 24),
    "single_blocks.2.linear2": (24, 120),
    "single_blocks.1.modulation.lin": (72, 24),
}  # fmt: skip
FLUX_AROUND = {
    "img_in": (24, 16), "txt_in": (24, 14), "time_in.in_layer": (24, 256), "time_in.out_layer": (24, 24),
    "vector_in.in_layer": (24, 10), "guidance_in.out_layer": (24, 24), "final_layer.linear": (16, 24),
    "final_layer.adaLN_modulation.1": (48, 24),
}  # fmt: skip
Z_IMAGE = {
    f"{stack}.{layer}": shape
    for stack in ("layers.0", "layers.1", "noise_refiner.1", "context_refiner.0")
    for layer, shape in {
        "attention.qkv": (108, 36), "attention.out": (36, 36), "feed_forward.w1": (96, 36), "feed_forward.w2": (36, 96)
    }.items()
} | {"layers.1.adaLN_modulation.0": (144, 36)}  # fmt: skip
Z_IMAGE_APART = {
    name.replace("qkv", f"to_{part}").replace("attention.out", "attention.to_out.0"): (36, 36)
    for name in Z_IMAGE
    for part in "qkv"
    if "attention" in name
}
WAN = {
    f"blocks.{block}.{kind}_attn.{part}": (28, 28) for block in (0, 1) for kind in ("self", "cross") for part in "qkvo"
}
WAN |= {f"blocks.{block}.ffn.{part}": shape for block in (0, 1) for part, shape in ((0, (36, 28)), (2, (28, 36)))}
WAN_AROUND = {
    "time_projection.1": (168, 28), "head.head": (16, 28), "text_embedding.0": (28, 10), "text_embedding.2": (28, 28)
}  # fmt: skip
LUMINA2 = {  # diffusers reads such files only with all layers of the blocks
    f"{stack}.{block}.{layer}": shape
    for stack in ("layers", "noise_refiner", "context_refiner")
    for block in (0, 1)
    for layer, shape in {
        "attention.qkv": (96, 48), "attention.out": (48, 48), "feed_forward.w1": (200, 48),
        "feed_forward.w2": (48, 200), "feed_forward.w3": (200, 48), "adaLN_modulation.1": (192, 48),
    }.items()
    if (stack, layer) != ("context_refiner", "adaLN_modulation.1")
}  # fmt: skip
LTX = {
    f"transformer_blocks.{block}.{layer}": shape
    for block in (0, 1)
    for layer, shape in {
        "attn1.to_q": (20, 20), "attn1.to_v": (20, 20), "attn2.to_k": (20, 20), "attn2.to_out.0": (20, 20),
        "ff.net.0.proj": (80, 20), "ff.net.2": (20, 80),
    }.items()
} | {"proj_in": (20, 6), "time_embed.linear": (120, 20)}  # fmt: skip
ATTENTION = {
    f"transformer_blocks.0.attn.{part}": (24, 24) for part in ("to_q", "to_v", "to_out.0", "add_k_proj", "to_add_out")
}
QWEN_IMAGE = ATTENTION | {
    f"transformer_blocks.0.{layer}": shape
    for layer, shape in {
        "img_mlp.net.0.proj": (96, 24), "txt_mlp.net.2": (24, 96), "img_mod.1": (144, 24), "attn.add_q_proj": (24, 24)
    }.items()
}  # fmt: skip
QWEN_AROUND = {"img_in": (24, 16), "txt_in": (24, 14), "norm_out.linear": (48, 24), "proj_out": (16, 24)}
FLUX2 = {
    **{
        f"double_blocks.1.{stream}_{layer}": shape
        for stream in ("img", "txt")
        for layer, shape in {"attn.qkv": (96, 32), "attn.proj": (32, 32), "mlp.0": (160, 32), "mlp.2": (32, 80)}.items()
    },
    "single_blocks.0.linear1": (256, 32),
    "single_blocks.2.linear2": (32, 112),
}
FLUX2_AROUND = {"img_in": (32, 8), "txt_in": (32, 14), "time_in.out_layer": (32, 32), "final_layer.linear": (8, 32)}
FLUX2_SHARED = {"double_stream_modulation_img.lin": (192, 32), "guidance_in.in_layer": (32, 16)}
W3 = {"layers.0.feed_forward.w3": (96, 36)}
PROJ_OUT = {"single_transformer_blocks.1.proj_out": (24, 120)}
KOHYA, NEW, DOTS = ("lora_down", "lora_up"), ("lora_A", "lora_B"), ("lora.down", "lora.up")
# family, prefix, whether names have _ for dots, endings, layers with alphas, layers without
FOREIGN = {
    "flux, kohya": ("flux", "lora_unet_", True, KOHYA, FLUX, FLUX_AROUND),
    "flux, ComfyUI": ("flux", "diffusion_model.", False, KOHYA, FLUX, {}),
    "flux, diffusers' names by kohya": ("flux", "lora_transformer_", True, KOHYA, ATTENTION, {}),
    "flux, diffusers": ("flux", "transformer.", False, NEW, {}, ATTENTION | PROJ_OUT),
    "z_image, kohya": ("z_image", "lora_unet_", True, KOHYA, Z_IMAGE, {"cap_embedder.1": (36, 14)}),
    "z_image, ComfyUI": ("z_image", "diffusion_model.", False, NEW, Z_IMAGE_APART, W3),
    "z_image, dots": ("z_image", "", False, DOTS, Z_IMAGE_APART, {}),
    "qwen_image, musubi": ("qwen_image", "lora_unet_", True, KOHYA, QWEN_IMAGE, QWEN_AROUND),
    "qwen_image, ComfyUI": ("qwen_image", "diffusion_model.", False, NEW, QWEN_IMAGE, {}),
    "flux2, kohya": ("flux2", "lora_unet_", True, KOHYA, FLUX2, FLUX2_AROUND),
    "flux2, ComfyUI": ("flux2", "diffusion_model.", False, NEW, {}, FLUX2 | FLUX2_AROUND | FLUX2_SHARED),
    "wan, musubi": ("wan", "lora_unet_", True, KOHYA, WAN, {}),
    "wan, ComfyUI": ("wan", "diffusion_model.", False, NEW, WAN, WAN_AROUND),
    "ltx, ComfyUI": ("ltx", "diffusion_model.", False, NEW, {}, LTX),
    "lumina2, ComfyUI": ("lumina2", "diffusion_model.", False, NEW, {}, LUMINA2),
}  # fmt: skip


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """Return each family's tiny diffusers network with random parameters, and the folder where it is stored."""
    found = {}
    for name in FAMILIES:
        oracle = ORACLES[name](torch.float32)
        folder = tmp_path_factory.mktemp("bases") / name
        oracle.module.save_pretrained(folder / "transformer")
        found[name] = oracle, folder
    return found


@pytest.fixture
def narrow(monkeypatch):
    """Let diffusers split the oracles' layers; its readers contain the sizes of published models."""
    for name, sizes, ours in (
        ("_convert_kohya_flux_lora_to_diffusers", "[3072, 3072, 3072, 12288]", "[24, 24, 24, 96]"),
        ("_convert_non_diffusers_lumina2_lora_to_diffusers", "[2304, 768, 768]", "[48, 24, 24]"),
    ):
        text = inspect.getsource(getattr(lora_conversion_utils, name))
        assert sizes in text
        space = dict(vars(lora_conversion_utils))
        exec(text.replace(sizes, ours), space)
        monkeypatch.setattr(lora_pipeline, name, space[name])


def readable(file, family):
    """Return a file in a form that the pipeline's reader accepts.

    FLUX.2's reader takes all files with lora_down for kohya's, so ComfyUI's are converted to other names with alphas
    multiplied in.
    """
    state = load_file(file)
    if family != "flux2" or not any(re.match(r"diffusion_model.*lora_down", key) for key in state):
        return str(file)
    found = {}
    for key, part in state.items():
        layer, _, end = key.partition(".lora_")
        if end == "down.weight":
            found[f"{layer}.lora_A.weight"] = part * state[f"{layer}.alpha"] / len(part)
        elif end:
            found[f"{layer}.lora_B.weight"] = part
    return found


@contextlib.contextmanager
def added(oracle, files):
    """Add LoRA files with weights to diffusers' network, with the pipelines' own reader and set_adapters."""
    for number, (file, _) in enumerate(files):
        if LOADERS[oracle.family] is None:
            oracle.module.load_lora_adapter(load_file(file), prefix="transformer", adapter_name=f"a{number}")
            continue
        loader = getattr(lora_pipeline, LOADERS[oracle.family])
        state, *_, metadata = loader.lora_state_dict(readable(file, oracle.family), return_lora_metadata=True)
        # FLUX.1's reader omits the prefix for layers outside the blocks, and its loader then ignores them.
        state = {key if key.startswith("transformer.") else f"transformer.{key}": part for key, part in state.items()}
        oracle.module.load_lora_adapter(state, prefix="transformer", adapter_name=f"a{number}", metadata=metadata)
    oracle.module.set_adapters([f"a{number}" for number in range(len(files))], [weight for _, weight in files])
    yield
    oracle.module.unload_lora()


@torch.no_grad()
def check_same_outputs(oracle, folder, loras, files):
    """Check that OpenDiT's network with ``loras`` and diffusers' with ``files`` have equal outputs."""
    given = inputs(oracle, torch.float32, [3, 5], padded=5)
    plain = oracle.theirs(given.x, given.t, given.y)
    with added(oracle, files):
        expected = oracle.theirs(given.x, given.t, given.y)
    model, _ = load_pretrained(folder, lora=loras, notes=[])
    assert (model(given.x, given.t, given.y) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected - plain).abs().max() > 1e-2


def write_run(path, folder, config, name, seed=0, full=()):
    """Write a random file like that of a run with --lora; ``full`` names layers trained completely."""
    lora = Lora(RANK, ALPHA, str(folder), LAYERS if name != "DiT-Ti/2" else ())
    return write_lora(path, lora, config, name, seed, full)


def public_run(oracle, folder, path, seed=0, max_tokens=None):
    values = json.loads((folder / "transformer/config.json").read_text()) | {"_diffusers_version": "0.1"}
    config = public_config(oracle.family, values, oracle.shape[1:], max_tokens)
    return write_run(path, folder, config, f"{oracle.family}/{oracle.family}", seed)


def foreign(form, seed=0):
    """Return a random LoRA file from FOREIGN, with layers of different ranks."""
    family, prefix, flat, endings, with_alphas, without = FOREIGN[form]
    generator, found = torch.Generator().manual_seed(seed), {}
    for number, (layer, (rows, columns)) in enumerate({**with_alphas, **without}.items()):
        key, rank = prefix + (layer.replace(".", "_") if flat else layer), 1 + number % 5
        found[f"{key}.{endings[0]}.weight"] = torch.randn(rank, columns, generator=generator) / 4
        found[f"{key}.{endings[1]}.weight"] = torch.randn(rows, rank, generator=generator) / 4
        if layer in with_alphas:
            found[f"{key}.alpha"] = torch.tensor(1.5 + number % 3)
    return family, found


@pytest.mark.parametrize("to", ["lora", "diffusers"])
def test_the_length_of_captions_that_a_run_shortened_is_exported(oracles, to, tmp_path, capsys):
    oracle, folder = oracles["flux"]
    run, output = public_run(oracle, folder, tmp_path / "run.safetensors", max_tokens=77), tmp_path / "out.safetensors"
    export([to, "--ckpt", str(run), "--base", str(folder), "--output", str(output)])
    file = output if to == "lora" else next(output.glob("transformer/*.safetensors"))
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["max_sequence_length"] == "77"
    assert "give diffusers' pipeline max_sequence_length=77" in capsys.readouterr().out
    if to == "lora":  # sampling then uses captions of that length, like the run
        model, weights = load_pretrained(folder, lora=[(output, 1.0)], notes=[])
        assert model.config.text.max_tokens == weights.config.text.max_tokens == 77
        assert load_pretrained(folder)[0].config.text.max_tokens == 512


ONLY_DIFFUSERS = ("lumina2", "ltx", "sd3", "cosmos2")  # diffusers' readers for these families refuse lora_down


@pytest.mark.parametrize("form", ["diffusers", "comfyui", "kohya"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_run_exports_is_what_diffusers_and_we_add(oracles, narrow, name, form, tmp_path, capsys):
    oracle, folder = oracles[name]
    run, file = public_run(oracle, folder, tmp_path / "run.safetensors"), tmp_path / "style.safetensors"
    export(["lora", "--ckpt", str(run), "--format", form, "--output", str(file)])
    told = capsys.readouterr().out
    reads = form == "diffusers" or (name not in ONLY_DIFFUSERS and (name, form) != ("flux2", "comfyui"))
    if reads or name == "flux2":
        check_same_outputs(oracle, folder, [(run, 1.0)], [(file, 1.0)])
    method = "transformer.load_lora_adapter" if name == "cosmos2" else "load_lora_weights"
    assert (f"diffusers reads it by pipeline.{method}('{file}')" if reads else "diffusers needs --format") in told
    ours, again = (load_pretrained(folder, lora=[(path, 1.0)])[0] for path in (run, file))
    for (key, one), other in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert (one - other).abs().max() <= 2e-6 * one.abs().max(), key
    with safe_open(file, "pt") as opened:
        metadata, keys = opened.metadata(), set(opened.keys())
    assert "max_sequence_length" not in metadata
    assert metadata["base"] == name and metadata["modelspec.architecture"].endswith("/lora")
    alphas = {key for key in keys if key.endswith(".alpha")}
    assert bool(alphas) == (form != "diffusers") == (metadata.get("ss_network_alpha") == "5")
    first = {
        "diffusers": "transformer.", "comfyui": "diffusion_model.", "kohya": "lora_unet_"
    }[form] + {  # fmt: skip
        "flux": "double_blocks.0.img_attn.qkv", "wan": "blocks.0.self_attn.q", "z_image": "layers.0.attention.qkv",
        "qwen_image": "transformer_blocks.0.attn.to_q", "lumina2": "layers.0.attention.qkv",
        "flux2": "double_blocks.0.img_attn.qkv", "ltx": "transformer_blocks.0.attn1.to_q",
        "sd3": "joint_blocks.0.x_block.attn.qkv", "cosmos2": "blocks.0.self_attn.q_proj",
    }[name].replace(".", "_" if form == "kohya" else ".")  # fmt: skip
    original = form == "kohya" or (form == "comfyui" and name != "z_image")  # Qwen-Image has one set of names
    assert (f"{first}.lora_down.weight" in keys) == original
    assert ("ComfyUI" in told) == (form == "comfyui")


@pytest.mark.parametrize("form", FOREIGN)
def test_files_of_others_draw_as_in_diffusers(oracles, narrow, form, tmp_path):
    name, state = foreign(form)
    save_file(state, file := tmp_path / "style.safetensors")
    check_same_outputs(*oracles[name], [(file, 1.0)], [(file, 1.0)])


def test_other_spellings_are_the_same_file(oracles, tmp_path):
    """These spellings are unknown to diffusers: fused layers with dots, and peft's prefix and adapter name."""
    name, state = foreign("z_image, kohya")
    dotted = {layer.replace(".", "_"): layer for layer in (*Z_IMAGE, "cap_embedder.1")}
    models = []
    for prefix, down, up in (
        (None, *KOHYA),
        ("diffusion_model.", *KOHYA),
        ("base_model.model.", "lora_A.default", "lora_B.default"),
        ("", *NEW),
    ):
        spelled = {}
        for key, part in state.items():
            layer, ending = key.split(".", 1)
            layer = layer if prefix is None else prefix + dotted[layer.removeprefix("lora_unet_")]
            spelled[f"{layer}.{ending.replace('lora_down', down).replace('lora_up', up)}"] = part
        save_file(spelled, file := tmp_path / "style.safetensors")
        models.append(load_pretrained(oracles[name][1], lora=[(file, 1.0)])[0])
    for key, parameter in models[0].named_parameters():
        assert all(torch.equal(parameter, model.get_parameter(key)) for model in models[1:]), key


@pytest.mark.parametrize("rslora", [False, True])
def test_alphas_in_metadata_are_taken_as_diffusers_takes_them(oracles, tmp_path, rslora):
    name, state = foreign("flux, diffusers")
    ranks = {
        key.split(".lora_B")[0].removeprefix("transformer."): part.shape[1]
        for key, part in state.items()
        if "lora_B" in key
    }
    about = {"r": 4, "lora_alpha": 3, "rank_pattern": ranks, "use_rslora": rslora, "target_modules": [*ranks],
             "alpha_pattern": {"transformer_blocks.0.attn.to_v": 7.5}}  # fmt: skip
    metadata = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in about.items()})}
    save_file(state, file := tmp_path / "style.safetensors", metadata)
    check_same_outputs(*oracles[name], [(file, 1.0)], [(file, 1.0)])


def test_a_folder_of_peft_has_the_alpha_of_its_configuration(oracles, tmp_path):
    """The reference is peft, which merges its own folder into diffusers' network."""
    oracle, folder = oracles["z_image"]
    base = type(oracle.module).from_pretrained(folder / "transformer")
    how = dict(r=2, lora_alpha=7, alpha_pattern={"w1": 3}, target_modules=["to_q", "w1"], init_lora_weights=False)
    peft.get_peft_model(base, peft.LoraConfig(**how)).save_pretrained(tmp_path / "style")
    again = peft.PeftModel.from_pretrained(
        type(oracle.module).from_pretrained(folder / "transformer"), tmp_path / "style"
    )
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged/transformer")
    ours, theirs = (
        dict(load_pretrained(path, lora=loras)[0].named_parameters())
        for path, loras in ((folder, [(tmp_path / "style", 1.0)]), (tmp_path / "merged", []))
    )
    plain = dict(load_pretrained(folder)[0].named_parameters())
    for key, parameter in ours.items():
        assert (parameter - theirs[key]).abs().max() <= 1e-5 * theirs[key].abs().max(), key
    assert sum(not torch.equal(plain[key], parameter) for key, parameter in ours.items()) >= 4
    (tmp_path / "style/adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="adapter_config.json is not JSON"):
        load_pretrained(folder, lora=[(tmp_path / "style", 1.0)])


@pytest.mark.parametrize(
    ("name", "form"), [("flux", "flux, ComfyUI"), ("z_image", "z_image, kohya"), ("wan", "wan, musubi")]
)
def test_weighted_loras_are_those_of_set_adapters(oracles, narrow, name, form, tmp_path):
    oracle, folder = oracles[name]
    run, file, style = (
        public_run(oracle, folder, tmp_path / "run.safetensors"),
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
    )
    export(["lora", "--ckpt", str(run), "--output", str(file)])
    save_file(foreign(form)[1], style)
    check_same_outputs(oracle, folder, [(run, 0.8), (style, -0.5)], [(file, 0.8), (style, -0.5)])
    # a run given as the model itself, with another LoRA added
    one, two = (dict(load_pretrained(path, lora=loras)[0].named_parameters())
                for path, loras in ((run, [(style, 0.5)]), (folder, [(style, 0.5), (run, 1.0)])))  # fmt: skip
    assert all((one[key] - two[key]).abs().max() <= 1e-6 * one[key].abs().max() for key in one)


def our_base(path, classes=3):
    config = model_config("DiT-Ti/2", input_size=(4, 4), in_channels=3, num_classes=classes)
    model = build_model(config, seed=0)
    save_file(
        model.state_dict(),
        path,
        {METADATA_KEY: json.dumps({"model": "DiT-Ti/2", "config": config.to_dict(), "vae": "none", "image_size": 4})},
    )
    return config, dict(model.named_parameters())


TABLE = "y_embedder.embedding_table.weight"


def test_several_runs_of_our_own_models_are_added_with_their_weights(tmp_path, capsys):
    config, weights = our_base(base := tmp_path / "base.safetensors")
    more = replace(config, num_classes=5)
    one = write_run(tmp_path / "1.safetensors", base, config, "DiT-Ti/2", 1)
    two = write_run(tmp_path / "2.safetensors", base, more, "DiT-Ti/2", 2, (TABLE,))
    with pytest.raises(SystemExit):
        export(["lora", "--ckpt", str(one), "--output", str(tmp_path / "style.safetensors")])
    assert "is of one of our own models, which no other program loads LoRAs into; draw" in capsys.readouterr().err
    model, found = load_pretrained(base, lora=[(one, 0.5), (two, 2.0)])
    states, changed = [load_file(path) for path in (one, two)], 0
    assert model.config.num_classes == 5 and torch.equal(dict(model.named_parameters())[TABLE], states[1][TABLE])
    for name, parameter in model.named_parameters():
        layer, expected = name.removesuffix(".weight"), weights[name].double()
        if layer + A in states[0]:
            for state, weight in zip(states, (0.5, 2.0), strict=True):
                expected = expected + weight * ALPHA / RANK * state[layer + B].double() @ state[layer + A].double()
            changed += 1
        assert name == TABLE or torch.allclose(parameter.double(), expected, rtol=1e-5, atol=1e-6), name
    assert changed == 4 * config.depth and found.path == two
    pipe = opendit.load(base, lora=[f"{one}:0.5", (str(two), 2)], vae="none")
    assert all(
        torch.equal(parameter, dict(model.named_parameters())[name])
        for name, parameter in pipe.model.named_parameters()
    )
    with pytest.raises(ValueError, match="trained whole layers .*; leave one out"):
        load_pretrained(base, lora=[(two, 1.0), (two, 0.5)])
    save_file({"blocks.0.attn.qkv.lora_A.weight": torch.ones(1, 128)}, other := tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is no public model; give a run"):
        load_pretrained(base, lora=[(other, 1.0)])
    with pytest.raises(ValueError, match="lora .*: its weight nan is out of range; give one from"):
        opendit.load(base, lora=[(one, math.nan)])


def test_a_weight_is_what_follows_the_last_colon_of_no_path(tmp_path):
    (tmp_path / "a:0.5").touch()
    texts = ("RUN", "RUN:0.8", "RUN:-1e-1", "a:b", f"{tmp_path}/a:0.5", f"{tmp_path}/a:0.5:2")
    expected = (("RUN", 1), ("RUN", 0.8), ("RUN", -0.1), ("a:b", 1), (f"{tmp_path}/a:0.5", 1), (f"{tmp_path}/a:0.5", 2))
    assert tuple(map(path_and_weight, texts)) == expected


def refused(oracles, path, state, family="flux", metadata=None, notes=None):
    save_file(state, path, metadata)
    with pytest.raises(ValueError) as raised:
        load_pretrained(oracles[family][1], lora=[(path, 1.0)], notes=notes)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: {k + ".dora_scale": torch.ones(24, 1)}, "qkv.dora_scale belongs to DoRA, which is not read"),
        (lambda k: {f"{k}.lokr_w{n}": torch.ones(2, 2) for n in (1, 2)},
         r"2 keys \(.*lokr_w1, ...\) belong to LyCORIS \(LoKr\)"),
        (lambda k: {k + ".hada_w1_a": torch.ones(2, 2)}, r"belongs to LyCORIS \(LoHa\)"),
        (lambda k: {k + ".diff_b": torch.ones(72)}, "belongs to whole differences of weights"),
        (lambda k: {k + ".lora_up.bias": torch.ones(72)}, "lora_up.bias belongs to no layer of .*flux; a LoRA of this"),
        (lambda k: {"transformer.transformer_blocks.1.attn.to_k.lora_A.weight": torch.ones(1, 24),
                    "transformer.transformer_blocks.1.attn.to_k.lora_B.weight": torch.ones(24, 1)},
         "transformer_blocks.1.attn.to_k.weight is there twice, alone and joined with others"),
        (lambda k: {k.replace("diffusion_model.", "") + ".lora_down.weight": torch.ones(2, 24)},
         "has its A twice, under two names"),
        (lambda k: {k + ".alpha": torch.ones(2)}, "alpha is not one number"),
    ],
    ids=["DoRA", "LoKr", "LoHa", "difference", "bias", "joined and alone", "two names", "alpha"],
)  # fmt: skip
def test_what_is_no_plain_lora_is_refused(oracles, change, message, tmp_path):
    key = "diffusion_model.double_blocks.1.img_attn.qkv"
    text = refused(oracles, tmp_path / "a.safetensors", foreign("flux, ComfyUI")[1] | change(key))
    assert re.search(message, text), text


def test_files_that_do_not_fit_are_refused(oracles, tmp_path):
    path, state = tmp_path / "a.safetensors", foreign("flux, ComfyUI")[1]
    said = refused(oracles, path, state, "z_image", {"ss_base_model_version": "flux1"})
    assert "belong to no layer of" in said and said.endswith(
        "a LoRA of this model is needed (this one was trained on 'flux1')"
    )
    half = {key: part for key, part in state.items() if "lora_up" not in key}
    assert "has one matrix of a LoRA without the other" in refused(oracles, path, half)
    cut = {key: part[:, :-1].contiguous() if part.dim() == 2 else part for key, part in state.items()}
    said = refused(oracles, path, cut, metadata={"base": "FLUX.2-klein-4B"})
    assert "which do not make [24, 24]; a LoRA of this" in said and "trained on 'FLUX.2-klein-4B'" in said
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="a.safetensors is a pointer of Git LFS, not the file itself"):
        load_pretrained(oracles["flux"][1], lora=[(path, 1.0)])
    path.write_bytes(b"\n<!DOCTYPE html><html><body>Log in</body></html>")
    with pytest.raises(ValueError, match="a.safetensors is a web page, saved instead of the file"):
        load_pretrained(oracles["flux"][1], lora=[(path, 1.0)])
    save_file(state, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="a.safetensors is not a readable safetensors file"):
        load_pretrained(oracles["flux"][1], lora=[(path, 1.0)])


def test_a_run_of_another_model_is_refused_by_its_name(oracles, tmp_path):
    run = public_run(*oracles["z_image"], tmp_path / "run.safetensors")
    with pytest.raises(
        ValueError, match="was trained on 'z_image/z_image', .*flux is another model .*family flux there"
    ):
        load_pretrained(oracles["flux"][1], lora=[(run, 1.0)])


def test_a_run_on_a_model_with_guidance_is_added_to_one_without(oracles, tmp_path):
    """FLUX.1-schnell takes LoRAs made for FLUX.1-dev and keeps its own configuration."""
    oracle, folder = oracles["flux"]
    values = json.loads((folder / "transformer/config.json").read_text())
    theirs = FluxTransformer2DModel.from_config(values | {"guidance_embeds": not values["guidance_embeds"]})
    missing, _ = theirs.load_state_dict(oracle.module.state_dict(), strict=False)
    assert all("guidance_embedder" in name for name in missing)
    theirs.save_pretrained(tmp_path / "other/transformer")
    run = public_run(oracle, folder, tmp_path / "run.safetensors", max_tokens=77)
    model, weights = load_pretrained(tmp_path / "other", lora=[(run, 1.0)])
    whole, _ = load_pretrained(folder, lora=[(run, 1.0)])
    assert weights.path == load_pretrained(tmp_path / "other")[1].path
    assert model.config.spec.guidance == (not whole.config.spec.guidance)
    wanted, found = whole.state_dict(), model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in found.keys() & wanted.keys() if "blocks" in name)
    plain = load_pretrained(folder)[0].state_dict()
    assert sum(not torch.equal(found[name], plain[name]) for name in plain if "attn" in name) > 3


def test_a_lora_of_a_text_encoder_is_named_and_left_out(oracles, tmp_path):
    path, state = tmp_path / "a.safetensors", foreign("flux, kohya")[1]
    text = {"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(1, 4)}
    text |= {"text_encoders.clip_l.transformer.text_model.alpha": torch.ones(())}
    save_file(state | text, path)
    notes: list[str] = []
    model, _ = load_pretrained(oracles["flux"][1], lora=[(path, 1.0)], notes=notes)
    (line,) = notes
    assert (
        "2 keys (lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight, ...) belong to a text encoder" in line
    )
    save_file(state, path)
    plain, _ = load_pretrained(oracles["flux"][1], lora=[(path, 1.0)])
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    assert "belong to no layer" in refused(oracles, path, state | text)  # there is no list for notes
    assert "belong to no layer" in refused(oracles, path, text, notes=notes)
