"""The pages of committed results agree with the records beside them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import ROOT

RESULTS = ROOT / "docs/results"
if not RESULTS.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)


def made(folder: Path, *command: str | Path) -> str:
    """The page that a report makes in a folder."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "README.md").read_text()


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A copy of the records of the GPU's page."""
    for path in (RESULTS / "gpu").iterdir():
        if path.suffix in (".json", ".jsonl", ".csv"):
            shutil.copy(path, tmp_path)
    return tmp_path


def report_gpu(folder: Path) -> str:
    return made(folder, ROOT / "bench/gpu/report.py", "--results", folder)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_the_cpu_page(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    page = made(tmp_path, ROOT / "bench/report.py", tmp_path)
    assert page == (RESULTS / "README.md").read_text()


def test_the_gpu_page(gpu: Path) -> None:
    assert report_gpu(gpu) == (RESULTS / "gpu/README.md").read_text()


def test_bounds_come_from_the_records(gpu: Path) -> None:
    # Changes the fastest dense attention at 1M, the best rate at which multiprocessors load rows,
    # and the memory of codes.
    edit(gpu / "peers.jsonl", '"us": 955.9040069580078', '"us": 412.3')
    edit(gpu / "link.csv", ",51.40440586987429,", ",52.5,")
    huggingface = (gpu / "huggingface.jsonl").read_text()
    (gpu / "huggingface.jsonl").write_text(
        huggingface.replace('"device_code_bytes": 247332864', '"device_code_bytes": 419430400')
    )
    page = report_gpu(gpu)
    assert (
        "attend | 513 us | | < 412 us, dense attention with K/V in GPU memory | **missed** |"
        in page
    )
    assert "within an attend | 51.0 GB/s | 52.5 GB/s |" in page
    assert "without scoring and moving its rows at 52.5 GB/s |" in page
    assert "d = 128, 3 bits | 100.0 B |" in page
