"""Public models by family, as data on the grammar of blocks; see docs/public_models.md."""

from opendit.models.families import flux, ltx, lumina2, sd3, wan, z_image

FAMILIES = {module.FAMILY.name: module.FAMILY for module in (flux, z_image, wan, lumina2, ltx, sd3)}
