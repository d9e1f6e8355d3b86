"""Tests of where a cluster's daemons keep their files."""

from __future__ import annotations

from pathlib import Path

from spillway_kv.cluster.settings import Settings


def test_ray_clusters_of_one_machine_share_no_folder() -> None:
    settings = Settings(state_folder="/state", arena_folder="/rows")
    one = settings.folder("10.0.0.1:6379", "spillway", 0), settings.arena("10.0.0.1:6379", "a", 0)
    assert one[0] == Path("/state/10.0.0.1-6379/spillway/0")
    assert one[1] is not None
    assert one[1].name.endswith("-10.0.0.1-6379-a-0")
    assert settings.folder("10.0.0.1:6380", "spillway", 0) != one[0]
    assert settings.arena("10.0.0.1:6380", "a", 0) != one[1]
    assert settings.folder("[fd00::1]:6379", "spillway", 0).parts[2] == "-fd00--1--6379"
