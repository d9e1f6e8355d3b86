"""Three daemons for all tests: what is split lies on two or three of them, its whole on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from daemon_process import running_daemon


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Of the daemons."""
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(f"daemon{number}") for number in range(3)]
        flags = ("--memory-limit", "512MiB")
        yield [stack.enter_context(running_daemon(folder, *flags)) for folder in folders]
