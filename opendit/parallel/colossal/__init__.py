"""Adapters for Colossal-AI: corrections, the ZeRO optimizer, and plugins. Only these modules import colossalai.

Colossal-AI is neither imported nor changed before :func:`load` is called.
"""

from importlib.util import find_spec
from types import ModuleType

HOW_TO_INSTALL = "run `bash install.sh`, or `pip install --no-deps colossalai==0.5.0`"


def check_installed() -> None:
    """Raise ValueError, with the command that installs Colossal-AI, if it is not installed. This does not import
    Colossal-AI."""
    if find_spec("colossalai") is None:
        raise ValueError(
            f"training needs Colossal-AI, which is not installed: {HOW_TO_INSTALL} (sampling does without)"
        )


def load() -> ModuleType:
    """Import Colossal-AI, apply the corrections, and return the module opendit.parallel.colossal.plugins.

    Raises:
        ImportError: Colossal-AI can't be imported. The message has the command that installs it.
    """
    from opendit.parallel.colossal import compat

    compat.prepare()  # the following imports work only after this call
    from opendit.parallel.colossal import plugins

    plugins.register()
    return plugins
