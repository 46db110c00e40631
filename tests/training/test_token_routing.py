"""train.py --route: losses are the same on any number of ranks, and a share of 0 means no route."""

import pytest
import torch
from safetensors.torch import load_file

import opendit
import train
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from tests.ranks import run_ranks
from tests.training.test_train import TINY, log_of, start

ROUTED = [
    *TINY,
    "--objective",
    "flow",
    "--positions",
    "rope",
    "--max_steps",
    "4",
    "--lr",
    "3e-3",
    "--sample_every",
    "0",
    "--no_save",
]
ROUTE = ["--route", "1:3:0.5"]


def losses(folder, argv):
    train.main([*ROUTED, *argv, "--outputs", str(folder)])
    return [line["loss"] for line in log_of(folder / "000-DiT-Ti-2")]


def test_two_ranks_draw_what_one_draws_and_a_share_of_0_changes_no_bit(tmp_path, no_ranks):
    run_ranks(2, start, [*ROUTED, *ROUTE, "--batch_size", "8", "--outputs", str(tmp_path / "two")])
    two = [line["loss"] for line in log_of(tmp_path / "two" / "000-DiT-Ti-2")]
    one = losses(tmp_path / "one", [*ROUTE, "--batch_size", "16", "--recompute", "norms"])
    torch.testing.assert_close(one, two, rtol=1e-5, atol=0)
    shared = ["--batch_size", "16", "--sequence_parallel_size", "2", "--outputs", str(tmp_path / "shared")]
    run_ranks(2, start, [*ROUTED, *ROUTE, *shared])
    shared = [line["loss"] for line in log_of(tmp_path / "shared" / "000-DiT-Ti-2")]
    torch.testing.assert_close(one, shared, rtol=1e-5, atol=0)
    plain = losses(tmp_path / "plain", ["--batch_size", "16"])
    assert losses(tmp_path / "nothing", ["--batch_size", "16", "--route", "1:3:0"]) == plain
    assert abs(one[-1] - plain[-1]) > 1e-4 * plain[-1], (one, plain)


def test_sprint_gives_the_same_curve_on_1_2_and_4_ranks_and_resumes_at_its_dense_end(tmp_path, no_ranks):
    flags = [*ROUTED[:-1], "--route", "1:3:0.5:sprint", "--route_until", "2", "--route_drop", "0.3"]

    def of(folder):
        return [line["loss"] for line in log_of(tmp_path / folder / "000-DiT-Ti-2")]

    for ranks in (2, 4):
        own = ["--batch_size", str(16 // ranks), "--outputs", str(tmp_path / str(ranks))]
        run_ranks(ranks, start, [*flags, *own])
    shared = ["--batch_size", "16", "--sequence_parallel_size", "2", "--outputs", str(tmp_path / "shared")]
    run_ranks(2, start, [*flags, *shared])
    flags += ["--batch_size", "16", "--load", "latest", "--outputs"]
    train.main([*flags, str(tmp_path / "1")])
    for steps in ("1", "3", "4"):  # during the route, and after its end
        train.main([*flags, str(tmp_path / "parts"), "--max_steps", steps])
    for other in ("2", "4", "shared"):
        torch.testing.assert_close(of(other), of("1"), rtol=1e-5, atol=0)
    assert of("parts") == of("1")
    weights = [
        load_file(tmp_path / name / "000-DiT-Ti-2/checkpoints/latest/model.safetensors") for name in ("1", "parts")
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    pipe = opendit.load(tmp_path / "1" / "000-DiT-Ti-2")
    null, route = (pipe([1], steps=2, progress=False, guidance_by=by)[0] for by in ("null", "route"))
    assert null.size == route.size == (8, 8) and null.tobytes() != route.tobytes() and pipe.config.sprint == (1, 3)


@pytest.mark.parametrize("mode", ["", ":sprint"])
def test_the_route_ends_where_it_is_asked_to(tmp_path, no_ranks, mode):
    flags = ["--batch_size", "16", "--route", f"1:3:0.5{mode}"]
    never, end = losses(tmp_path / "never", flags), losses(tmp_path / "end", [*flags, "--route_until", "2"])
    assert end[:2] == never[:2] and all(a != b for a, b in zip(end[2:], never[2:], strict=True))


@pytest.mark.parametrize(
    "flags,said",
    [
        ("--model DiT-Ti/2 --route 1:5:0.5", "has 4 blocks"),
        ("--model EC-DiT-Ti/2 --route 1:3:0.5", "experts choose"),
        ("--model ST-DiT-Ti/222 --use_video --cross_attention --route 1:3:0.5", "along the axes"),
        ("--model DiT-Ti/2 --route 1:3:0.5:sprint --pipeline_parallel_size 2", "--pipeline_parallel_size"),
        ("--model DiT-Ti/2 --route 1:3:0.5 --tensor_parallel_size 2", "--tensor_parallel_size"),
        ("--model DiT-Ti/2 --route 1:3:0.5 --pipeline_parallel_size 2", "--pipeline_parallel_size"),
    ],
)
def test_what_it_does_not_work_with_is_named(flags, said):
    with pytest.raises(ValueError, match=f"--route 1:[35]:0.5(:sprint)?: .*{said}"):
        parse(TrainConfig, flags.split()).resolve(2, has_gpu=True)
