"""Fine-tuning: which pretrained weights are reused, and LoRA from training to sampling."""

import importlib
import json
import math
import re

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from scipy.stats import ks_2samp
from torch.func import functional_call

import sample
import train
from opendit.checkpoint.lora import Merged, of_run
from opendit.checkpoint.pretrained import METADATA_KEY, load_pretrained
from opendit.kernels import operations
from opendit.kernels.operations import MODULATE, NORM, SPLIT
from opendit.models import finetuning as lora_module
from opendit.models.conditioning import TextConfig, encode_bytes
from opendit.models.dit import DiT
from opendit.models.finetuning import A, B, Lora, add_lora, targets
from opendit.models.initialization import canonical_name, initialize
from opendit.models.layers import TORCH_OPS
from opendit.models.positions import sincos_position_table
from opendit.models.zoo import Weights, build_model, model_config
from tests.checkpoint.test_resume import assert_same_bits, losses, run_of, trainings
from tests.first_weights import taken_over
from tests.models.test_dit import randomised
from tests.numbers import off_by
from tests.ranks import run_ranks

SIZES = dict(input_size=(8, 8), in_channels=2)
TRAIN = "--model DiT-Ti/2 --image_size 8 --vae none --num_workers 0 --log_every 1 --lr 1e-2 --batch_size 4".split()
TRAIN += "--sample_steps 2 --sample_cfg_scale 1 --sample_every 0 --data_path digits".split()


def model(name: str = "DiT-Ti/2", seed: int = 0, **options) -> DiT:
    torch.manual_seed(seed)
    options = {"num_classes": 5, **SIZES, **options}
    return randomised(build_model(model_config(name, **options)), seed).eval()


def weights(of: DiT, tmp_path, **info) -> Weights:
    return Weights({name: value.clone() for name, value in of.state_dict().items()}, tmp_path / "w", info)


def inputs(of: DiT, batch: int = 3) -> tuple:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batch, of.config.in_channels, *of.config.input_size, generator=generator)
    return x, torch.tensor([3, 500, 990][:batch])


def test_the_same_model_is_taken_over_whole(tmp_path):
    old, new = model(), model(seed=1)
    done = taken_over(new, weights(old, tmp_path, class_names=list("abcde")), old.config, list("abcde"))
    assert all(torch.equal(value, new.state_dict()[name]) for name, value in old.state_dict().items())
    assert not done.untrained and not done.left_out and len(done.describe()) == 2
    assert sum(done.reused.values()) == old.config.parameters()
    assert done.recomputed == {"pos_embed": old.pos_embed.numel()}


def test_other_classes_keep_the_null_class_and_those_of_the_same_name(tmp_path):
    old, new = model(), model(seed=1, num_classes=4)
    fresh = new.y_embedder.embedding_table.weight.clone()
    done = taken_over(new, weights(old, tmp_path, class_names=list("abcde")), old.config, list("xdya"))
    before, after = old.y_embedder.embedding_table.weight, new.y_embedder.embedding_table.weight
    assert torch.equal(after[4], before[5]) and torch.equal(after[1], before[3]) and torch.equal(after[3], before[0])
    assert torch.equal(after[[0, 2]], fresh[[0, 2]])
    assert done.untrained == ["y_embedder.embedding_table.weight"]
    assert any("resized" in line and "4 classes, of which 2" in line for line in done.describe())
    x, t = inputs(new)  # without a class both models compute the same
    assert torch.equal(new(x, t, torch.full((3,), 4)), old(x, t, torch.full((3,), 5)))
    # The same number of classes with other names are other classes.
    other = model(seed=1)
    assert taken_over(other, weights(old, tmp_path, class_names=list("abcde")), old.config, list("vwxyz")).untrained


def test_another_size_gets_its_own_sine_cosine_table(tmp_path):
    old, new = model(), model(seed=1, input_size=(12, 16))
    done = taken_over(new, weights(old, tmp_path), old.config)
    assert torch.equal(new.pos_embed[0], sincos_position_table(128, 6, 8))
    assert list(done.recomputed) == ["pos_embed"] and not done.untrained
    x, t = torch.randn(2, 2, 12, 16), torch.tensor([1, 600])
    # The old model computes the same table for this size.
    assert torch.equal(new(x, t, torch.tensor([0, 5])), old(x, t, torch.tensor([0, 5])))


def test_learned_positions_are_interpolated(tmp_path):
    old, new = model(positions="learned"), model(seed=1, positions="learned", input_size=(8, 14))
    slope = torch.randn(128)
    for table in old.learned_positions.axes:  # a straight line stays straight, with the same ends
        table.weight.data = torch.linspace(-1, 3, len(table.weight))[:, None] * slope
    done = taken_over(new, weights(old, tmp_path), old.config)
    rows, columns = (table.weight for table in new.learned_positions.axes)
    assert torch.equal(rows, old.learned_positions.axes[0].weight)
    assert torch.allclose(columns, torch.linspace(-1, 3, 7)[:, None] * slope, atol=1e-6)
    assert done.untrained == ["learned_positions.axes.1.weight"]


def test_another_objective_keeps_the_head_of_the_prediction(tmp_path):
    old, new = model(), model(seed=1, learn_sigma=False)
    taken_over(new, weights(old, tmp_path), old.config)
    x, t = inputs(new)
    y = torch.tensor([0, 2, 5])
    assert torch.allclose(new(x, t, y), old(x, t, y)[:, :2], atol=1e-6)
    back = model(seed=2)
    done = taken_over(back, weights(new, tmp_path), new.config)
    assert torch.allclose(back(x, t, y)[:, :2], new(x, t, y), atol=1e-6) and back(x, t, y)[:, 2:].abs().max() == 0
    assert "learned variance that begins at zero" in " ".join(done.describe())


def test_another_condition_makes_the_embedder_anew_and_starts_as_without(tmp_path):
    text = TextConfig("bytes", 32, 9, cross_attention=True)
    old, new = model(), build_model(model_config("DiT-Ti/2", **SIZES, text=text)).eval()
    done = taken_over(new, weights(old, tmp_path), old.config)
    assert {name.split(".")[0] for name in done.new} == {"y_embedder", "text_encoder", "blocks"}
    assert all("cross_attn" in name for name in done.new if name.startswith("blocks"))
    assert list(done.left_out) == ["y_embedder.embedding_table.weight"]
    x, t = inputs(new)
    for module in (old.y_embedder.embedding_table, new.y_embedder.mlp[2]):  # no condition: the same model
        torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(new.y_embedder.mlp[2].bias)
    assert torch.allclose(new(x, t, encode_bytes(["a", "b", ""], 9)), old(x, t, torch.tensor([0, 1, 2])), atol=1e-5)
    # Another encoder of the same width is a different encoder.
    third = build_model(model_config("DiT-Ti/2", **SIZES, text=TextConfig("clip", 32, 9, cross_attention=True)))
    done = taken_over(third, weights(new, tmp_path), new.config)
    assert all(name.startswith("y_embedder.") for name in done.new) and "y_embedder.mlp.0.weight" in done.left_out


def test_a_clip_model_starts_from_a_picture_model(tmp_path):
    old, new = model(), model("vDiT-Ti/222", seed=1, frames=6)
    done = taken_over(new, weights(old, tmp_path), old.config)
    x, _ = inputs(old)
    still = x[:, :, None].expand(-1, -1, 2, -1, -1)  # two equal frames make one token, as the picture does
    assert torch.allclose(new.x_embedder(still), old.x_embedder(x), atol=1e-6)
    tokens, c = torch.randn(3, 16, 128), torch.randn(3, 128)
    clip, picture = (m.final_layer(tokens, m.final_layer.modulate(c)) for m in (new, old))
    frames = new.unpatchify(clip, (1, 4, 4))
    assert torch.allclose(frames, old.unpatchify(picture, (4, 4))[:, :, None].expand_as(frames))
    assert set(done.resized) == {"x_embedder.proj.weight", "final_layer.linear.weight", "final_layer.linear.bias"}


AXES = "learned_positions.axes.{}.weight"
PAIRS = [("MovieGen-Ti/2", "MovieGen-Ti/122"), ("EC-DiT-Ti/2", "EC-DiT-Ti/122"), ("DiT-Ti/2", "vDiT-Ti/122")]


def stretched(table: torch.Tensor, length: int) -> torch.Tensor:
    """Interpolate with numpy, one channel at a time."""
    at = np.linspace(0, len(table) - 1, length)
    channels = [np.interp(at, np.arange(len(table)), channel) for channel in table.detach().numpy().T]
    return torch.from_numpy(np.stack(channels, 1)).float()


@pytest.mark.parametrize(("picture", "clip"), PAIRS)
def test_learned_positions_of_a_picture_model_are_a_clip_model_s_rows_and_columns(picture, clip, tmp_path):
    options = dict(positions="learned", input_size=(8, 12))
    old, new = model(picture, **options), model(clip, seed=1, frames=4, **options)  # as many frames as rows of patches
    fresh = new.learned_positions.axes[0].weight.clone()
    done = taken_over(new, weights(old, tmp_path), old.config)
    assert list(done.new) == [AXES.format(0)] and not done.left_out
    assert torch.equal(new.learned_positions.axes[0].weight, fresh)
    assert {AXES.format(1), AXES.format(2)} <= done.reused.keys()
    reused, *others = done.describe()
    assert "learned_positions.axes.1, learned_positions.axes.2" in reused
    assert others[-1] == f"new: {4 * 128:,} weights, learned_positions.axes.0"
    # Nothing is added for the frame, so the clip is the picture.
    torch.nn.init.zeros_(new.learned_positions.axes[0].weight)
    (x, t), y = inputs(old), torch.tensor([0, 2, 5])
    torch.testing.assert_close(new(x[:, :, None], t, y)[:, :, 0], old(x, t, y), atol=1e-5, rtol=1e-4)
    # With other sizes, each axis is interpolated by itself.
    other = model(clip, seed=1, frames=6, positions="learned", input_size=(12, 10))
    done = taken_over(other, weights(old, tmp_path), old.config)
    assert list(done.new) == [AXES.format(0)] and {AXES.format(1), AXES.format(2)} <= done.resized.keys()
    rows, columns = (table.weight for table in old.learned_positions.axes)
    for table, expected in zip(
        other.learned_positions.axes[1:], (stretched(rows, 6), stretched(columns, 5)), strict=True
    ):
        torch.testing.assert_close(table.weight, expected)


@pytest.mark.parametrize(("picture", "clip"), PAIRS[:2])  # a DiT does not take weights from a vDiT
def test_learned_positions_of_a_clip_model_without_its_frames_are_a_picture_model_s(picture, clip, tmp_path):
    options = dict(positions="learned", input_size=(8, 12))
    old, new = model(clip, frames=4, **options), model(picture, seed=1, **options)
    done = taken_over(new, weights(old, tmp_path), old.config)
    assert done.left_out[AXES.format(0)] == 4 * 128 and {AXES.format(0), AXES.format(1)} <= done.reused.keys()
    assert re.fullmatch(r"left out of the file: [\d,]+ weights, .*learned_positions\.axes\.0", done.describe()[-1])
    # Not reused: its kernel has another number of axes.
    new.x_embedder.proj.weight.data.copy_(old.x_embedder.proj.weight[:, :, 0])
    torch.nn.init.zeros_(old.learned_positions.axes[0].weight)
    (x, t), y = inputs(new), torch.tensor([0, 2, 5])
    torch.testing.assert_close(new(x, t, y), old(x[:, :, None], t, y)[:, :, 0], atol=1e-5, rtol=1e-4)
    other = model(picture, seed=1, positions="learned", input_size=(12, 10))
    done = taken_over(other, weights(old, tmp_path), old.config)
    assert {AXES.format(0), AXES.format(1)} <= done.resized.keys() and AXES.format(0) in done.left_out
    _, rows, columns = (table.weight for table in old.learned_positions.axes)
    for table, expected in zip(other.learned_positions.axes, (stretched(rows, 6), stretched(columns, 5)), strict=True):
        torch.testing.assert_close(table.weight, expected)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "DiT-S/2"], "hidden_size 128 there, 384 here, depth 4 there, 12 here"),
        (["--model", "DiT-Ti/2", "--qk_norm"], "qk_norm False there, True here"),
        (["--model", "DiT-Ti/2", "--lora", "4", "--plugin", "gemini"], "--lora: does not work with --plugin gemini"),
    ],
)
def test_other_blocks_are_refused_before_weights_are_made(argv, message, tmp_path, no_ranks, capsys, monkeypatch):
    old = model(num_classes=10, in_channels=1)
    info = {"model": "DiT-Ti/2", "config": old.config.to_dict()}
    save_file(old.state_dict(), tmp_path / "w.safetensors", metadata={METADATA_KEY: json.dumps(info)})
    monkeypatch.setattr("opendit.training.build.empty_model", lambda *_, **__: pytest.fail("made before the check"))
    given = ["--pretrained", str(tmp_path / "w.safetensors"), "--outputs", str(tmp_path / "o")]
    with pytest.raises(SystemExit):
        train.main([*TRAIN, *given, "--mixed_precision", "bf16", *argv])
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ LoRA


def with_lora(of: DiT, rank: int = 3, alpha: float = 5.0, also=()) -> DiT:
    add_lora(of, Lora(rank, alpha, "base"), also, seed=0)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in of.named_parameters():
        if name.endswith(B):  # zero at first
            parameter.data.normal_(std=0.1, generator=generator)
    return of


@pytest.mark.parametrize("name", ["DiT-Ti/2", "ST-DiT-Ti/122", "MovieGen-Ti/122", "EC-DiT-Ti/2"])
def test_peft_s_layers_are_the_product_and_merging_is_the_same_model(name, tmp_path):
    """Output and gradients match the model with W + (alpha / rank) B A in float64, and so does the merged model."""
    frames = {} if name.endswith("/2") else {"frames": 3}
    base, adapted = (model(name, **frames).double() for _ in range(2))
    layers = targets(base, Lora(3, 5.0, ""))
    add = with_lora(adapted, also={"y_embedder.embedding_table.weight"}).double()
    trained = {name: p for name, p in add.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(layers) + 1 and len(layers) >= 4 * base.config.depth
    (x, t), y = inputs(base), torch.tensor([0, 2, 5])
    x, cotangent = x.double(), torch.randn(1, dtype=torch.float64)
    out = add(x, t, y)
    grads = torch.autograd.grad((out.sin() * cotangent).sum(), list(trained.values()))

    leaves = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    full = dict(base.named_parameters())
    for layer in layers:
        full[f"{layer}.weight"] = full[f"{layer}.weight"] + 5 / 3 * leaves[layer + B] @ leaves[layer + A]
    full["y_embedder.embedding_table.weight"] = leaves["y_embedder.embedding_table.weight"]
    expected = functional_call(base, full, (x, t, y))
    assert torch.allclose(out, expected, rtol=1e-10, atol=1e-12) and not torch.allclose(out, base(x, t, y), atol=1e-3)
    for one, other in zip(
        grads, torch.autograd.grad((expected.sin() * cotangent).sum(), list(leaves.values())), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-12) and one.abs().max() > 0

    state = {name: p.detach() for name, p in trained.items()}
    Merged({}, *of_run(Weights(state, tmp_path, {"lora": Lora(3, 5.0, "base").to_dict()}))).add_to(base)
    assert torch.allclose(base(x, t, y), out, rtol=1e-5, atol=1e-6)  # merged in fp32


@pytest.mark.parametrize("text", [None, TextConfig("bytes", 32, 9)])
def test_initial_weights_of_lora_are_keyed_and_as_peft_draws_them(text):
    """A is from U(-b, b) with b = 1 / sqrt(fan in), and B is zero. The adapted layers keep their weights."""
    config = model_config("DiT-Ti/2", **SIZES, text=text, num_classes=None if text else 5)
    plain, one = build_model(config, seed=3), build_model(config, seed=3)
    add_lora(one, Lora(16, 16, "base"), (), seed=3)
    torch.manual_seed(9)
    peft_s, two = build_model(config), build_model(config, seed=3)
    layers = LoraConfig(r=16, lora_alpha=16, target_modules=list(targets(peft_s, Lora(16, 16, ""))), bias="none")
    peft_s = dict(inject_adapter_in_model(layers, peft_s).named_parameters())
    add_lora(two, Lora(16, 16, "base"), (), seed=4)
    two, before = dict(two.named_parameters()), dict(plain.named_parameters())
    for name, parameter in one.named_parameters():
        if name.endswith(A):
            a, b = parameter.detach().flatten(), peft_s[name].detach().flatten()
            assert ks_2samp(a, b).pvalue > 1e-5 and not torch.equal(parameter, two[name])
            assert 0.99 < a.abs().max() * math.sqrt(parameter.shape[1]) <= 1
        elif name.endswith(B):
            assert not parameter.any() and not peft_s[name].any()
        else:
            assert torch.equal(parameter, before[canonical_name(name)])
    initialize(one, seed=4)  # all weights, wrapped or not
    assert all(torch.equal(p, two[name]) for name, p in one.named_parameters() if name.endswith((A, B)))
    afresh = dict(build_model(config, seed=4).named_parameters())
    assert all(torch.equal(p, afresh[canonical_name(n)]) for n, p in one.named_parameters() if "lora_" not in n)


@pytest.mark.parametrize("switches", [(), (MODULATE,), (MODULATE, NORM, SPLIT)], ids=" ".join)
def test_operations_that_take_a_product_apart_leave_nothing_of_lora_out(switches, monkeypatch):
    """Output and gradients with the kernels' reference operations match those with torch's operations."""
    for name in ("gate_residual", "bias_gelu", "split_heads", "gate_residual_layernorm_modulate"):
        module = importlib.import_module(f"opendit.kernels.{name}")
        monkeypatch.setattr(operations, name, getattr(module, f"{name}_reference"))
    adapted = with_lora(model()).double()
    (x, t), y = inputs(adapted), torch.tensor([0, 2, 5])
    trained = [p for p in adapted.parameters() if p.requires_grad]
    found = []
    for ops in (TORCH_OPS, operations.chosen(switches)):
        keep = ops.by_reference([n for n in ops.replaced if not n.startswith("linear_")])
        out = adapted.use(ops=keep)(x.double(), t, y)
        found.append((out, torch.autograd.grad(out.sin().sum(), trained)))
    (want, wanted), (out, got) = found
    assert torch.allclose(out, want, rtol=1e-10, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-12) and a.any() for a, b in zip(got, wanted, strict=True))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the file of a model with 7 classes, to be fine-tuned to the ten digits."""
    folder = tmp_path_factory.mktemp("base")
    old = model(num_classes=7, in_channels=1)
    names = ["three", "1", *"vwxyz"]
    info = {"model": "DiT-Ti/2", "config": old.config.to_dict(), "class_names": names, "vae": "none", "image_size": 8}
    save_file(old.state_dict(), folder / "base.safetensors", metadata={METADATA_KEY: json.dumps(info)})
    return folder / "base.safetensors"


@pytest.mark.timeout(600)
def test_lora_trains_little_resumes_bit_for_bit_and_is_sampled_from(base, tmp_path, no_ranks, capsys, monkeypatch):
    common = [*TRAIN, "--pretrained", str(base), "--lora", "2", "--lora_alpha", "6", "--mixed_precision", "fp32"]
    runs, again = [], []
    for plugin in ("zero2", "ddp"):
        argv = [*common, "--plugin", plugin]
        runs.append([*argv, "--max_steps", "6", "--outputs", str(tmp_path / plugin / "whole")])
        runs.append([*argv, "--max_steps", "3", "--outputs", str(tmp_path / plugin / "parts")])
        argv = argv if plugin == "zero2" else [*TRAIN, *argv[-4:]]  # a resumed run knows its LoRA and its base
        again.append([*argv, "--max_steps", "6", "--outputs", str(tmp_path / plugin / "parts"), "--load", "latest"])
    run_ranks(2, trainings, runs)
    run_ranks(2, trainings, again)
    for plugin in ("zero2", "ddp"):
        whole, parts = tmp_path / plugin / "whole", tmp_path / plugin / "parts"
        assert losses(parts) == losses(whole) and list(losses(whole)) == list(range(1, 7))
        assert_same_bits(run_of(whole) / "checkpoints/latest", run_of(parts) / "checkpoints/latest")
    one, other = losses(tmp_path / "zero2" / "whole"), losses(tmp_path / "ddp" / "whole")
    assert off_by([other[step] for step in one], one.values()) < 1e-5 and one[6] != one[1]

    run = run_of(tmp_path / "zero2" / "whole")
    stored = load_file(run / "checkpoints/latest/model.safetensors")
    assert all(A in name or B in name or name in ("pos_embed", "y_embedder.embedding_table.weight") for name in stored)
    assert any(value.any() for name, value in stored.items() if name.endswith(B))
    assert sum(v.numel() for v in stored.values()) < 0.04 * model(num_classes=10).config.parameters()

    # Merged model: the frozen weights are the base's, and the other weights are base plus product.
    merged, info = load_pretrained(run, which="model")
    state, before = merged.state_dict(), load_file(base)
    assert torch.equal(state["t_embedder.mlp.0.weight"], before["t_embedder.mlp.0.weight"])
    name = "blocks.1.mlp.fc2"
    expected = before[f"{name}.weight"] + 6 / 2 * stored[name + B] @ stored[name + A]
    assert torch.allclose(state[f"{name}.weight"], expected, atol=1e-7)
    assert not torch.equal(state[f"{name}.weight"], before[f"{name}.weight"])
    assert info.info["class_names"] == [str(digit) for digit in range(10)]
    table = "y_embedder.embedding_table.weight"
    assert torch.equal(state[table], stored[table]) and len(stored[table]) == 11
    assert (stored[table][1] - before[table][1]).abs().max() < 0.1  # class "1" started from the base's weights

    pictures = []
    for given in (["--ckpt", str(run)], ["--ckpt", str(base), "--lora", str(run)]):
        words = "--num_sampling_steps 2 --class_labels 9 1 --mixed_precision fp32 --no_save_png".split()
        sample.main([*given, *words, "--output", str(tmp_path / "s"), "--npz", str(tmp_path / "s.npz")])
        pictures.append(np.load(tmp_path / "s.npz")["arr_0"])
    assert np.array_equal(*pictures)
    with pytest.raises(SystemExit):
        sample.main(["--ckpt", str(base), "--lora", str(base), "--output", str(tmp_path / "s")])
    assert "holds a whole model" in capsys.readouterr().err
    for changed, message in (
        (["--lora", "3"], "was made with --lora 2 --lora_alpha 6"),
        (["--pretrained", str(run)], "holds what --lora adds to"),
    ):
        with pytest.raises(SystemExit):
            train.main([*common, "--max_steps", "7", "--outputs", str(tmp_path / "x"), "--load", str(run), *changed])
        assert message in capsys.readouterr().err
    monkeypatch.setattr(lora_module, "TARGETS", ("qkv", "proj", "fc1"))
    lora_module.lora_layers.cache_clear()
    with pytest.raises(SystemExit):
        train.main([*common, "--max_steps", "7", "--outputs", str(tmp_path / "x"), "--load", str(run)])
    assert "has LoRA at blocks.0.mlp.fc2, where none is trained now" in capsys.readouterr().err
    lora_module.lora_layers.cache_clear()


def test_what_was_taken_over_is_printed(base, tmp_path, no_ranks, capsys):
    argv = [*TRAIN, "--pretrained", str(base), "--max_steps", "2", "--objective", "flow", "--outputs", str(tmp_path)]
    train.main(argv)
    shown = capsys.readouterr().out
    assert "--pretrained: reused: " in shown and "blocks.*.attn" in shown
    assert "10 classes, of which 1 by the same name, and the null class are kept" in shown
    assert "its learned variance dropped" in shown
    assert all(math.isfinite(loss) for loss in losses(tmp_path).values())
