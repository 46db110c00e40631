"""Public models by family, as data on the grammar of blocks; see docs/public_models.md."""

from opendit.models.families import flux, lumina2, qwen_image, wan, z_image

FAMILIES = {module.FAMILY.name: module.FAMILY for module in (flux, z_image, wan, lumina2, qwen_image)}
