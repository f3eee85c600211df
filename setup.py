"""Package metadata; the tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "parwrap" / "__init__.py").read_text("utf-8"))[1]

setup(
    name="parwrap",
    version=VERSION,
    description="Run a plain single-GPU PyTorch training function or script on many ranks, unchanged",
    long_description=(HERE / "README.rst").read_text("utf-8"),
    long_description_content_type="text/x-rst",
    author="the parwrap authors",
    license_expression="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords=["pytorch", "distributed training", "data parallel", "ddp", "fsdp", "zero", "deep learning"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["parwrap", "parwrap.*"]),
    package_data={"parwrap": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.9", "wrapt>=2.5", "numpy"],
    extras_require={
        "report": ["matplotlib", "rich"],
        "progress": ["tqdm"],
        "test": [
            "pytest>=8.1",
            "pytest-xdist",
            "hypothesis",
            "psutil",
            "tqdm",
            "rich",
            "docutils",
            "h5py",
            "matplotlib",
            "pandas",
            "safetensors",
            "scikit-learn",
            "tensorboard",
            "torchdata",
            "torchmetrics",
            "PyYAML",
            "cloudpickle",
            "ipykernel",
            "jupyter_client",
            "ruff",
            "mypy",
            "build",
            "setuptools>=77",  # which builds the package
            "twine",
        ],
        "notebook": ["cloudpickle"],
        "kubeflow": ["PyYAML"],
        "ray": ["ray[train]>=2.60"],
        "dali": ["nvidia-dali-cuda120>=2.4"],
        "streams": ["datasets", "webdataset"],
        "trackers": ["wandb", "mlflow-skinny"],
        "examples": ["scikit-learn"],
        "bench": ["accelerate", "lightning-fabric"],
    },
    entry_points={"console_scripts": ["parwrap = parwrap.__main__:main"], "pytest11": ["parwrap = parwrap.testing.plugin"]},
)
