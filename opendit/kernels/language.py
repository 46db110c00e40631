"""Triton, where it is installed, and as type checkers and machines without it see it."""

from typing import TYPE_CHECKING, Any, TypeAlias

TRITON: bool  # True if it is installed
if TYPE_CHECKING:
    # Triton's language shares only its grammar with Python, so type checkers would report false errors in kernels, and
    # in calls kernel[grid](...) with arguments that no kernel declares (num_warps). To them, all of it is Any.
    class _Language(type[Any]):
        def __getattr__(cls, name: str) -> Any: ...

    class triton(metaclass=_Language):
        """Stand-in for the package triton."""

    class tl(metaclass=_Language):
        """Stand-in for triton.language."""

        constexpr: TypeAlias = Any

else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # CPU-only or macOS torch: references work, and kernels_available explains why kernels don't

        class _MissingTriton:
            constexpr = object

            @staticmethod
            def jit(function=None, **options):
                return function or (lambda f: f)

        triton = tl = _MissingTriton()
        TRITON = False
    else:
        TRITON = True
