"""The version, the project's, and so what depends on it: clients of one version go together."""

from pathlib import Path

from setuptools import setup

VERSION = (Path(__file__).resolve().parents[2] / "VERSION").read_text().strip()

setup(
    version=VERSION,
    install_requires=[
        "matplotlib>=3.8",
        "numpy>=1.26",
        "rich>=13",
        "safetensors>=0.4",
        f"spillway[transformers]=={VERSION}",
        "typer>=0.12",
    ],
)
