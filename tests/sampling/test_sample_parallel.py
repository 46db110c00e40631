"""sample.py on ranks that share samples, guidance halves or a sample's tokens is compared with one process."""

import contextlib
import io
import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import sample
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.config.command_line import parse
from opendit.config.sample import SampleConfig
from opendit.diffusion.objectives import DDPMObjective, FlowObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.models.conditioning import TextCondition, TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.variants import STDiTConfig, VDiTConfig
from opendit.models.zoo import build_model
from opendit.parallel.collectives import SharedBatch
from opendit.parallel.mesh import Mesh, Replica, close_mesh, init_mesh, make_replicas
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.sampling.sample_output import digest_of_weights
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.test_dit import randomised
from tests.numbers import largest
from tests.ranks import run_ranks, several_programs

TOLERANCE = 1e-4
FLOW = FlowObjective(3.0)
IMAGE = DiTConfig((6, 10), 2, 3, 48, 2, 12, num_classes=5)  # 15 tokens
CLIP = VDiTConfig((6, 4, 6), (2, 2, 2), 1, 48, 2, 12, num_classes=5, learn_sigma=False)  # 18 tokens
LATTE = STDiTConfig((6, 4, 6), (2, 2, 2), 1, 48, 2, 12, num_classes=5, learn_sigma=False)
TEXT = replace(CLIP, num_classes=None, text=TextConfig("bytes", 32, 7, cross_attention=True))
FROZEN = replace(IMAGE, num_classes=None, text=TextConfig("t5", 16, 5, cross_attention=True))
FIVE_HEADS = replace(IMAGE, hidden_size=40, num_heads=5)
MODELS = {"image": IMAGE, "clip": CLIP, "text": TEXT, "five": FIVE_HEADS}
PROMPTS = ["a seven moving left", "an eight that turns", "nine"]


def fresh(config: DiTConfig) -> DiT:
    torch.manual_seed(0)
    return randomised(build_model(config)).eval()


# -------------------------------------------------------------------------------------------------------------- latents


def conditions(config: DiTConfig, count: int) -> tuple:
    """Return y for ``count`` samples, and the null condition."""
    generator, text = torch.Generator().manual_seed(1), config.text
    if text is None:
        return torch.arange(count) % 5, torch.tensor([5])
    if text.inside:
        return torch.randint(1, 200, (count, text.max_tokens), generator=generator), torch.ones(1, 7, dtype=torch.long)
    tokens = torch.randn(count + 1, text.max_tokens, text.width, generator=generator)
    mask = torch.arange(text.max_tokens) <= torch.arange(count + 1).unsqueeze(1) % text.max_tokens
    both = TextCondition(tokens, mask, tokens.mean(1))
    return both[:count], both[count:]


def drawn(
    config: DiTConfig,
    objective,
    scale: float,
    size,
    samples: int,
    interval=None,
    asked=None,
    *,
    sequence=None,
    halves=None,
) -> Tensor:
    """Draw with an engine whose model's work is shared, or with the reference without ``sequence`` and ``halves``.

    Approximations in ``asked`` always use an engine.
    """
    model = fresh(config).use(sequence=sequence)
    given = *conditions(config, samples), torch.arange(samples)
    settings = dict(sampler=objective.samplers[-1], cfg_scale=scale, cfg_interval=interval, steps=5, size=size)
    if asked:
        settings |= asked
    elif sequence is None and halves is None:
        return sample_latents(model, *given, seed=3, objective=objective, **settings)
    around = (lambda model: SharedBatch(model, halves)) if halves else None
    engine = SamplingEngine(model, objective, around=around, **settings)
    return engine.sample(*given, 3)


def compare(mesh: Mesh, cases: list[tuple]) -> list[tuple[float, bytes]]:
    """Return each case's largest difference from one process relative to the largest number, and the latents."""
    results, made = [], {}
    for ranks, cfg_parallel, kind, config, *what in cases:
        group = made[ranks] if ranks in made else made.setdefault(ranks, init_mesh(sequence_parallel=ranks))
        how = dict(types=config.sequence_types, axial=config.axial_attention)
        sequence = sequence_parallel(group, kind, Shape(config.tokens, config.hidden_size, config.num_heads, **how))
        alone = drawn(config, *what)
        shared = drawn(config, *what, sequence=sequence, halves=make_replicas(group, cfg_parallel).halves)
        error = (shared - alone).abs().max() / alone.abs().max()
        results.append((error.item(), shared.numpy().tobytes()))
    return results


def cases_of(world: int) -> list[tuple]:
    """Return the cases (sequence group size, halves apart, type, model, objective, guidance, latents' size, samples,
    interval, approximations); the last two are optional."""
    cases = [
        (1, True, "auto", IMAGE, DDPMObjective(), 4.0, None, 3),
        (1, True, "auto", CLIP, FLOW, 2.0, (2, 4, 6), 2),
        (1, True, "auto", TEXT, FLOW, 2.0, None, 1),
        (1, True, "auto", FROZEN, DDPMObjective(), 1.5, None, 3),
        (1, True, "auto", IMAGE, DDPMObjective(), 1.0, None, 3),  # no halves, but the batch of 3 is shared
        (1, True, "auto", IMAGE, DDPMObjective(), 4.0, None, 3, (0.5, 20.0)),  # guided at some steps only
        (1, True, "auto", IMAGE, DDPMObjective(), 4.0, None, 3, (0.5, 20.0), {"cache": "taylor:2:1"}),
        (1, True, "auto", IMAGE, DDPMObjective(), 4.0, None, 3, None, {"guidance_every": 2}),
        (2, False, "fastseq", IMAGE, DDPMObjective(), 4.0, None, 2, None, {"cache": "taylor:2:1"}),
        (2, False, "fastseq", IMAGE, DDPMObjective(), 4.0, None, 2),
        (2, False, "ulysses", TEXT, FLOW, 2.0, (2, 6, 6), 1),
        (2, False, "ring", FIVE_HEADS, DDPMObjective(), 4.0, (2, 6), 2),
        (2, False, "auto", FROZEN, DDPMObjective(), 4.0, (6, 6), 2),
        (2, False, "auto", LATTE, FLOW, 2.0, (6, 4, 10), 2),  # 3 frames of 10 tokens
    ]
    if world == 4:
        cases += [
            (2, True, "fastseq", IMAGE, DDPMObjective(), 4.0, None, 2),
            (2, True, "ring", TEXT, FLOW, 2.0, (2, 6, 6), 1),
            (2, True, "ulysses", FROZEN, DDPMObjective(), 1.0, None, 1),
            (2, True, "fastseq", replace(LATTE, full_attention=True), FLOW, 2.0, None, 2),
            (4, False, "usp", CLIP, FLOW, 2.0, (2, 6, 6), 1),
            (4, False, "ring", IMAGE, DDPMObjective(), 4.0, (2, 10), 1),  # 5 tokens: 2, 2, 1, 0
        ]
    return cases


@pytest.mark.parametrize("world", [2, 4])
def test_latents_equal_one_process_and_each_other(world):
    ranks = run_ranks(world, compare, cases_of(world))
    for case, results in zip(cases_of(world), zip(*ranks, strict=True), strict=True):
        assert largest(error for error, _ in results) < TOLERANCE, case
        assert len({latents for _, latents in results}) == 1, case  # bitwise equal; ranks never compare


class RowsSeen:
    """Returns x + t + y, and records the rows of its calls."""

    def __init__(self):
        self.rows = []

    def __call__(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        self.rows.append(x[:, 0].tolist())
        return x + (t + y).unsqueeze(1)


def replicas_and_rows(mesh: Mesh) -> tuple:
    replicas = {
        (ranks, cfg_parallel): make_replicas(init_mesh(sequence_parallel=ranks), cfg_parallel)
        for ranks, cfg_parallel in ((1, False), (1, True), (2, False), (2, True), (4, False))
    }
    model = RowsSeen()
    for count in (1, 4, 5):
        x, t, y = torch.arange(3.0 * count).view(count, 3), torch.arange(count) * 10, torch.arange(count) * 100
        result = SharedBatch(model, replicas[2, True].halves)(x, t, y)
        assert torch.equal(result, x + (t + y).unsqueeze(1))
    divided = make_replicas(init_mesh(tensor_parallel=2), True)
    assert divided.halves.rank == replicas[2, True].halves.rank and divided.ranks.size == 4
    both = make_replicas(init_mesh(tensor_parallel=2, sequence_parallel=2), False)
    assert (both.count, both.leads, both.ranks.size, both.ranks.rank) == (1, mesh.rank == 0, 4, mesh.rank)
    with pytest.raises(ValueError, match="multiple of 8 processes and there are 4"):
        make_replicas(init_mesh(sequence_parallel=4), True)
    said = {key: (r.number, r.count, r.leads, r.halves and r.halves.rank) for key, r in replicas.items()}
    return said, model.rows


def test_who_does_what():
    ranks = run_ranks(4, replicas_and_rows)
    assert [said[1, False] for said, _ in ranks] == [(i, 4, True, None) for i in range(4)]
    assert [said[1, True] for said, _ in ranks] == [(i // 2, 2, i % 2 == 0, i % 2) for i in range(4)]
    assert [said[2, False] for said, _ in ranks] == [(i // 2, 2, i % 2 == 0, None) for i in range(4)]
    assert [said[2, True] for said, _ in ranks] == [(0, 1, i == 0, i // 2) for i in range(4)]
    assert [said[4, False] for said, _ in ranks] == [(0, 1, i == 0, None) for i in range(4)]
    first, second = [[0.0], [0.0, 3.0], [0.0, 3.0, 6.0]], [[0.0], [6.0, 9.0], [9.0, 12.0, 12.0]]
    assert [rows for _, rows in ranks] == [first, first, second, second]


# ------------------------------------------------------------------------------------------------------------ sample.py


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for name, config in MODELS.items():
        info = {"model": "DiT-Ti/2", "config": config.to_dict(), "vae": "none"}
        info["objective"] = (DDPMObjective() if config.learn_sigma else FLOW).to_dict()
        save_file(fresh(config).state_dict(), folder / f"{name}.safetensors", metadata={METADATA_KEY: json.dumps(info)})
    return folder


def start(mesh: Mesh, runs: list[str]) -> list[tuple]:
    """Run sample.py with each command line.

    Return its exit status, stdout, stderr, whether it loaded a VAE, the largest (rows, tokens) of this rank's blocks,
    and the digests of the model's weights.
    """
    results, run = [], sample.draw
    several_programs()
    for argv in runs:
        decodes, met, status, digests = [], [(0, 0)], 0, []

        def watched(sampling, *more, decodes=decodes, met=met, digests=digests) -> None:
            digests.append(digest_of_weights(sampling))
            decodes.append(sampling.codec is not None)
            sampling.model.blocks[0].register_forward_pre_hook(lambda _, args: met.append(args[0].shape[:2]))
            run(sampling, *more)

        sample.draw = watched
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                sample.main(shlex.split(argv))
            except SystemExit as stop:
                status = stop.code
        results.append((status, out.getvalue(), err.getvalue(), any(decodes), tuple(max(met)), digests))
    return results


JOBS = {
    "image": "--num_samples 5 --seed 3 --cfg_scale 2",
    "clip": "--num_samples 3 --seed 3 --cfg_scale 2 --num_frames 2 --sampler heun",
    "text": f"--num_samples 3 --seed 3 --cfg_scale 2 --prompt {shlex.join(PROMPTS)}",
}


def command(weights: Path, name: str, output: Path, flags: str) -> str:
    common = f"--ckpt {weights}/{name}.safetensors --num_sampling_steps 4 --batch_size 2 --output {output}"
    return f"{common} --npz {output}.npz {JOBS[name]} {flags}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory, weights) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(1, start, [command(weights, name, folder / name, "") for name in JOBS])
    return {name: folder / name for name in JOBS}


def names_of(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir())


RUNS = [  # (processes, model, flags, replicas, largest rows and tokens in a rank's blocks)
    (2, "image", "--sequence_parallel_size 2 --sequence_parallel_type fastseq", 1, (4, 8)),
    (2, "clip", "--cfg_parallel", 1, (2, 6)),
    (2, "text", "", 2, (4, 18)),
    (2, "text", "--sequence_parallel_size 2", 1, (4, 9)),
    (2, "image", "--tensor_parallel_size 2", 1, (4, 8)),
    (2, "text", "--tensor_parallel_size 2", 1, (4, 9)),
    (4, "image", "--sequence_parallel_size 2 --cfg_parallel", 1, (2, 8)),
    (4, "image", "", 4, (4, 15)),
    (4, "image", "--cfg_parallel", 2, (2, 15)),
    (4, "clip", "--sequence_parallel_size 2 --sequence_parallel_type ring", 2, (4, 3)),
    (4, "clip", "", 4, (2, 6)),  # 3 samples: one process has nothing to do
    (4, "text", "--sequence_parallel_size 4 --sequence_parallel_type usp", 1, (4, 5)),
    (4, "text", "--sequence_parallel_size 2 --cfg_parallel", 1, (2, 9)),
    (4, "text", "--tensor_parallel_size 2 --sequence_parallel_size 2", 1, (4, 5)),
    (4, "image", "--tensor_parallel_size 2 --cfg_parallel", 1, (2, 8)),
    (4, "clip", "--tensor_parallel_size 2", 2, (4, 3)),
    (4, "image", "--tensor_parallel_size 4", 1, (4, 4)),
]


@pytest.mark.parametrize("world", [2, 4])
def test_sample_py_writes_the_pictures_of_one_process(world, tmp_path, weights, alone):
    runs = [run for run in RUNS if run[0] == world]
    commands = [command(weights, name, tmp_path / str(i), flags) for i, (_, name, flags, *_) in enumerate(runs)]
    ranks = run_ranks(world, start, commands)
    first = {name: ranks[0][i][5] for i, (_, name, *_) in reversed([*enumerate(runs)])}
    for i, (_, name, flags, replicas, most) in enumerate(runs):
        (status, out, err, *_), *others = [rank[i] for rank in ranks]
        assert status == 0 and "OpenDiT sampling" in out and "Done" in out and "samples/s" in err, (runs[i], err)
        assert ("nothing to draw" in out) == (replicas == 4 and name == "clip")
        assert all(other[:3] == (0, "", "") for other in others), runs[i]
        assert max(rank[i][4] for rank in ranks) == most, runs[i]
        assert (" ranks, " in out, "halves" in out) == ("sequence" in flags, "cfg" in flags), runs[i]
        assert all(rank[i][3] for rank in ranks), runs[i]
        assert ("layers divided by" in out) == ("tensor" in flags), runs[i]
        assert all(rank[i][5] == first[name] for rank in ranks), runs[i]  # so other sizes can reuse the parts
        assert names_of(tmp_path / str(i)) == names_of(alone[name]), runs[i]
        ours, reference = np.load(tmp_path / f"{i}.npz"), np.load(f"{alone[name]}.npz")
        assert np.array_equal(ours["arr_1"], reference["arr_1"])
        pictures = reference["arr_0"].astype(int)
        assert ours["arr_0"].shape == pictures.shape and pictures.std() > 1
        assert all(np.abs(pictures[0] - other).max() > 10 for other in pictures[1:])  # a wrong order would show
        # an error of 1e-4 in [-1, 1] can move a rounded byte by one
        assert np.abs(ours["arr_0"] - pictures).max() <= 1, runs[i]


@pytest.mark.parametrize(
    "world,argv,message",
    [
        (1, "--cfg_parallel", "--cfg_parallel: needs a multiple of 2 processes and there is 1; start it with torchrun"),
        (3, "--cfg_parallel", "--cfg_parallel: needs a multiple of 2 processes and there are 3"),
        (
            6,
            "--cfg_parallel --sequence_parallel_size 2",
            "--cfg_parallel with --sequence_parallel_size 2: needs a multiple of 4 processes and there are 6; start it "
            "with torchrun --standalone --nproc_per_node=4, or leave --cfg_parallel out",
        ),
        (2, "--cfg_parallel --cfg_scale 1", "--cfg_parallel: --cfg_scale 1 is no guidance"),
        (1, "--sequence_parallel_size 2", "--sequence_parallel_size 2: needs 2 processes and there is one"),
        (4, "--sequence_parallel_size 3", "--sequence_parallel_size 3: does not divide the 4 processes"),
        (
            6,
            "--cfg_parallel --tensor_parallel_size 2",
            "--cfg_parallel with --tensor_parallel_size 2: needs a multiple of 4 processes and there are 6",
        ),
        (2, "--tensor_parallel_size 2 --fp8", "--tensor_parallel_size 2: does not work with --fp8"),
        (2, "--tensor_parallel_size 2 --cache first_block", "--tensor_parallel_size shares out; use taylor:3"),
        (4, "--tensor_parallel_size 3", "--tensor_parallel_size 3: does not divide the 4 processes"),
        (2, "--sequence_parallel_size 0", "--sequence_parallel_size 0: out of range; give a whole number from 1 to"),
        (
            2,
            "--sequence_parallel_type ring",
            "--sequence_parallel_type: does nothing without --sequence_parallel_size above 1",
        ),
    ],
)
def test_numbers_of_processes_that_do_not_fit(world, argv, message, tmp_path):
    with pytest.raises(ValueError) as error:
        parse(SampleConfig, [*argv.split(), "--output", str(tmp_path)]).resolve(world, has_gpu=False)
    assert message in str(error.value)


REFUSED = [
    ("--ckpt {tmp}/nowhere --cfg_parallel --sequence_parallel_size 2", "needs a multiple of 4 processes"),
    ("--ckpt {tmp}/nowhere --cfg_parallel --cfg_scale 1", "--cfg_scale 1 is no guidance"),
    ("--ckpt {tmp}/nowhere --sequence_parallel_size 3", "does not divide the 2 processes"),
    ("--ckpt {weights}/five.safetensors --sequence_parallel_size 2 --sequence_parallel_type ulysses", "use ring or"),
    ("--ckpt {tmp}/hollow.safetensors --tensor_parallel_size 2", "heads, 5, can't be divided by it"),
    ("--ckpt {tmp}/hollow.safetensors --sequence_parallel_size 2 --sequence_parallel_type ulysses", "use ring or"),
    (
        "--ckpt {tmp}/hollow.safetensors --sequence_parallel_size 2 --sequence_parallel_type ring",
        "does not hold the model",
    ),
]


def test_mistakes_are_told_once_and_before_the_weights_are_read(tmp_path, weights):
    with safe_open(weights / "five.safetensors", framework="pt") as file:  # names this model without its weights
        save_file({"nothing": torch.zeros(1)}, tmp_path / "hollow.safetensors", metadata=file.metadata())
    runs = [argv.format(tmp=tmp_path, weights=weights) + f" --output {tmp_path}/o" for argv, _ in REFUSED]
    first, second = run_ranks(2, start, runs)
    for (argv, message), ours, other in zip(REFUSED, first, second, strict=True):
        said = ours[2] + other[2]  # both ranks meet the mistake, but only the first reports it
        assert said.count("error: ") == 1 and message in said and not ours[1] + other[1], (argv, ours, other)
        assert {ours[0], other[0]} in ({2}, {2, 3}), (argv, ours, other)


def test_alone_is_a_replica(no_ranks):
    assert make_replicas(init_mesh(), False) == Replica(0, 1, True, None)
    close_mesh()
