"""List the test files that run in Triton's interpreter; test_interpreter.py starts one process for each tuple.

The tests in the tuple with test_fp8_sequence.py are listed in thorough.txt, because tests/gpu runs the same tests on a
GPU.
"""

INTERPRETED = (
    (
        "test_operators.py",
        "test_fp8.py",
        "test_add_table.py",
        "test_base_precision_kernel.py",
        "test_filled_heads.py",
        "test_first_row.py",
        "test_join_heads.py",
        "test_low_rank.py",
        "test_philox.py",
        "test_sampling_step.py",
        "test_short_attention.py",
        "test_split_heads.py",
        "test_exchange_heads.py",
        "test_sum_parts.py",
    ),
    (
        "test_kernels_in_models.py",
        "test_packed_models.py",
        "test_recompute.py",
        "test_rotate_heads.py",
        "test_tensor_parallel.py",
    ),
    ("test_fp8_sequence.py", "test_fp8_shards.py", "test_fp8_fsdp.py", "test_public_fp8.py", "test_fp8_lora.py"),
)
FILES = frozenset(name for names in INTERPRETED for name in names)
RUNNER = "test_interpreter.py"
