"""A VAE loaded while the weights are read: it is the same, gives the same errors, and is never a stranger's."""

import threading

import pytest
import torch

from opendit.checkpoint.pretrained import load_pretrained
from opendit.encoders.vae import PixelCodec, VAECodec
from opendit.encoders.video_vae import FrameCodec
from opendit.models.zoo import model_config
from opendit.sampling import model_loading as module
from opendit.sampling.model_loading import VaeLoader
from tests.encoders.test_vae import small_vae
from tests.sampling.small import write


def begin(path, vae: str | None) -> VaeLoader:
    loader = VaeLoader(torch.device("cpu"), "fp32")
    loader.begin(path, "ema", vae)
    return loader


@pytest.fixture(scope="module")
def vae(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("vae")
    small_vae(scaling_factor=0.3).save_pretrained(folder)
    return str(folder)


def weights(folder, **more):
    return write(folder / "w.safetensors", in_channels=4, **more)


def test_a_vae_that_was_begun_is_the_one_that_is_taken(tmp_path, vae, monkeypatch):
    threads, load = [], module.load_codec
    monkeypatch.setattr(
        module, "load_codec", lambda *a, **k: threads.append(threading.current_thread()) or load(*a, **k)
    )
    path = weights(tmp_path)
    loading = begin(path, vae)
    model, _ = load_pretrained(path)
    codec = loading.get(vae, model.config)
    assert isinstance(codec, VAECodec) and codec.scaling_factor == 0.3 and loading.work.seconds > 0
    assert loading.get(vae, model.config) is codec and [thread.name for thread in threads] == ["VAE"]
    assert isinstance(loading.get("none", model.config), PixelCodec)  # another VAE was chosen
    assert threads[1] is threading.main_thread()


def test_a_model_of_clips_gets_a_codec_of_clips(tmp_path, vae):
    path = weights(tmp_path, name="vDiT-Ti/222", frames=2)
    loading, config = begin(path, vae), load_pretrained(path)[0].config
    assert isinstance(loading.get(vae, config), FrameCodec) and loading.get(vae, config) is loading.work.result()
    pictures = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=4, num_classes=5)
    assert isinstance(loading.get(vae, pictures), VAECodec)  # other weights than expected


def test_metas_files_do_not_say_what_they_are_of(tmp_path, vae):
    model, _ = load_pretrained(weights(tmp_path))
    torch.save(model.state_dict(), tmp_path / "meta.pt")
    loading = begin(tmp_path / "meta.pt", vae)
    assert loading.work is not None and loading.get(vae, model.config) is loading.work.result()


def test_an_error_is_that_of_loading_it(tmp_path):
    path = weights(tmp_path)
    loading, config = begin(path, str(tmp_path / "nowhere")), load_pretrained(path)[0].config
    with pytest.raises(FileNotFoundError, match="--vae .*nowhere"):
        loading.get(str(tmp_path / "nowhere"), config)


@pytest.mark.parametrize("case", ["no file", "damaged", "a path that only the file names", "pixels"])
def test_nothing_is_begun(case, tmp_path, vae):
    path = weights(tmp_path, info={"vae": vae if "path" in case else "none" if case == "pixels" else "ema"})
    if case == "no file":
        path.unlink()
    elif case == "damaged":
        path.write_bytes(path.read_bytes()[:100])
    assert begin(path, None).work is None
