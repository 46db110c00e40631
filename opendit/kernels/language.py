"""Triton, where it is installed; as checkers of types and machines without it see it."""

from typing import TYPE_CHECKING, Any, TypeAlias

TRITON: bool  # whether it is installed
if TYPE_CHECKING:
    # Triton reads kernels' source in a language that is Python by its grammar alone, in which checkers find errors that
    # are none; and it is called as kernel[grid](...), with arguments that no kernel has (num_warps). So to them all of
    # it is Any.
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
    except ImportError:  # CPU-only or macOS torch: the references still work, kernels_available says why kernels don't

        class _MissingTriton:
            constexpr = object

            @staticmethod
            def jit(function=None, **options):
                return function or (lambda f: f)

        triton = tl = _MissingTriton()
        TRITON = False
    else:
        TRITON = True
