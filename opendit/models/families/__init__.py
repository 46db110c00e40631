"""Public models by family, as data on the grammar of blocks; see docs/public_models.md."""

from opendit.models.families import flux, flux2, lumina2, qwen_image, wan, z_image

FAMILIES = {
    family.name: family
    for family in (*(module.FAMILY for module in (flux, z_image, wan, lumina2, qwen_image, flux2)), flux2.KLEIN)
}
