"""Compare what flags know of public models without torch with the families' own words."""

from opendit.config.architectures import PUBLIC, Public
from opendit.models.families import FAMILIES
from tests.models.families.oracles import COSMOS2, FLUX, FLUX2, LTX, LUMINA2, QWEN_IMAGE, SD3, WAN, Z_IMAGE

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
