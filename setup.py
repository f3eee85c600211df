"""Package metadata; the tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "parwrap" / "__init__.py").read_text())[1]

setup(
    name="parwrap",
    version=VERSION,
    description="Run a plain single-GPU PyTorch training function or script on many ranks, unchanged",
    long_description=(HERE / "README.rst").read_text(),
    long_description_content_type="text/x-rst",
    license="BSD-3-Clause",
    packages=find_packages(include=["parwrap", "parwrap.*"]),
    package_data={"parwrap": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.9", "wrapt>=2.5", "numpy"],
    extras_require={
        "report": ["matplotlib"],
        "progress": ["tqdm"],
        "test": [
            "pytest>=8.1",
            "pytest-xdist",
            "hypothesis",
            "psutil",
            "tqdm",
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
