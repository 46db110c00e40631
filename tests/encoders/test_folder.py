"""Untrusted folders of text encoders and VAEs: no code in them is run, no adapter is merged, and no false value is
used."""

import json
import pickle
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from opendit.encoders import folder as folder_module
from opendit.encoders import load_codec, vae
from opendit.encoders.folder import lazy_module
from opendit.encoders.text import HUB, load_text_encoder, text_geometry
from opendit.encoders.vae import codec_geometry
from opendit.encoders.video_vae import load_video_codec
from tests.encoders.test_text import save_clip, save_t5
from tests.encoders.test_vae import small_vae

WEIGHTS = {"vae": "diffusion_pytorch_model.safetensors", "clip": "model.safetensors", "t5": "model.safetensors"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in WEIGHTS}
    small_vae().save_pretrained(made["vae"])
    save_clip(made["clip"])
    save_t5(made["t5"])
    return made


@pytest.fixture
def copy(originals, tmp_path):
    def of(name):
        return shutil.copytree(originals[name], tmp_path / name)

    return of


def load(folder):
    if folder.name == "vae":
        return load_codec(str(folder), channels=3, device="cpu")
    return load_text_encoder(str(folder), device="cpu")


def edit(path, **values):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: v for key, v in {**content, **values}.items() if v is not KeyError}))


def refusal(folder) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as stop:
        load(folder)
    message = str(stop.value)
    assert "\n" not in message and str(folder) in message and len(message) < 1500, message
    assert message.startswith("--vae " if folder.name == "vae" else "--text_encoder ")
    return message


class Evil:
    def __reduce__(self):
        return (open, ("evil-was-here", "w"))


@pytest.mark.parametrize(
    ("name", "file"),
    [*((name, "config.json") for name in WEIGHTS), *((n, "tokenizer_config.json") for n in ("clip", "t5"))],
)
def test_code_in_a_folder_is_not_run_and_nobody_is_asked(name, file, copy, monkeypatch):
    folder = copy(name)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (folder / "evil.py").write_text("open('evil-was-here', 'w')\nclass Evil: pass\n")
    names = dict.fromkeys(("AutoConfig", "AutoModel", "AutoTokenizer", "AutoencoderKL"), "evil.Evil")
    names["AutoTokenizer"] = ["evil.Evil", None] if file == "tokenizer_config.json" else "evil.Evil"
    edit(folder / file, auto_map=names)
    assert "auto_map names code to run" in refusal(folder)
    assert not (folder / "evil-was-here").exists()


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("clip", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config asks for a package"),
        ("vae", {"quantization_config": {"quant_method": "gguf"}}, "quantization_config asks for a package"),
        ("t5", {"transformers_weights": "../other.bin"}, "transformers_weights names another file"),
        ("clip", {"_attn_implementation": "kernels-community/flash-attn"}, "asks for other code than torch's"),
        ("clip", {"text_config": {"attn_implementation": "flash_attention_2"}}, "asks for other code than torch's"),
        ("clip", {"hidden_size": 10**9}, "hidden_size is 1000000000"),
        ("clip", {"hidden_size": 65536, "intermediate_size": 65536}, "describes .* weights, the folder's files hold"),
        ("clip", {"vocab_size": 4_000_000}, "describes .* weights, the folder's files hold"),
        ("clip", {"num_hidden_layers": 10**6}, "num_hidden_layers is"),
        ("clip", {"hidden_size": "24"}, "hidden_size is '24'"),
        ("clip", {"hidden_size": 25}, "can't be built|can't be loaded"),
        ("clip", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("clip", {"model_type": ["clip"]}, "model_type is a list"),
        ("clip", {"model_type": KeyError}, "of type null, not clip"),
        ("clip", {"text_config": [1]}, "text_config is a list"),
        ("t5", {"d_model": KeyError}, "no d_model"),
        ("t5", {"d_model": 10**7}, "d_model is 10000000"),
        ("t5", {"d_ff": 65536}, "describes .* weights, the folder's files hold"),
        ("t5", {"num_layers": -1}, "num_layers is -1"),
        ("vae", {"block_out_channels": [10**9]}, r"block_out_channels\[0\] is"),
        ("vae", {"block_out_channels": [8192] * 3}, "describes .* weights, the folder's files hold"),
        ("vae", {"block_out_channels": [8] * 1000}, "block_out_channels is a list of 1,000"),
        ("vae", {"block_out_channels": 8}, "block_out_channels is 8"),
        ("vae", {"block_out_channels": KeyError}, "no 'block_out_channels'"),
        ("vae", {"layers_per_block": 10**6}, "layers_per_block is"),
        ("vae", {"latent_channels": 0}, "latent_channels is 0"),
        ("vae", {"norm_num_groups": 0}, "norm_num_groups is 0"),
        ("vae", {"norm_num_groups": 3}, "can't be built|can't be loaded"),
        ("vae", {"down_block_types": ["Evil"] * 3}, "can't be built|can't be loaded"),
        ("vae", {"scaling_factor": 0}, "scaling_factor is 0"),
        ("vae", {"scaling_factor": -1.0}, "scaling_factor is -1"),
        ("vae", {"scaling_factor": "1"}, "scaling_factor is '1'"),
        ("vae", {"latents_mean": [0, 0], "latents_std": [1, 1]}, "latents_mean has 2 numbers for 4 channels"),
        ("vae", {"latents_std": [0, 1, 1, 1]}, r"latents_std\[0\] is 0"),
        ("vae", {"_class_name": 3}, "_class_name is 3"),
    ],
)
def test_a_configuration_that_lies_is_refused_before_a_model_is_made(name, values, reason, copy):
    folder = copy(name)
    edit(folder / "config.json", **values)
    started = time.monotonic()
    with pytest.raises(ValueError, match=reason):
        load(folder)
    assert refusal(folder) and time.monotonic() - started < 20
    if " weights, " not in reason and "can't" not in reason:  # the configuration alone is enough
        with pytest.raises(ValueError, match=reason):
            (codec_geometry if name == "vae" else lambda path, _: text_geometry(path))(str(folder), 3)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": NaN}', "[" * 100_000, '{"a": 1, "a": 2}', "\ud800"])
@pytest.mark.parametrize("name", ["vae", "clip"])
def test_a_configuration_that_is_no_strict_json(name, text, copy):
    folder = copy(name)
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "isn't the configuration of a" in refusal(folder)


@pytest.mark.parametrize("name", ["vae", "clip", "t5"])
def test_pickled_weights_are_not_read(name, copy, monkeypatch):
    folder = copy(name)
    monkeypatch.chdir(folder)
    stem = WEIGHTS[name].removesuffix(".safetensors").replace("model", "model" if name == "vae" else "pytorch_model")
    torch.save(load_file(folder / WEIGHTS[name]), folder / f"{stem}.bin")
    load(folder)  # ignored beside safetensors
    (folder / WEIGHTS[name]).unlink()
    (folder / f"{stem}.bin").write_bytes(pickle.dumps(Evil()))
    assert f"only {stem}.bin, and pickled weights are not read" in refusal(folder)
    assert not (folder / "evil-was-here").exists()


@pytest.mark.parametrize("name", ["vae", "clip", "t5"])
def test_adapters_are_not_picked_up(name, copy):
    folder = copy(name)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "someone/else", "r": 2, "target_modules": ["q"]})
    )
    assert "adapter_config.json is an adapter" in refusal(folder)


def test_an_index_of_weights_names_files_of_its_folder_only(copy):
    folder = copy("clip")
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    names = list(load_file(folder.parent / "model.safetensors"))
    for place in ("../model.safetensors", "/etc/passwd", "", ".hidden"):
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, place)}))
        assert "should be the plain name of a file in the same folder" in refusal(folder)
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "part.safetensors")}))
    assert "no part.safetensors" in refusal(folder)
    shutil.copy(folder.parent / "model.safetensors", folder / "part.safetensors")
    assert load(folder).width == 24
    shutil.copy(folder.parent / "model.safetensors", folder / "model.safetensors")
    assert "holds both" in refusal(folder)


def test_tokenizers_that_are_none_of_ours(copy):
    for value in ("EvilTokenizer", "BertTokenizer", 5, ["CLIPTokenizer"]):
        folder = copy("t5")
        edit(folder / "tokenizer_config.json", tokenizer_class=value)
        assert "tokenizer_class is" in refusal(folder)
        shutil.rmtree(folder)
    folder = copy("t5")
    for text in ("{", "{}", '{"version": "1.0", "model": {"type": "Unigram", "vocab": []}}', "\0" * 100):
        (folder / "tokenizer.json").write_text(text)
        assert "can't be loaded" in refusal(folder)


def test_a_tokenizer_of_more_tokens_than_the_weights_know(copy):
    folder = copy("t5")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] += [[f"word{i}", -3.0] for i in range(50)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "tokens up to" in refusal(folder)


def test_attention_is_torch_s_whatever_the_folder_says(copy):
    folder = copy("clip")
    edit(folder / "config.json", _attn_implementation="eager")
    encoder = load(folder)
    assert encoder.model.config._attn_implementation == "sdpa"
    assert load(copy("t5")).model.config._attn_implementation == "sdpa"


def test_weights_of_another_shape_or_name_are_not_made_up(copy):
    folder = copy("vae")
    state = load_file(folder / WEIGHTS["vae"])
    name = next(name for name in state if name.endswith("conv_in.weight"))
    save_file({**state, name: state[name].repeat(2, 1, 1, 1)}, folder / WEIGHTS["vae"], metadata={"format": "pt"})
    assert "can't be loaded" in refusal(folder)
    state["another"] = state.pop(name)
    save_file(state, folder / WEIGHTS["vae"], metadata={"format": "pt"})
    assert f"its weights lack {name}" in refusal(folder)
    with pytest.raises(ValueError, match="its weights lack"):
        load_video_codec(str(folder), channels=3, device="cpu")


@pytest.mark.parametrize(("hub", "names"), [(HUB, ("clip", "t5")), (vae.HUB, ("ema", "mse"))])
def test_the_hub_is_asked_for_a_commit_only(hub, names, monkeypatch):
    asked = []

    def download(repository, file, *, revision, local_files_only):
        asked.append((repository, revision))
        raise FileNotFoundError

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(folder_module, "probe_hub", lambda endpoint: None)
    for name in names:
        repository, commit = hub[name][:2]
        asked.clear()
        with pytest.raises(FileNotFoundError, match="couldn't be fetched"):
            load_text_encoder(name, device="cpu") if hub is HUB else load_codec(name, channels=3, device="cpu")
        assert set(asked) == {(repository, commit)} and len(asked) == 2 and len(commit) == 40


def test_a_library_that_replaces_its_module_is_imported_by_two_threads(tmp_path, monkeypatch):
    """diffusers and transformers replace their modules while being imported. An import statement in a second thread
    would return the module that is being replaced."""
    code = "import sys, time, types\ntime.sleep(0.5)\nsys.modules[__name__] = types.SimpleNamespace(it='is there')\n"
    (tmp_path / "replaces_its_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lazy_module, "replaces_its_module")
        while "replaces_its_module" not in sys.modules:
            time.sleep(0.01)
        second = threads.submit(lazy_module, "replaces_its_module")
    assert first.result().it == second.result().it == "is there"
    del sys.modules["replaces_its_module"]
