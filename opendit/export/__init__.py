"""Convert OpenDiT checkpoints to and from diffusers' folders and Meta's .pt files.

``python -m opendit.export`` is the command. Functions are imported at first use.
"""

from typing import TYPE_CHECKING

from opendit.common.utils import import_when_used

if TYPE_CHECKING:
    from opendit.export.conversion import correct_timesteps as correct_timesteps
    from opendit.export.conversion import export_diffusers as export_diffusers
    from opendit.export.conversion import export_meta as export_meta
    from opendit.export.conversion import export_published as export_published
    from opendit.export.conversion import import_weights as import_weights
    from opendit.export.conversion import load_pipeline as load_pipeline

_NAMES = "correct_timesteps export_diffusers export_meta export_published import_weights load_pipeline"
__getattr__, __all__ = import_when_used(__name__, {"opendit.export.conversion": _NAMES})
