"""Public models by family. Each family is described by data, from which the general code builds the network; see
docs/public_models.md.
"""

from opendit.models.families import cosmos2, flux, flux2, ltx, lumina2, qwen_image, sd3, wan, z_image

MODULES = flux, z_image, wan, lumina2, qwen_image, flux2, ltx, sd3, cosmos2
FAMILIES = {family.name: family for family in (*(module.FAMILY for module in MODULES), flux2.KLEIN)}
