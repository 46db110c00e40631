"""The only modules that import colossalai: what it needs mended, its ZeRO optimizer, its plugins.

Nothing here is imported or changed before :func:`load` is called.
"""

from types import ModuleType


def load() -> ModuleType:
    """Imports Colossal-AI, mends what has to be mended in it, and returns opendit.parallel.colossal.plugins.

    Raises ImportError, with the command to run, if it is not installed.
    """
    from opendit.parallel.colossal import compat

    compat.prepare()  # makes the imports of what follows work
    from opendit.parallel.colossal import plugins

    plugins.register()
    return plugins
