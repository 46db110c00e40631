"""Packaging of OpenDiT. constraints.txt lists tested versions of all dependencies."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

REMOTE = ["fsspec", "aiohttp"]  # for tars at http:// and https:// addresses
COMPLETION = ["shtab>=1.7"]
# The documentation as a site. mkdocs 2 has another plugin format.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.30"]
PAGE = ["gradio>=6"]  # does not accept pillow 13 yet
TEST = [
    "basedpyright>=1.39",  # pyright without downloads
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "ruff",
    "peft>=0.17",
    "playwright",
    "pyarrow>=15",
    "webdataset",
    "wids",
    "braceexpand",
    *REMOTE,
    "s3fs",
    "moto[s3]",  # an S3-compatible server; needs flask
    "flask",
    "flask-cors",
    *COMPLETION,
    *PAGE,
    *DOCS,
]
SCRIPTS = ("train.py", "sample.py", "preprocess.py")


class BuildWithScripts(build_py):
    """Puts the root's programs into the wheel as opendit/cli/scripts, for the command ``opendit``. Other packages may
    have top-level modules called ``train`` and ``sample``. An editable installation runs the programs from the root."""

    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):
            for name in SCRIPTS:
                self.mkpath(str(Path(self.build_lib, "opendit", "cli", "scripts")))
                self.copy_file(name, str(Path(self.build_lib, "opendit", "cli", "scripts", name)))


setup(
    name="opendit",
    version="0.2.0",
    description="Fast, memory-lean training and sampling of Diffusion Transformers on Colossal-AI",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["opendit", "opendit.*"]),
    package_data={"opendit": ["py.typed"]},
    cmdclass={"build_py": BuildWithScripts},
    entry_points={"console_scripts": ["opendit = opendit.__main__:main"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",
        "torchvision",
        "timm>=1.0",
        "diffusers>=0.30",
        "transformers>=4.51",
        "av>=14",
        "einops",
        "safetensors>=0.4",
        "tensorboard",
        "scikit-learn",
        "matplotlib",  # pictures of curves
        "scipy",  # SVHN's .mat files
        "tqdm",
        "numpy",
        "pillow",
        "pydantic>=2.14",  # checks JSON that is read from disk
        "pyyaml",  # several sources in one run
        # colossalai 0.5.0 itself is installed with --no-deps by install.sh: its pins (torch<=2.5.1, ...)
        # are not real for training. These are what its training path imports:
        "packaging",
        "psutil",
        "rich",
    ],
    extras_require={
        "test": TEST,
        "dev": ["pre-commit", *TEST],
        "parquet": ["pyarrow>=15"],
        "flash": ["flash-attn"],
        "completion": COMPLETION,
        "page": PAGE,
        "docs": DOCS,
        "wandb": ["wandb"],
        "mlflow": ["mlflow>=3"],
        "remote": REMOTE,
        "torchcodec": ["torchcodec"],  # needs FFmpeg's shared libraries: apt-get install ffmpeg
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
