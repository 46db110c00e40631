"""Test python -m opendit.models."""

import pytest

from opendit.config.architectures import NAMES, VIDEO_NAMES
from opendit.models.__main__ import main


def rows(capsys, *argv: str) -> dict[str, list[str]]:
    main([*argv])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {line[0]: line[1:] for line in lines[1:]}


def test_every_model_is_listed_with_the_papers_figures(capsys):
    found = rows(capsys, "--batch_size", "128")
    assert list(found) == [*NAMES, *VIDEO_NAMES]
    parameters, unit, tokens, gflop, zero2, *_ = found["DiT-XL/2"]
    assert (parameters, unit, tokens, gflop) == ("674.8", "M", "256", "711.7")  # Peebles & Xie 2023: 675 M; 118.6 GMAC
    assert float(zero2) == pytest.approx(47.4, abs=0.1)  # measured, docs/memory.md
    assert found["vDiT-XL/222"][2] == "2,048"


def test_more_gpus_share_the_states(capsys):
    one, eight = (rows(capsys, "DiT-L/2", "--batch_size", "1", "--world", world)["DiT-L/2"] for world in "18")
    zero2, gemini, ddp, fsdp = ((float(a), float(b)) for a, b in zip(one[-4:], eight[-4:], strict=True))
    assert zero2[1] < 0.35 * zero2[0] and gemini[1] < 0.25 * gemini[0] and ddp[1] > 0.8 * ddp[0] and fsdp[1] < fsdp[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["DiT-XXL/2"], "did you mean DiT-XL/2"),
        (["--image_size", "250"], "don't divide by patch 2"),
        (["--image_size", "0"], "--image_size 0: out of range; give a whole number from 1 to "),
        (["--num_frames", "0"], "--num_frames 0: out of range; give a whole number from 1 to "),
        (["--batch_size", "-4"], "--batch_size -4: out of range; give a whole number from 1 to "),
        (["--world", "0"], "--world 0: out of range; give a whole number from 1 to "),
    ],
)
def test_errors(argv, message, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err
