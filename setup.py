"""Packaging of OpenDiT. constraints.txt lists tested versions of all dependencies."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

REMOTE = ["fsspec", "aiohttp"]  # for tars at http:// and https:// addresses
COMPLETION = ["shtab>=1.7"]
# For the documentation site. mkdocs 2 has a different plugin format.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.30"]
PAGE = ["gradio>=6"]  # does not accept pillow 13 yet
TEST = [
    "basedpyright>=1.39",  # pyright, but downloads nothing at run time
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
    """Copies the root's programs into the wheel as opendit/cli/scripts, where the command ``opendit`` finds them. As
    top-level modules, ``train`` and ``sample`` could clash with other packages. An editable installation runs the
    programs from the root."""

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
        "matplotlib",  # plots
        "scipy",  # SVHN's .mat files
        "tqdm",
        "numpy",
        "pillow",
        "pydantic>=2.14",  # checks JSON that is read from disk
        "pyyaml",  # configurations of several data sources
        # install.sh installs colossalai 0.5.0 with --no-deps, because training does not need its pinned versions
        # (torch<=2.5.1, ...). Its training code imports these packages:
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
