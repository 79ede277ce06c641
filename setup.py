"""Metadata of the distribution; the pins come from ``torch_pruner/constraints.txt``."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "torch_pruner"
PINS = dict(re.findall(r"^(\S+?)==(\S+)", (PACKAGE / "constraints.txt").read_text(), re.MULTILINE))
VERSION = re.findall(r'^__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
README = ROOT / "README.md"
TVM = PINS["apache-tvm"]

setup(
    name="torch-pruner",
    version=VERSION[0],
    description="A torch.compile backend that tunes kernels with TVM, after the Pruner papers",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["pytorch", "torch.compile", "tvm", "auto-tuning", "compiler"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Compilers",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["torch_pruner", "torch_pruner.*"]),
    package_data={
        "torch_pruner": ["constraints.txt", "py.typed", "weights/*", "codegen/tir/*.pyi"]
    },
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11,<2.16",
        f"apache-tvm[popen-pool]=={TVM}",  # the extra holds what its own worker pools import
        f"apache-tvm-ffi=={PINS['apache-tvm-ffi']}",
        "filelock",
        "numpy",
        "onnx",
        "platformdirs",
        "typing_extensions",
    ],
    extras_require={
        "curve": ["matplotlib"],
        "demo": ["transformers"],
        "dev": [
            "expecttest",
            "hypothesis",
            "mypy",
            "nvidia-cuda-crt",  # GPU kernels become machine code in tests, where no GPU is needed
            "nvidia-cuda-nvrtc",
            "nvidia-cuda-runtime",
            "pre-commit",
            "pytest>=8",
            "pytest-xdist>=3",  # tests on all cores: most of their time is one compiler thread
            "ruff",
            "setuptools",
            "tornado",  # the tracker of a fleet, which tests start
            "transformers",
            "triton",  # kernels in its language are built and interpreted in tests, without a GPU
        ],
        "decode-peers": ["ctranslate2", "gguf", "nncf", "openvino", "torchao", "transformers"],
        "llama-cpp": ["gguf", "llama-cpp-python"],  # built from source: minutes, and a compiler
        "peers": ["onnxruntime", "onnxscript", "openvino", "transformers"],
        "search": [
            "matplotlib",
            "transformers",
            "xgboost-cpu",
        ],  # benchmarks.search and its picture
        "rpc": [f"apache-tvm[rpc]=={TVM}"],
        "triton": ["triton"],  # what CUDA builds of torch bring along
        "xgboost": ["xgboost"],
        "cuda": [f"apache-tvm[cuda]=={TVM}"],
    },
    entry_points={
        "torch_dynamo_backends": ["pruner = torch_pruner.dynamo.backend:pruner"],
        "console_scripts": ["torch-pruner = torch_pruner.cli.main:main"],
    },
)
