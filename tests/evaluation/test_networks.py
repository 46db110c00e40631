"""Feature networks: FID's Inception against torch-fidelity's, TorchScript, transformers' folders, and known files."""

import hashlib
import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from opendit.evaluation.inception import FIDInception
from opendit.evaluation.metrics import clip_scores
from opendit.evaluation.networks import (
    ScriptedInception,
    caption_embeddings,
    find_default,
    load_network,
    resize,
    spatial_features,
)
from tests.evaluation.small import (
    SMALL,
    Clips,
    Pictures,
    Plain,
    clip_folder,
    clips,
    fill,
    picture,
    pictures,
    script,
    write_folder,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inception(tmp_path_factory):
    network = FIDInception().eval()
    fill(network)
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(network.state_dict(), path)
    return path, network


def test_inception_is_torch_fidelity_s(inception):
    """The numbers come from torch-fidelity 0.4.0's FeatureExtractorInceptionV3 with these weights and pictures. The
    spatial ones come from its Mixed_6d.branch1x1, laid out in numpy: transpose(0, 2, 3, 1)[..., :7]."""
    network = load_network(inception[0], CPU)
    found = network(picture(40, 56))
    assert {name: tuple(f.shape) for name, f in found.items()} == {
        "pool": (2, 2048), "spatial": (2, 2023), "logits": (2, 1008)
    }  # fmt: skip
    assert found["pool"].mean(1).tolist() == pytest.approx([0.4357, 0.4353], abs=1e-4)
    assert found["pool"].std(1).tolist() == pytest.approx([0.6060, 0.6053], abs=1e-4)
    assert found["pool"][:, 1500].tolist() == pytest.approx([0.2194, 0.2196], abs=1e-4)
    expected = [[4.6304, 0.2888, -5.4347, 3.0306], [4.6299, 0.2871, -5.4242, 3.0195]]
    np.testing.assert_allclose(found["logits"][:, ::300], expected, atol=1e-3)
    expected = [[0, 0, 0.0596901, 1.3940144, 0.43695673, 0.81435597], [0, 0, 0.06412227, 1.363015, 0.4133478, 0.763279]]
    np.testing.assert_allclose(found["spatial"][:, ::400], expected, atol=1e-4)
    assert network.inception and not network.known and "SHA-256" in network.describe()


def test_tensorflow_s_filter_is_torch_fidelity_s():
    x = picture(40, 56).permute(0, 3, 1, 2).float()
    expected = [  # from interpolate_bilinear_2d_like_tensorflow1x
        [127.0000, 239.4247, 231.4381, 110.4515],
        [178.3914, 152.5357, 97.2495, 75.9877],
        [152.9228, 78.0735, 61.5696, 123.3994],
        [64.9330, 182.4795, 232.1661, 154.4872],
        [169.0734, 121.7260, 80.3015, 96.6673],
    ]
    np.testing.assert_allclose(resize(x, "tf")[0, 0, ::70, ::90], expected, atol=1e-3)
    assert torch.equal(resize(x, "tf", 40)[:, :, :, 7], resize(x[:, :, :, 9:], "tf", 40)[:, :, :, 0]) is False
    same = picture(299, 299).permute(0, 3, 1, 2).float()
    assert all(torch.allclose(resize(same, how), same, atol=1e-3) for how in ("tf", "torch", "clean"))


@pytest.mark.parametrize("size", [(64, 80), (500, 420)])
def test_clean_fid_s_filter_is_pillow_s(size):
    x = picture(*size, count=1)
    got = resize(x.permute(0, 3, 1, 2).float(), "clean")[0]
    for colour in range(3):  # clean-fid resizes each colour as a picture of floating-point numbers
        image = Image.fromarray(x[0, :, :, colour].numpy().astype(np.float32))
        expected = np.asarray(image.resize((299, 299), Image.Resampling.BICUBIC)).clip(0, 255)
        np.testing.assert_allclose(got[colour], expected, atol=1e-2)  # float32 rounds the positions


def test_filters_differ():
    x = picture(40, 56).permute(0, 3, 1, 2).float()
    found = [resize(x, how) for how in ("tf", "torch", "clean")]
    assert all((a - b).abs().mean() > 0.1 for a, b in zip(found, found[1:] + found[:1], strict=True))


class TensorFlowNames(torch.nn.Module):
    """The network in NVIDIA's layout, with its blocks in one sequence and TensorFlow's names."""

    def __init__(self, source: FIDInception):
        super().__init__()
        names = "conv conv_1 conv_2 pool0 conv_3 conv_4 pool1 mixed".split() + [f"mixed_{i}" for i in range(1, 11)]
        s = source
        pools = [torch.nn.MaxPool2d(3, stride=2) for _ in range(2)]
        blocks = [
            s.Conv2d_1a_3x3,
            s.Conv2d_2a_3x3,
            s.Conv2d_2b_3x3,
            pools[0],
            s.Conv2d_3b_1x1,
            s.Conv2d_4a_3x3,
            pools[1],
        ]
        blocks += [s.Mixed_5b, s.Mixed_5c, s.Mixed_5d, s.Mixed_6a, s.Mixed_6b, s.Mixed_6c, s.Mixed_6d, s.Mixed_6e]
        blocks += [s.Mixed_7a, s.Mixed_7b, s.Mixed_7c]
        self.layers = torch.nn.Sequential()
        for name, block in zip(names, blocks, strict=True):
            self.layers.add_module(name, block)
        self.layers.mixed_6.conv = s.Mixed_6d.branch1x1
        self.layers.add_module("pool2", torch.nn.AvgPool2d(8))
        self.output = torch.nn.Linear(2048, 1008)
        self.output.load_state_dict(s.fc.state_dict())


def test_the_scripted_inception_is_the_same(inception):
    network = FIDInception().eval()
    network.load_state_dict(inception[1].state_dict())
    layout = TensorFlowNames(network)
    assert ScriptedInception.fits(layout) and not ScriptedInception.fits(network)
    x = resize(picture(30, 20, 1).permute(0, 3, 1, 2).float(), "tf")
    with torch.no_grad():
        ours, theirs = inception[1](x), ScriptedInception(layout)(x)
    for name, features in ours.items():
        torch.testing.assert_close(theirs[name], features, rtol=1e-4, atol=1e-4)


def test_spatial_features_are_laid_out_as_adm_s():
    x = torch.arange(2 * 9 * 4 * 5.0).view(2, 9, 4, 5)
    expected = x.numpy().transpose(0, 2, 3, 1)[..., :7].reshape(2, -1)
    assert np.array_equal(spatial_features(x), expected)


# ------------------------------------------------------------------------------------------ TorchScript


def test_any_torchscript_of_pictures(tmp_path):
    network = load_network(pictures(tmp_path / "net.pt"), CPU)
    x = picture(8, 10, 3)
    expected = Pictures(12, 0)(x.permute(0, 3, 1, 2))
    for name, features in network(x).items():
        torch.testing.assert_close(features, expected[name])
    assert not network.inception and network.sha256 == hashlib.sha256((tmp_path / "net.pt").read_bytes()).hexdigest()
    plain = load_network(script(tmp_path / "plain.pt", Plain()), CPU)
    torch.testing.assert_close(plain(x)["pool"], x.permute(0, 3, 1, 2).float().mean(dim=(2, 3)))


def test_i3d_as_stylegan_v_calls_it(tmp_path):
    path = clips(tmp_path / "i3d.pt")
    x = picture(8, 10, 2 * 16).unflatten(0, (2, 16))
    got = load_network(path, CPU, clips=True)(x)["pool"]
    expected = Clips(6)(x.permute(0, 4, 1, 2, 3).float(), True, True, True)
    torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="network of clips; features of pictures need another"):
        load_network(path, CPU)


def test_what_is_no_network(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_network(tmp_path / "none.pt", CPU)
    (tmp_path / "words.pt").write_text("no weights")
    with pytest.raises(ValueError, match="holds neither TorchScript nor the weights of FID's Inception"):
        load_network(tmp_path / "words.pt", CPU)
    torch.save({"fc.weight": torch.ones(2, 2)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="neither TorchScript nor"):
        load_network(tmp_path / "other.pth", CPU)
    with pytest.raises(ValueError, match="no TorchScript module, as features of clips need"):
        load_network(tmp_path / "other.pth", CPU, clips=True)


def test_known_files_are_checked_by_name(tmp_path, monkeypatch):
    for name in ("i3d_torchscript.pt", "pt_inception-2015-12-05-6726825d.pth"):
        with pytest.raises(ValueError, match="SHA-256 .* the file of this name that figures rest on has"):
            load_network(pictures(tmp_path / name), CPU)
    path = pictures(tmp_path / "inception-2015-12-05.pt")  # no SHA-256 of it has been published
    assert not load_network(path, CPU).known
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    with pytest.raises(FileNotFoundError) as missing:
        find_default(False, "--features")
    said = str(missing.value)
    assert "fetch https://github.com/mseitzer/pytorch-fid" in said and str(tmp_path / "hub" / "checkpoints") in said
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    there = tmp_path / "hub" / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    there.touch()
    assert find_default(False, "--features") == there
    with pytest.raises(FileNotFoundError, match="i3d_torchscript"):
        find_default(True, "--video_features")


# ------------------------------------------------------------------------------------------ transformers


def test_dinov2_sees_what_its_preprocessor_says(tmp_path):
    torch.manual_seed(0)
    config = transformers.Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28)
    model = transformers.Dinov2Model(config).eval()
    mean, deviation = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    folder = write_folder(tmp_path / "dino", model, 28, image_mean=mean, image_std=deviation)
    x = picture(28, 28)
    network = load_network(folder, CPU)
    pixels = (x.permute(0, 3, 1, 2) / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(network(x)["pool"], model(pixel_values=pixels).pooler_output)
    assert network(picture(50, 40))["pool"].shape == (2, 16) and network.resize == "bicubic, 28"
    with pytest.raises(ValueError, match="network of pictures; features of clips"):
        load_network(folder, CPU, clips=True)
    before = network.sha256
    (folder / "preprocessor_config.json").write_text(json.dumps({"crop_size": 14}))
    assert load_network(folder, CPU).sha256 != before


def test_videomae_takes_clips_of_its_length(tmp_path):
    torch.manual_seed(0)
    config = transformers.VideoMAEConfig(**SMALL, image_size=16, patch_size=8, num_frames=4)
    model = transformers.VideoMAEModel(config).eval()
    folder = write_folder(tmp_path / "mae", model, 16, image_mean=[0, 0, 0], image_std=[1, 1, 1])
    network = load_network(folder, CPU, clips=True)
    x = picture(16, 16, 8).unflatten(0, (2, 4))
    with torch.no_grad():
        expected = model(pixel_values=x.permute(0, 1, 4, 2, 3) / 255).last_hidden_state.mean(dim=1)
    torch.testing.assert_close(network(x)["pool"], expected)
    with pytest.raises(ValueError, match="takes clips of 4 frames, not 2"):
        network(x[:, :2])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="holds a model of type 'bert', not clip"):
        load_network(tmp_path / "bad", CPU)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder, model = clip_folder(tmp_path_factory.mktemp("clip"))
    return folder, model, transformers.CLIPTokenizer.from_pretrained(folder)


def test_clip_score_is_transformers_similarity(clip):
    folder, model, tokenizer = clip
    x, captions = picture(16, 16, 3), ["a b", "c", "a b"]
    network = load_network(folder, CPU)
    words, cut = caption_embeddings(folder, captions, CPU)
    got = clip_scores(network(x)["pool"], words)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)))  # fmt: skip # noqa: E501
    given = tokenizer(captions, padding="max_length", max_length=8, return_tensors="pt")
    with torch.no_grad():
        output = model(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            pixel_values=(x.permute(0, 3, 1, 2) / 255 - mean) / deviation,
        )
    expected = 100 * (output.logits_per_image / model.logit_scale.exp()).diagonal().clamp_min(0)
    np.testing.assert_allclose(got, expected.detach(), atol=1e-4)
    assert got.max() > 0 and got[0] != got[2] and cut == [False, False, False]


def test_captions_that_are_cut_are_counted(clip):
    words, cut = caption_embeddings(clip[0], ["a b c d e f", "a b c d e f g", "a b c d e f h"], CPU)
    assert cut == [False, True, True]  # with begin and end, 8 tokens are read
    torch.testing.assert_close(words[1], words[2])


def test_a_clip_s_score_is_the_mean_over_its_frames():
    frames, words = torch.randn(4, 5, 3), torch.randn(4, 3)
    cos = torch.nn.functional.cosine_similarity(frames, words[:, None], dim=-1).clamp_min(0).mean(1)
    torch.testing.assert_close(clip_scores(frames, words).float(), 100 * cos)
