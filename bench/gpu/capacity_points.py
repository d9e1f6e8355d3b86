"""The records of capacity.py and arrivals.py, as the pictures and tables need them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from records import Record, label
from spillway_kv.lab.evaluation import style

HOST_GIB = 512
# Names and colours of ways, in the order of legends and tables.
WAYS = {
    "dense bf16": ("dense, bf16", style.BLACK),
    "dense fp8": ("dense, FP8", style.GREY),
    "spillway bf16": ("Spillway, bf16 rows", style.BLUE),
    "spillway int8": ("Spillway, 8-bit rows", style.RED),
}
MEMORIES = {
    "gpu": "GPU memory",
    "host_256_gib": "256 GiB in the host",
    "host_512_gib": "512 GiB in the host",
}


@dataclass(frozen=True)
class Curve:
    """A way at one length and link.

    Attributes:
        way: Its name in the records.
        points: Records of the counts that fit, by count.
        most: How many sequences fit.
        limit: What limits them, of MEMORIES.
        measured: Whether its times are measured, and not computed from another way's.
    """

    way: str
    points: list[Record]
    most: int
    limit: str
    measured: bool

    @property
    def name(self) -> str:
        """Its name for people."""
        name = WAYS[self.way][0]
        return name if self.measured else f"{name} (computed)"

    @property
    def best(self) -> Record:
        """The point with the most tokens a second. REQUIRES: points."""
        return max(self.points, key=lambda point: float(point["tokens_per_s"]))

    @property
    def full(self) -> bool:
        """Whether the last point takes all memory."""
        return bool(self.points) and int(self.points[-1]["sequences"]) == self.most

    @property
    def end(self) -> str:
        """Why it ends."""
        if not self.points:
            return f"not one sequence fits {MEMORIES[self.limit]}"
        if self.full:
            return f"{self.most} fill {MEMORIES[self.limit]}"
        return f"{self.most} would fill {MEMORIES[self.limit]}"


def limit_of(record: Record, host_gib: int = HOST_GIB) -> tuple[int, str]:
    """How many sequences fit in all, and what limits them."""
    most = record["sequences_max"]
    found = [(most[name], name) for name in ("gpu", f"host_{host_gib}_gib")]
    return min((count, name) for count, name in found if count is not None)


def curve(way: str, records: Iterable[Record], host_gib: int = HOST_GIB) -> Curve:
    """The curve of a way from its records of one length and link."""
    ordered = sorted(records, key=lambda record: int(record["sequences"]))
    fits = [r for r in ordered if r["fits_gpu"] and r[f"fits_host_{host_gib}_gib"]]
    # Workspaces grow with the sequences, so the largest count knows best.
    most, limit = limit_of(fits[-1] if fits else ordered[0], host_gib)
    return Curve(way, fits, most, limit, "computed" not in ordered[0])


# Records by length and whether the link has a load, by way, by count.
Grouped = dict[tuple[int, bool], dict[str, dict[int, Record]]]


def _grouped(records: Iterable[Record]) -> Grouped:
    """Measured points. Later records replace earlier ones."""
    found: Grouped = {}
    for record in records:
        if record.get("way") in WAYS and "skipped" not in record:
            of_panel = found.setdefault((record["tokens"], "load_gb_per_s" in record), {})
            of_panel.setdefault(record["way"], {})[record["sequences"]] = record
    return dict(sorted(found.items()))


def _curves(ways: dict[str, dict[int, Record]], host_gib: int) -> list[Curve]:
    return [curve(way, ways[way].values(), host_gib) for way in WAYS if way in ways]


def panels(records: Iterable[Record], host_gib: int = HOST_GIB) -> dict[str, list[Curve]]:
    """Curves by length and link; the title of each.

    Dense attention does not use the link, so it is the same beside another process's copies.
    """
    found = _grouped(records)
    made = {}
    for (tokens, loaded), ways in found.items():
        title = f"{label(tokens)} tokens each"
        if loaded:
            rate = max(r["load_gb_per_s"] for points in ways.values() for r in points.values())
            title += f", beside {round(rate)} GB/s of other copies"
            alone = found.get((tokens, False), {})
            ways = {**{way: alone[way] for way in alone if way.startswith("dense")}, **ways}
        made[title] = _curves(ways, host_gib)
    return made


def lengths(records: Iterable[Record], host_gib: int = HOST_GIB) -> dict[int, list[Curve]]:
    """Curves by length, of runs that have the link to themselves."""
    return {
        tokens: _curves(ways, host_gib)
        for (tokens, loaded), ways in _grouped(records).items()
        if not loaded
    }


def arrivals_by_way(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records of arrivals.py by way, each ordered by rate. Later ones replace earlier ones."""
    found: dict[str, dict[float, Record]] = {}
    for record in records:
        if record.get("way") in WAYS and "requests_per_s" in record:
            found.setdefault(record["way"], {})[record["requests_per_s"]] = record
    return {way: [found[way][rate] for rate in sorted(found[way])] for way in WAYS if way in found}


def name_of(records: list[Record]) -> str:
    """A way's name for people, from its records."""
    name = WAYS[records[0]["way"]][0]
    return f"{name} (computed)" if "computed" in records[0] else name


def machine(records: list[Record]) -> dict[str, Any]:
    """GPU, commits and dates of records."""
    return {
        "gpu": ", ".join(sorted({record["gpu"] for record in records})),
        "commits": ", ".join(sorted({record["commit"] for record in records})),
        "dates": ", ".join(sorted({record["date"] for record in records})),
    }
