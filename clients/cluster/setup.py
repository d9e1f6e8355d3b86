"""Sets the project's version. Packages work together only if their versions are equal.

If SPILLWAY_SHARE names a folder with man pages and completions, the wheel contains them
(scripts/wheels.sh).
"""

import os
from pathlib import Path

from setuptools import setup

VERSION = (Path(__file__).resolve().parents[2] / "VERSION").read_text().strip()
SHARE = Path(os.environ.get("SPILLWAY_SHARE", "/none"))

setup(
    version=VERSION,
    data_files=[
        (f"share/{file.parent.relative_to(SHARE)}", [os.path.relpath(file, Path(__file__).parent)])
        for file in sorted(SHARE.rglob("*"))
        if file.is_file()
    ],
    install_requires=["ray>=2.60,<3", "rich>=13", f"spillway=={VERSION}", "typer>=0.12"],
)
