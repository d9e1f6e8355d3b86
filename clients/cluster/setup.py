"""The version, the project's, and so what depends on it: clients of one version go together."""

from pathlib import Path

from setuptools import setup

VERSION = (Path(__file__).resolve().parents[2] / "VERSION").read_text().strip()

setup(
    version=VERSION,
    install_requires=["ray>=2.60,<3", "rich>=13", f"spillway=={VERSION}", "typer>=0.12"],
)
