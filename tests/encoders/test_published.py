"""Text encoders and autoencoders of published pipelines match diffusers' own pipelines, on tiny folders."""

import json
import logging
import shutil

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import format_input
from safetensors.torch import load_file, save_file

from opendit.encoders.folder import PIPELINE_INDEX, check_index, transformers_model
from opendit.encoders.published_text import check_text, load_published_text, text_widths
from opendit.encoders.vae import module_fingerprint
from opendit.encoders.video_vae import codec_scale, video_geometry
from opendit.models.conditioning import TextCondition
from opendit.models.families import FAMILIES
from tests.encoders.published_folders import (
    CLIP_WIDTH,
    COMPONENTS,
    GEMMA_WIDTH,
    PIPELINES,
    PROJECTED,
    QWEN_WIDTH,
    T5_WIDTH,
    TRANSFORMERS,
    load_codec_of,
    open_pipeline,
    write_pipeline,
)
from tests.models.families.oracles import packed, unpacked

LONG = "a seven " * 400  # more than 512 tokens of every tokenizer
CAPTIONS = ["a seven moving left", "", LONG, "  It&amp;#39;s\n seven seven ", "zwei fünf"]
NAMES = pytest.mark.parametrize("name", list(FAMILIES))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write all pipelines and return name -> folder."""
    return {name: write_pipeline(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture(scope="module")
def pipelines(folders):
    """Return name -> pipeline, as diffusers loads it."""
    return {name: open_pipeline(folder, name) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def encoders(folders):
    return {name: load_published_text(folder, FAMILIES[name], device="cpu") for name, folder in folders.items()}


@torch.no_grad()
def expected(pipeline, captions, tokens=512):
    """Return the captions' tokens (a tensor or a list) and pooled vectors, or None, from diffusers' pipeline."""
    kind = type(pipeline).__name__
    if kind == "FluxPipeline":
        return pipeline.encode_prompt(list(captions), None, max_sequence_length=tokens)[:2]
    if kind.startswith("Flux2"):
        return pipeline.encode_prompt(list(captions), max_sequence_length=tokens)[0], None
    if kind == "QwenImagePipeline":
        found, mask = pipeline.encode_prompt(list(captions), max_sequence_length=tokens)
        lengths = [tokens if mask is None else int(row.sum()) for row in (mask if mask is not None else found)]
        return [row[:length] for row, length in zip(found, lengths, strict=True)], None
    if kind == "StableDiffusion3Pipeline":
        options = {"do_classifier_free_guidance": False, "max_sequence_length": tokens - 77}
        return pipeline.encode_prompt(list(captions), None, None, **options)[0:3:2]
    options = {"do_classifier_free_guidance": False, "max_sequence_length": tokens}
    found = pipeline.encode_prompt(list(captions), **options)
    if kind in ("Lumina2Pipeline", "LTXPipeline"):
        return [row[mask.bool()] for row, mask in zip(*found[:2], strict=True)], None
    return found[0], None


POOLED = {"flux": CLIP_WIDTH, "sd3": PROJECTED}  # family -> width of its pooled vector
# Family -> width of its tokens.
UNPADDED = {"z_image": QWEN_WIDTH, "lumina2": GEMMA_WIDTH, "qwen_image": QWEN_WIDTH, "ltx": T5_WIDTH}


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("captions", [CAPTIONS[:3], CAPTIONS[:1], [*CAPTIONS, *CAPTIONS[:2] * 6]])
@NAMES
def test_encode_is_diffusers(name, captions, encoders, pipelines):
    encoder, count = encoders[name], len(captions)
    got = encoder.encode(captions)
    want, pooled = expected(pipelines[name], captions, FAMILIES[name].text.tokens)
    assert isinstance(got, TextCondition) and got.mask.dtype == torch.bool and not got.tokens.requires_grad
    assert got.mask.shape == got.tokens.shape[:2] and len(got) == count and got.tokens.shape[2] == encoder.width
    if name in POOLED:
        assert got.pooled.shape == (count, POOLED[name]) and got.mask.all()
        assert got.tokens.shape == (count, encoder.max_tokens, T5_WIDTH)
        torch.testing.assert_close(got.pooled, pooled)
    else:
        assert got.pooled.shape == (count, 0)
    if name not in UNPADDED:
        torch.testing.assert_close(got.tokens, want, rtol=1e-5, atol=1e-6)
        return
    assert got.tokens.shape == (count, max(map(len, want)), UNPADDED[name])
    for row, tokens in enumerate(want):
        torch.testing.assert_close(got.tokens[row, : len(tokens)], tokens, rtol=1e-5, atol=1e-6)
        assert got.mask[row].tolist() == [True] * len(tokens) + [False] * (got.tokens.shape[1] - len(tokens))
        assert not got.tokens[row, len(tokens) :].any()


@NAMES
def test_counts_are_those_of_the_mask(name, encoders, pipelines):
    encoder = encoders[name]
    counts = encoder.count_tokens(CAPTIONS)
    assert counts[2] > 512 and encoder.count_tokens([]) == []
    if name.startswith("flux"):  # their mask includes padding
        found = attended(name, pipelines[name])
    elif name == "sd3":
        of_t5 = dict(padding="max_length", max_length=256, truncation=True)
        found = [
            77 + sum(token != 0 for token in row) for row in pipelines[name].tokenizer_3(CAPTIONS, **of_t5).input_ids
        ]
    else:
        found = encoder.encode(CAPTIONS).mask.sum(1).tolist()
    assert found == [min(count, encoder.max_tokens) for count in counts]


def test_lumina2_leads_away_from_bare_prompts(encoders, pipelines):
    """Lumina 2's negative prompts, even the empty one, do not get the instruction that comes before other prompts."""
    got = encoders["lumina2"].encode(CAPTIONS, away=True)
    with torch.no_grad():
        *_, want, mask = pipelines["lumina2"].encode_prompt(["a"] * len(CAPTIONS), negative_prompt=list(CAPTIONS))
    assert got.mask.sum(1).tolist() == mask.sum(1).tolist() and got.mask[1].sum() == 1
    longest = got.tokens.shape[1]
    torch.testing.assert_close(got.tokens, want[:, :longest] * mask[:, :longest, None], rtol=1e-5, atol=1e-6)
    assert torch.equal(got.mask, mask[:, :longest].bool())


def attended(name, pipeline):
    """Return how many tokens of CAPTIONS are not padding, counted as in the pipelines of FLUX."""
    how = {"padding": "max_length", "max_length": 512, "truncation": True}
    if name == "flux":
        ids = pipeline.tokenizer_2(CAPTIONS, **how).input_ids
        return [sum(token != 0 for token in row) for row in ids]
    if name == "flux2":
        how |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        messages = format_input(CAPTIONS, pipeline.system_message)
        return pipeline.tokenizer.apply_chat_template(messages, **how)["attention_mask"].sum(1).tolist()
    found = []
    for caption in CAPTIONS:
        message = [{"role": "user", "content": caption}]
        chat = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        text = pipeline.tokenizer.apply_chat_template(message, **chat)
        found.append(sum(pipeline.tokenizer(text, **how).attention_mask))
    return found


def test_wan_zeroes_padding(encoders):
    got = encoders["wan"].encode(CAPTIONS)
    assert got.tokens.shape == (5, 512, T5_WIDTH) and got.mask[1].sum() == 1  # the end token alone
    assert not got.tokens[~got.mask].any() and got.tokens[got.mask].any(-1).all()


def test_z_image_pads_to_the_longest_caption(encoders):
    encoder = encoders["z_image"]
    got, alone = encoder.encode(CAPTIONS[:2]), [encoder.encode([caption]) for caption in CAPTIONS[:2]]
    lengths = [y.tokens.shape[1] for y in alone]
    assert got.tokens.shape == (2, max(lengths), QWEN_WIDTH) and got.mask.sum(1).tolist() == lengths
    assert not got.tokens[~got.mask].any() and got.tokens[got.mask].any(-1).all() and min(lengths) < max(lengths)


@NAMES
def test_weights_in_bf16_are_diffusers(name, folders, encoders):
    """On a GPU weights are loaded in bf16, even those that transformers keeps in fp32 beside fp16."""
    reference = open_pipeline(folders[name], name, dtype=torch.bfloat16)
    for component, (_, class_name) in COMPONENTS[name].items():
        if component.startswith("text_encoder"):
            got = transformers_model(folders[name] / component, class_name, "model", torch.bfloat16).state_dict()
            for key, value in getattr(reference, component).state_dict().items():
                assert got[key].dtype == torch.bfloat16 and torch.equal(got[key], value)


def test_a_language_model_with_its_head(copy, encoders):
    """Some folders hold Qwen3 as Qwen3ForCausalLM, whose weights have a prefix and one more layer."""
    from transformers import Qwen3ForCausalLM

    folder = copy("z_image", PIPELINE_INDEX, text_encoder=["transformers", "Qwen3ForCausalLM"])
    body = encoders["z_image"].pipeline.text_encoder
    model = Qwen3ForCausalLM(body.config)
    model.model.load_state_dict(body.state_dict())
    model.save_pretrained(folder / "text_encoder")
    got, want = (
        encoder.encode(CAPTIONS)
        for encoder in (load_published_text(folder, FAMILIES["z_image"], device="cpu"), encoders["z_image"])
    )
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.mask, want.mask)


@NAMES
def test_the_folders_are_as_the_family_says(name, folders):
    """The tests' table was written from the published folders, not from the family's table."""
    family = FAMILIES[name]
    assert family.components == COMPONENTS[name]
    assert (family.pipelines[0], family.network) == (PIPELINES[name], TRANSFORMERS[name][0])
    check_index(folders[name], family)


@NAMES
def test_the_callers_list_stays(name, encoders):
    captions = list(CAPTIONS[:2])
    encoders[name].encode(captions)
    assert captions == CAPTIONS[:2]


def test_cut_captions_are_no_warning(encoders, caplog, capfd):
    for encoder in encoders.values():
        encoder.encode([LONG])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "truncated" not in capfd.readouterr().err


@NAMES
def test_fingerprints(name, encoders, folders):
    encoder = encoders[name]
    found = encoder.fingerprint()
    assert found == load_published_text(folders[name], FAMILIES[name], device="cpu").fingerprint()
    weight = next(encoder.pipeline.text_encoder.parameters())
    weight.data.mul_(2)
    assert encoder.fingerprint() != found
    weight.data.mul_(0.5)
    assert encoder.fingerprint() == found and module_fingerprint(encoder.pipeline.text_encoder) not in found


def test_widths_need_no_weights(folders):
    widths = {name: text_widths(folder, FAMILIES[name]) for name, folder in folders.items()}
    assert widths == {
        **{name: (T5_WIDTH, width) for name, width in POOLED.items()},
        "flux2": (3 * QWEN_WIDTH, 0),
        "flux2_klein": (3 * QWEN_WIDTH, 0),
        **dict.fromkeys(("wan", "cosmos2"), (T5_WIDTH, 0)),
        **{name: (width, 0) for name, width in UNPADDED.items()},
    }


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("flux", {"height": 64, "width": 64}),
        ("flux2", {"height": 64, "width": 64}),
        ("flux2_klein", {"height": 64, "width": 64}),
        ("z_image", {"height": 64, "width": 64, "guidance_scale": 3.0}),
        ("wan", {"height": 32, "width": 32, "num_frames": 5}),
        ("qwen_image", {"height": 64, "width": 64, "negative_prompt": " "}),
        ("lumina2", {"height": 64, "width": 64}),
        ("sd3", {"height": 64, "width": 64}),
        ("ltx", {"height": 64, "width": 64, "num_frames": 9}),
        ("cosmos2", {"height": 64, "width": 64}),
    ],
)
def test_diffusers_draws_with_the_folders(name, sizes, pipelines):
    """Check what other tests rely on: prompts, seeds and every step make a difference."""
    pipeline, drawn = pipelines[name], []
    pipeline.set_progress_bar_config(disable=True)
    runs = [("a seven", 0, 3), ("a seven", 0, 3), ("left", 0, 3), ("a seven", 1, 3), ("a seven", 0, 2)]
    for prompt, seed, steps in runs:
        generator = torch.Generator().manual_seed(seed)
        drawn.append(
            pipeline(prompt=prompt, num_inference_steps=steps, generator=generator, output_type="latent", **sizes)[0]
        )
    assert all(torch.as_tensor(latents).isfinite().all() for latents in drawn)
    assert torch.equal(drawn[0], drawn[1])
    assert all((drawn[0] - latents).abs().max() > 1e-3 for latents in drawn[2:])


# ---------------------------------------------------------------- latents

CLIPS = {"wan": (8, 4), "ltx": (32, 8)}  # pixels and frames of a latent value


def same(x):
    return x


# Functions between our tensors and those of diffusers' autoencoder: pixels to and from it, latents to and from it.
FORMS = {
    **dict.fromkeys(
        ("qwen_image", "cosmos2"),
        (lambda x: x.unsqueeze(2), lambda x: x.squeeze(2), lambda z: z.unsqueeze(2), lambda z: z.squeeze(2)),
    ),
    **dict.fromkeys(
        ("flux2", "flux2_klein"),
        (
            same,
            same,
            lambda z: unpacked(z.flatten(2).transpose(1, 2), (len(z), z.shape[1] // 4, *(2 * n for n in z.shape[2:]))),
            lambda z: packed(z).transpose(1, 2).reshape(len(z), -1, *(n // 2 for n in z.shape[2:])),
        ),
    ),
}
LATENTS = {
    "wan": (4, 2, 4, 6),
    "ltx": (4, 2, 4, 6),
    "flux2": (16, 4, 3),
    "flux2_klein": (16, 4, 3),
}  # latents of 64 x 48 pictures, or of clips


@NAMES
def test_vae_is_diffusers(name, folders, pipelines):
    codec, vae = load_codec_of(folders[name], FAMILIES[name]), pipelines[name].vae
    generator = torch.Generator().manual_seed(1)
    sizes = {"wan": (5, 32, 48), "ltx": (9, 128, 192)}.get(name, (64, 48))
    pixels = torch.rand(2, 3, *sizes, generator=generator) * 2 - 1
    framed, frame, as_theirs, as_ours = FORMS.get(name, (same, same, same, same))
    with torch.no_grad():
        posterior = vae.encode(framed(pixels)).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=generator)
    latents, z = codec.encode(pixels, as_ours(noise)), posterior.mean + posterior.std * noise
    if name == "ltx":
        mean, std = (x.view(1, -1, 1, 1, 1) for x in (vae.latents_mean, vae.latents_std))
        normalised, restored = (z - mean) / std, latents * std + mean
    elif name in ("wan", "qwen_image", "cosmos2"):  # the mean and the inverse deviation, as WanPipeline writes them
        mean, std = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
        normalised, restored = as_ours((z - mean) / std), as_theirs(latents) / (1 / std) + mean
    elif name.startswith("flux2"):
        mean, variance = (part.view(1, -1, 1, 1) for part in (vae.bn.running_mean, vae.bn.running_var))
        std = torch.sqrt(variance + vae.config.batch_norm_eps)
        normalised, restored = (as_ours(z) - mean) / std, as_theirs(latents * std + mean)
    else:
        shift, scale = vae.config.shift_factor, vae.config.scaling_factor
        normalised, restored = (z - shift) * scale, latents / scale + shift
    torch.testing.assert_close(latents, normalised, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(codec.sample(codec.moments(pixels), as_ours(noise)), latents, rtol=0, atol=0)
    with torch.no_grad():
        time = (torch.zeros(2),) if name == "ltx" else ()
        decoded = frame(vae.decode(restored, *time).sample.clamp(-1, 1))
    torch.testing.assert_close(codec.decode(latents), decoded, rtol=1e-4, atol=1e-4)
    assert latents.shape[1:] == LATENTS.get(name, (4, 8, 6)) and decoded.shape == pixels.shape


@NAMES
def test_vae_geometry_needs_no_weights(name, folders):
    vae = str(folders[name] / "vae")
    flux2 = name.startswith("flux2")
    assert video_geometry(vae, 3) == ((16, 16, 1) if flux2 else (4, *({"cosmos2": (8, 4)} | CLIPS).get(name, (8, 1))))
    scale, shift = codec_scale(vae)
    if flux2 or name in CLIPS or name in ("qwen_image", "cosmos2"):
        assert len(scale) == len(shift) == (16 if flux2 else 4)
        codec = load_codec_of(folders[name], FAMILIES[name])
        assert (scale, shift) == (codec.scaling_factor, codec.shift_factor)
    else:
        assert (scale, shift) == (0.3611, 0.1159)


# ---------------------------------------------------------------- what is wrong with a folder


@pytest.fixture
def copy(folders, tmp_path):
    """Return a copy of a folder without the network, with some values of a JSON file replaced or (None) removed."""

    def make(name, file="", **changes):
        folder = tmp_path / name
        shutil.copytree(folders[name], folder, ignore=shutil.ignore_patterns("transformer"))
        if file:
            values = json.loads((folder / file).read_text()) | changes
            values = {key: value for key, value in values.items() if value is not None}
            (folder / file).write_text(json.dumps(values))
        return folder

    return make


def message(kind, work, *arguments, **options):
    with pytest.raises(kind) as caught:
        work(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("flux", {"tokenizer_2": ["transformers", "T5Tokenizer"], "tokenizer": ["transformers", "CLIPTokenizerFast"]}),
        ("z_image", {"text_encoder": ["transformers", "Qwen3ForCausalLM"]}),
        ("wan", {"tokenizer": ["transformers", "T5Tokenizer"], "boundary_ratio": 0.9, "expand_timesteps": False}),
        ("lumina2", {"_class_name": "Lumina2Text2ImgPipeline", "tokenizer": ["transformers", "GemmaTokenizer"]}),
    ],
)
def test_classes_under_their_other_names(copy, name, changes):
    check_text(copy(name, PIPELINE_INDEX, **changes), FAMILIES[name])


@NAMES
def test_folders_that_diffusers_has_saved(name, pipelines, encoders, tmp_path):
    """transformers 5 writes other class names of tokenizers than the published folders have."""
    pipelines[name].save_pretrained(tmp_path)
    encoder = load_published_text(tmp_path, FAMILIES[name], device="cpu")
    assert encoder.fingerprint() == encoders[name].fingerprint()
    load_codec_of(tmp_path, FAMILIES[name])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"_class_name": "WanPipeline"}, "_class_name is 'WanPipeline', not FluxPipeline"),
        ({"text_encoder_2": ["evil", "T5EncoderModel"]}, "text_encoder_2 is 'evil', 'T5EncoderModel', not T5Enc"),
        ({"text_encoder": ["transformers", "CLIPModel"]}, "'CLIPModel', not CLIPTextModel of transformers"),
        ({"vae": ["diffusers", "AutoencoderKLWan"]}, "vae is 'diffusers', 'AutoencoderKLWan', not AutoencoderKL of"),
        ({"text_encoder_2": None}, "text_encoder_2 is null, not T5EncoderModel of transformers"),
        ({"tokenizer": "CLIPTokenizer"}, "tokenizer is 'CLIPTokenizer', not CLIPTokenizer of transformers"),
        ({"custom_pipelines": {"a": "b"}}, "names code to run"),
    ],
)
def test_the_index_is_compared(copy, changes, problem):
    folder = copy("flux", PIPELINE_INDEX, **changes)
    for check in (check_index, check_text):
        found = message(ValueError, check, folder, FAMILIES["flux"])
        assert problem in found and found.startswith(str(folder / PIPELINE_INDEX))


def test_no_folder(tmp_path):
    found = message(FileNotFoundError, load_published_text, tmp_path / "no", FAMILIES["wan"], device="cpu")
    assert found == f"{tmp_path / 'no' / PIPELINE_INDEX} doesn't exist; a folder of diffusers' WanPipeline has one"


@pytest.mark.parametrize(
    ("file", "changes", "problem"),
    [
        ("text_encoder/config.json", {"model_type": "llama"}, "model_type is 'llama', which is no Qwen3Model"),
        ("text_encoder/config.json", {"hidden_size": None}, "hidden_size is missing"),
        ("text_encoder/config.json", {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map names code to run"),
        ("text_encoder/config.json", {"quantization_config": {"a": 1}}, "quantization_config asks for a package"),
        ("text_encoder/config.json", {"head_dim": 1 << 30}, "head_dim is 1073741824: it should be less than"),
        (
            "text_encoder/config.json",
            {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
            "config.json describes 13,",
        ),
        ("text_encoder/config.json", {"vocab_size": 100}, "can't be loaded"),
        ("tokenizer/tokenizer_config.json", {"tokenizer_class": "EvilTokenizer"}, "tokenizer_class is 'EvilTokenizer'"),
        ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a", "b"]}}, "auto_map names code to run"),
    ],
)
def test_a_component_that_is_refused(copy, file, changes, problem):
    folder = copy("z_image", file, **changes)
    found = message(ValueError, load_published_text, folder, FAMILIES["z_image"], device="cpu")
    assert problem in found and found.startswith(str(folder / file.split("/")[0]))


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("text_encoder/config.json", "config.json doesn't exist; it describes a UMT5EncoderModel of transformers"),
        ("text_encoder/model.safetensors", "no model.safetensors in "),
        ("tokenizer/tokenizer.json", "has no tokenizer.json or vocab.json and merges.txt or spiece.model"),
        ("vae/config.json", "doesn't exist"),
        ("vae/diffusion_pytorch_model.safetensors", "no diffusion_pytorch_model.safetensors in "),
    ],
)
def test_a_file_that_is_missing(copy, file, problem):
    folder = copy("wan")
    (folder / file).unlink()
    check = load_codec_of if file.startswith("vae") else check_text
    found = message(FileNotFoundError, check, folder, FAMILIES["wan"])
    assert problem in found and str(folder / file.split("/")[0]) in found


def test_a_weight_that_is_missing(copy):
    folder = copy("z_image")
    path = folder / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    weights["layers.1.mlp.up_proj"] = weights.pop("layers.1.mlp.up_proj.weight")
    save_file(weights, path, {"format": "pt"})
    found = message(ValueError, load_published_text, folder, FAMILIES["z_image"], device="cpu")
    assert found == f"{folder / 'text_encoder'} can't be loaded (its weights lack layers.1.mlp.up_proj.weight)"


def test_damaged_weights(copy):
    folder = copy("wan")
    for file in ("text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors"):
        (folder / file).write_bytes((folder / file).read_bytes()[:-100])
        check = load_codec_of if file.startswith("vae") else check_text
        assert file.split("/")[1] in message(ValueError, check, folder, FAMILIES["wan"])


def test_pickles_and_adapters_are_refused(copy):
    folder = copy("flux")
    weights = folder / "text_encoder_2" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    assert "pickled weights are not read" in message(FileNotFoundError, check_text, folder, FAMILIES["flux"])
    weights.with_name("pytorch_model.bin").rename(weights)
    (folder / "text_encoder" / "adapter_config.json").write_text("{}")
    assert "is an adapter" in message(ValueError, check_text, folder, FAMILIES["flux"])


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("wan", {"latents_mean": [0.0] * 3}, "latents_mean has 3 numbers for 4 channels"),
        ("ltx", {"decoder_inject_noise": [True, False, False, False]}, "decoders that draw noise are not supported"),
    ],
)
def test_a_vae_of_another_family(copy, name, changes, problem):
    folder = copy(name, "vae/config.json", **changes)
    assert problem in message(ValueError, load_codec_of, folder, FAMILIES[name])


def test_the_tokenizer_fits_the_encoder(copy, folders):
    folder = copy("flux")
    shutil.rmtree(folder / "tokenizer_2")
    shutil.copytree(folders["flux"] / "tokenizer", folder / "tokenizer_2")
    found = message(ValueError, load_published_text, folder, FAMILIES["flux"], device="cpu")
    assert found.startswith(str(folder / "tokenizer_2")) and "can't be loaded" in found
