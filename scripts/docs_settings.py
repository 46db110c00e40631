"""Settings of scripts/run_docs.py, which runs the commands of the documentation pages on a CPU within seconds.

The settings are smaller sizes, stand-ins for the reader's own files, and commands that are not run, with the reason.
Patterns are regular expressions. They are searched in a command's text (the result of ``shlex.join``) or in Python
code.
"""

# (pattern, replacement) for every command, applied in this order. They also rename run folders, whose names contain the
# model's name.
SUBSTITUTIONS = [
    (r"outputs/000-(DiT-Ti-2|vDiT-Ti-822)", r"digits/000-\1"),  # the demos' runs; the next line also makes Ti runs
    (r"\b(v?DiT|ST-DiT|EC-DiT|MovieGen)-(?:S|B|L|XL|1B|5B|7B)([/-])(?=\d)", r"\1-Ti\2"),
    (r"--num_sampling_steps 20 50 250", "--num_sampling_steps 2 3 4"),
    (r"--metrics fid precision", "--metrics frechet_distance precision"),  # fid needs the published Inception
    (r"--pack_tokens 65536", "--pack_tokens 4096"),
    (r"--image_size 512 --bucket_tokens 16384", "--image_size 64 --bucket_tokens 64"),
    (r"--(?:sequence_parallel_size 4|tensor_parallel_size 2) --cfg_parallel", "--cfg_parallel"),  # 2 processes
    (r"--patch_bottleneck 128", "--patch_bottleneck 64"),  # fewer than a token's channels
    (r"--num_frames 64", "--num_frames 16"),
    (r"/data/coyo", "coyo"),  # write to no folder at the machine's root
    (r'device="cuda:1"', 'device="cpu"'),
    (r"\bsteps=(?:20|50)", "steps=2"),
    (r"\[3\] \* 100", "[3] * 4"),
    (r"max_steps=10_000", "max_steps=2, batch_size=2, num_workers=0, sample_steps=2"),
]
# (pattern, replacement) for dry runs only. Their large batches need data sets with many rows.
OF_DRY_RUNS = [
    (r"--data_path (?:clips\.csv|data\.csv|CSV)", "--data_path many.csv"),
    (r"--data_path (?:FOLDER|\./imagenet/train|CIFAR/train)", "--data_path digits"),
]

# Program -> flag -> upper limit of the flag's value. The flag is added to commands without it.
LIMITS = {
    "train": {"--max_steps": 2, "--batch_size": 2, "--num_workers": 0, "--sample_steps": 2},
    "sample": {"--num_sampling_steps": 6, "--num_samples": 4},
    "evaluate": {"--num_sampling_steps": 3, "--num_samples": 24},
    "preprocess": {},
}
# Program -> (flags, words). The words are added to commands that have none of these flags.
UNLESS = {"train": (("--model", "--recipe"), ["--model", "DiT-Ti/2"])}
# Like LIMITS, but missing flags are not added.
LOWERED = {
    "train": {"--global_batch_size": 4, "--warmup_steps": 1, "--evaluate_every": 2, "--evaluate_samples": 20},
    "sample": {},
    "evaluate": {},
    "preprocess": {"--num_workers": 2},
}
# Flag -> words that are added to commands with this flag.
BESIDE = {
    "--evaluate_every": ["--evaluate_steps", "2"],
    "--evaluate_features": ["--evaluate_metrics", "fid"],
}

PROCESSES = 2  # most processes of a command; train.py with more processes becomes a dry run
# (pattern, reason): commands of train.py that become dry runs, because their models or samples are too large for a CPU.
DRY = [
    (r"--recipe (?!digits|list)", "a preset of a large model"),
]

# (pattern, reason): commands that are run only with --slow, unchanged.
SLOW = [(r"^bash train_(?:img|video)\.sh$", "trains for five to ten minutes (--slow)")]
# (pattern, reason): commands that are never run. Commands of OpenDiT's programs are parsed instead.
NOT_RUN = [
    (r"^(?:bash install\.sh|\. |pip install)", "changes the environment"),
    (r"run_tests\.sh|-m pytest", "the tests, which run by themselves"),
    (r"^sbatch ", "needs Slurm"),
    (r"^colossalai run --hostfile", "needs other machines"),
    (r"^colossalai run", "needs fabric, which training does not"),
    (r"--nnodes", "needs other machines"),
    (r"opendit page|^mkdocs serve", "a server that does not end; tests/sampling/page starts it"),
    (r"page_screenshot\.py", "needs Chromium and a server"),
    (r"benchmarks[/.]bench_(?!faults\.py --list)", "a benchmark"),
    (r"benchmarks/plot\.py", "draws the repository's own pictures anew"),
    (r"http://host|s3://bucket", "needs a server; tests/data/shards starts one"),
    (r"opendit\.cli\.links", "measures the links between GPUs"),
    (r"--feature_precision tf32", "needs a GPU"),
    (r"golden retriever", "a line for each kind of model; tests/sampling/test_pipeline.py runs such lines"),
    (r"SamplingEngine\(model|sequence_parallel\(mesh", "a fragment, of objects that the reader has"),
    (r"Image\.open\(.000003", "of a picture that the page drew; tests/sampling/page reads one"),
]

# Page -> file or folder that its commands use -> stand-in (scripts/docs_stand_ins.py). An earlier command of the page
# must make any other file, or a block of the page must show it, with the file's name in the block's first line.
GIVEN = {
    "README.md": {
        "pictures": "pictures",
        "CLIPS": "clips",
        "DiT-XL-2-256x256.pt": "meta",
        "RUN": "run",
        "REFERENCE": "pictures",
        "DATA": "pictures",
        "TARS": "tars",
        "LATENT_TARS": "latent_tars",
    },
    "docs/README.md": {
        "pictures": "pictures",
        "CLIPS": "clips",
        "CLIPS_RUN": "clips_run",
        "DiT-XL-2-256x256.pt": "meta",
        "LORA_RUN": "lora_run",
        "RUN": "run",
    },
    "docs/better_training.md": {
        "PICTURES": "pictures",
        "dinov2-base": "vision_encoder",
        "RUN": "meanflow_run",
        "REFERENCE": "pictures",
    },
    "docs/checkpoints.md": {
        "pictures": "pictures",
        "outputs/000-DiT-XL-2": "run",
        "DiT-XL-2-256x256.pt": "meta",
    },
    "docs/data.md": {
        "pictures": "pictures",
        "TARS": "tars",
        "LATENT_TARS": "latent_tars",
        "/data/coyo": "energon",
        "metadataset.yaml": "metadataset",
    },
    "docs/evaluation.md": {
        "outputs/000-DiT-XL-2": "run",
        "VIRTUAL_imagenet256_labeled.npz": "reference",
        "samples.npz": "samples",
        "reference.npz": "reference",
        "pictures": "pictures",
        "RUN": "run",
        "REFERENCE": "pictures",
        "DiT-XL-2-256x256.pt": "meta",
        "imagenet/train": "pictures",
        "outputs/000-DiT-Ti-2": "digits_run",
        "digits.npz": "digits_samples",
        "outputs/000-DiT-S-2": "run",
        "outputs/001-DiT-S-2": "run",
    },
    "docs/finetuning.md": {
        "RUN": "run",
        "FOLDER": "pictures",
        "DiT-XL-2-256x256.pt": "meta",
        "BASE": "run",
        "LORA_RUN": "lora_run",
    },
    "docs/images.md": {"pictures": "pictures", "outputs/000-DiT-Ti-2": "digits_run_with_samples"},
    "docs/kernels.md": {"latents": "latents"},
    "docs/launching.md": {"data.csv": "captioned"},
    "docs/mixing.md": {
        "pictures": "pictures",
        "more": "more",
        "pictures.csv": "captioned",
        "more.csv": "captioned",
        "media.csv": "mixed",
    },
    "docs/parallelism.md": {"CSV": "table", "FOLDER": "pictures", "RUN": "clips_run"},
    "docs/python.md": {
        "outputs/000-vDiT-XL-222": "clips_run",
        "outputs/000-DiT-XL-2": "run",
        "weights.safetensors": "weights",
        "DiT-XL-2-256x256.pt": "meta",
        "dit-pipeline": "diffusers",
        "pictures": "pictures",
    },
    "docs/recipes.md": {"CLIPS": "clips"},
    "docs/sampling.md": {"outputs/000-DiT-XL-2": "run", "RUN": "run", "model.pt": "meta", "dit-pipeline": "diffusers"},
    "docs/sequence_parallel.md": {"CSV": "table"},
    "docs/training.md": {"latents": "latents", "pictures": "pictures", "clips.csv": "table"},
    "docs/validation.md": {
        "pictures": "pictures",
        "train.csv": "captioned",
        "test.csv": "others",
        "VIRTUAL_imagenet256_labeled.npz": "reference",
    },
    "docs/video.md": {
        "CLIPS": "clips",
        "RUN": "clips_run",
        "prompts.txt": "prompts",
        "seven.png": "picture",
        "seven.mp4": "clip",
        "outputs/000-vDiT-Ti-822": "digits_clips_run",
    },
}
