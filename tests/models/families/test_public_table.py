"""Test that what flags know about public models without importing torch matches the families."""

import json
import re
from pathlib import Path

import pytest

import opendit
from opendit.config.architectures import PUBLIC, UNSUPPORTED, Public
from opendit.models.families import FAMILIES, MODULES
from tests.models.families.oracles import COSMOS2, FLUX, FLUX2, LTX, LUMINA2, QWEN_IMAGE, SD3, WAN, Z_IMAGE, networks

VALUES = {
    "flux": FLUX,
    "z_image": Z_IMAGE,
    "wan": WAN,
    "lumina2": LUMINA2,
    "qwen_image": QWEN_IMAGE,
    "flux2": FLUX2,
    "flux2_klein": FLUX2 | {"guidance_embeds": False},
    "ltx": LTX,
    "sd3": SD3,
    "cosmos2": COSMOS2,
}


def test_flags_know_the_families_as_they_are():
    found = {}
    for name, family in FAMILIES.items():
        patch, side = family.layout(VALUES[name]).patch, family.image_size
        shorter = side if isinstance(side, int) else min(side)
        found[name] = Public(family.network, patch[0] if len(patch) == 2 else patch, shorter, *family.when.values())
    assert found == PUBLIC


def test_the_page_counts_the_lines_of_every_family_to_ten():
    """docs/public_models.md states each family's number of lines, rounded to ten."""
    page = Path("docs/public_models.md").read_text()
    told = {
        name: int(lines) for name, lines in re.findall(r"^\|[^|]+\| `(\w+)`, (\d+) \| [^|]+ \|$", page, re.MULTILINE)
    }
    lines = {module.__name__.split(".")[-1]: Path(str(module.__file__)).read_text().count("\n") for module in MODULES}
    assert told == {name: round(count, -1) for name, count in lines.items()} and max(told.values()) <= 180


# Beginning of a pipeline's name -> supported family with the same network.
SHARED = {"Flux": "flux", "QwenImage": "qwen_image", "LTX": "ltx", "Cosmos": "cosmos2"}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_is_not_supported_is_named_with_the_reason(name, tmp_path):
    assert getattr(networks(), name).__name__ == name
    found, index = name, "SomePipeline"
    if name.endswith("Pipeline"):
        found, index = next(PUBLIC[family].network for start, family in SHARED.items() if name.startswith(start)), name
    network = tmp_path / ("unet" if name.startswith("UNet") else "transformer")
    network.mkdir()
    (network / "config.json").write_text(json.dumps({"_class_name": found}))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": index}))
    for folder in (tmp_path, network):
        with pytest.raises(ValueError, match=f"{name} is not supported: {UNSUPPORTED[name]}$"):
            opendit.load(folder)
