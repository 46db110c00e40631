"""The only modules that import colossalai: fixes for it, its ZeRO optimizer, its plugins.

Nothing here is imported or changed before :func:`load` is called.
"""

from importlib.util import find_spec
from types import ModuleType

HOW_TO_INSTALL = "run `bash install.sh`, or `pip install --no-deps colossalai==0.5.0`"


def check_installed() -> None:
    """Raise ValueError, with the command to run, if Colossal-AI is not installed. Imports nothing."""
    if find_spec("colossalai") is None:
        raise ValueError(
            f"training needs Colossal-AI, which is not installed: {HOW_TO_INSTALL} (sampling does without)"
        )


def load() -> ModuleType:
    """Import Colossal-AI, fix it, and return opendit.parallel.colossal.plugins.

    Raises:
        ImportError: it is not installed; the message has the command to run.
    """
    from opendit.parallel.colossal import compat

    compat.prepare()  # makes the imports of what follows work
    from opendit.parallel.colossal import plugins

    plugins.register()
    return plugins
